"""Two processes over gloo do what one does with as many batches a step; one that fails ends the run."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from alula.train.checkpoint import load_state
from alula.train.config import TrainConfig
from alula.train.run import run
from tests.engine.tiny import save_tiny_llama
from tests.train.tiny_run import learned, start, tiny_run, tiny_start


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny") / "model", layers=3)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    return tiny_start(tmp_path_factory.mktemp("start"), model)


def accumulating(folder: Path, model: Path, **changes: Any) -> TrainConfig:
    config = tiny_run(folder, model, features="stored", **changes)
    return replace(config, recipe=replace(config.recipe, accumulate=2, tokens_per_batch=25))


def together(config: TrainConfig, *, fails_at: int = 0) -> list[tuple[int, str]]:
    """Exit code and errors of two processes; the second may fail at a step."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [start(config, rank=rank, ranks=2, port=port, fails_at=fails_at * rank) for rank in (0, 1)]
    try:
        told = [process.communicate(timeout=400)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, text) for process, text in zip(processes, told, strict=True)]


@pytest.mark.slow
def test_two_processes_are_one_that_accumulates(tmp_path: Path, model: Path, head: Path) -> None:
    alone = accumulating(tmp_path / "alone", model, start_from=head)
    run(alone)
    for fsdp in (False, True):
        shared = accumulating(tmp_path / f"shared{fsdp}", model, start_from=head, fsdp=fsdp)
        (first, told), (second, silent) = together(shared)
        assert (first, second) == (0, 0), told + silent
        assert "learned tokens" in told and "learned tokens" not in silent
        _check_alike(shared, alone)


def _check_alike(shared: TrainConfig, alone: TrainConfig) -> None:
    """Losses and, in the end, weights; the checkpoint does not show how many wrote it."""
    states = [load_state(config.output / "checkpoint.pt") for config in (shared, alone)]
    for name, tensor in states[1]["head"].items():  # type: ignore[index]
        torch.testing.assert_close(states[0]["head"][name], tensor, rtol=1e-3, atol=1e-4)  # type: ignore[index]
    found, expected = learned(shared), learned(alone)
    assert len(found) == len(expected) > 5
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-5)


@pytest.mark.slow
def test_a_process_that_fails_ends_the_run(tmp_path: Path, model: Path) -> None:
    config = accumulating(tmp_path, model)
    (first, told), (second, fault) = together(config, fails_at=3)
    assert second == 1 and "RuntimeError: a fault of this process" in fault
    assert first == 2 and "alula: error: another training process has ended" in told
    assert [entry["step"] for entry in learned(config)] == [1, 2]
