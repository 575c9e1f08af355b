"""Ctrl-C and SIGTERM while `alula train` runs: the step is finished and saved, and the run goes on bitwise the same."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from alula.cli import main
from alula.train.interrupt import Interruption, Stopped
from alula.train.logs import read_log
from tests.engine.tiny import save_tiny_llama
from tests.train.tiny_run import tiny_start, write_data

_SLOW = """
import signal, sys, time
from alula.cli import main
from alula.train.trainer import Trainer

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin without
step = Trainer.train_step
Trainer.train_step = lambda self: (time.sleep(float(sys.argv[1])), step(self))[1]
sys.exit(main(sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny") / "model", layers=3)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    return tiny_start(tmp_path_factory.mktemp("start"), model)


def command(output: Path, model: Path, head: Path) -> list[str]:
    data = write_data(output.parent / "data.jsonl")
    return shlex.split(
        f"train --output {output} --model {model} --data {data} --start-from {head} --dtype float32 --threads 1 "
        "--held-out-one-in 5 --served.held-out 0 --served.prompts 0 --recipe.total-tokens 300 "
        "--recipe.warmup-tokens 40 --recipe.tokens-per-batch 40 eagle3 --steps 2 "
        "--draft-vocab-size 24 --intermediate-size 32"
    )


def begun(arguments: list[str], *, seconds_per_step: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _SLOW, str(seconds_per_step), *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
    )


def steps(output: Path) -> list[dict[str, object]]:
    return [
        {name: entry[name] for name in ("step", "loss_0", "loss_1", "gradient_norm")}
        for entry in read_log(output / "log.jsonl")
        if "loss_0" in entry
    ]


def wait_for(output: Path, count: int, process: subprocess.Popen[str]) -> None:
    while process.poll() is None and len(steps(output)) < count:
        time.sleep(0.01)


@pytest.mark.slow
def test_the_first_signal_saves_and_the_run_goes_on(tmp_path: Path, model: Path, head: Path) -> None:
    cut, whole = tmp_path / "cut" / "run", tmp_path / "whole" / "run"
    for folder in (cut, whole):
        folder.parent.mkdir()
    with begun(command(cut, model, head), seconds_per_step=0.2) as process:
        wait_for(cut, 2, process)
        process.send_signal(signal.SIGTERM)
        told = process.communicate(timeout=60)[1]
    assert process.returncode == 143, told
    assert "SIGTERM: finishing the step and saving" in told and f"is saved in {cut / 'checkpoint.pt'}" in told
    reached = len(steps(cut))
    assert main(command(whole, model, head)) == 0
    assert reached < len(steps(whole)), "it was over before the signal"
    assert main(command(cut, model, head)) == 0
    assert steps(cut) == steps(whole)


@pytest.mark.slow
def test_a_second_signal_stops_at_once(tmp_path: Path, model: Path, head: Path) -> None:
    output = tmp_path / "run"
    with begun(command(output, model, head), seconds_per_step=120.0) as process:
        while process.poll() is None and not (output / "training.png").exists():
            time.sleep(0.01)  # it is drawn right before the first step
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert any("Ctrl-C: finishing" in line for line in process.stderr), "the first one was not heard"
        process.send_signal(signal.SIGINT)
        told = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert "is saved in" not in told and not steps(output)


def test_exit_codes_are_the_shells() -> None:
    assert (Stopped(signal.SIGINT, "").code, Stopped(signal.SIGTERM, "").code) == (130, 143)


def test_what_handled_signals_before_does_so_again() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Interruption(speaks=False) as interruption:
        os.kill(os.getpid(), signal.SIGTERM)
        assert interruption.number == signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) == before
    assert signal.getsignal(signal.SIGTERM) == before
