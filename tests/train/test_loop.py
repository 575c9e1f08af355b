"""What is kept: the best in service, whatever came after it, and checkpoints when they are due."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from alula.train.checkpoint import load_state
from alula.train.config import Recipe, TrainConfig
from alula.train.interrupt import Interruption
from alula.train.logs import read_log
from alula.train.loop import Keeper, Loop
from alula.train.meter import Meter
from alula.train.methods.options import Eagle3Options
from alula.train.report import Report
from alula.train.throughput import Throughput
from alula.train.trainer import Trainer
from tests.train.support import FakeTarget, conversations, eagle3, store


class Scripted:
    """A served evaluation that finds these taus, one after the other."""

    def __init__(self, taus: list[float], tokens: int = 64) -> None:
        self.prompts = [(1, 2)]
        self.folders: list[str] = []
        self._taus: Iterator[float] = iter(taus)
        self._tokens = tokens

    def settings(self) -> dict[str, Any]:
        return {"prompts": 1, "tokens": self._tokens}

    def run(self, folder: Path, *_: object) -> dict[str, Any]:
        self.folders.append(folder.name)
        assert (folder / "model.safetensors").exists()
        tau = next(self._taus)
        figures = {"tau": tau, "acceptance_rate": 0.5, "acceptance_by_depth": {"1": 0.5}}
        return {**self.settings(), **figures, "estimate": {"tau": tau}}


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alula.train.loop.available", lambda: False)


def begun(folder: Path, evaluation: Scripted, **changes: Any) -> tuple[TrainConfig, Trainer, Keeper]:
    recipe = Recipe(total_tokens=400, tokens_per_batch=40, warmup_tokens=40)
    config = TrainConfig(folder, recipe=recipe, **{"evaluate_minutes": 60.0, "save_minutes": 60.0, **changes})
    target, data = FakeTarget(), conversations(30)
    method = eagle3(target, Eagle3Options(steps=2))
    trainer = Trainer(method, store(target), recipe, lambda: data, seed=0)
    state = load_state(folder / "checkpoint.pt")
    if state is not None:
        trainer.restore(state)
    record = {"settings": {}, "data": []}
    keeper = Keeper(
        config,
        trainer,
        method,
        evaluation,  # type: ignore[arg-type]
        data[:2],
        record,
        {"facts": 1},
        Report(False),
        Meter(torch.device("cpu"), trainer.progress.tokens),
    )
    return config, trainer, keeper


def kept(folder: Path, name: str = "head") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / name / "provenance.json").read_text())["training"]
    return found


def test_head_is_the_best_in_service_and_last_the_newest(tmp_path: Path) -> None:
    _, trainer, keeper = begun(tmp_path, Scripted([1.2, 1.5, 1.3, 1.5]))
    for _ in range(4):
        keeper.evaluate(trainer.state())
        trainer.train_step()
    assert (kept(tmp_path)["step"], kept(tmp_path)["evaluation"]["served"]["tau"]) == (1, 1.5)
    assert (kept(tmp_path, "last")["step"], kept(tmp_path, "last")["evaluation"]["served"]["tau"]) == (3, 1.5)
    costs = [entry["run"] for entry in read_log(tmp_path / "log.jsonl")] + [kept(tmp_path)["run"]]
    assert all(cost["peak_memory_bytes"] > 0 and cost["tokens_per_second"] >= 0 for cost in costs)
    log = [entry["evaluation"] for entry in read_log(tmp_path / "log.jsonl")]
    assert [entry["kept"] for entry in log] == [True, True, False, False]
    assert all(len(entry["top1"]) == 2 for entry in log)


def test_the_best_is_known_after_an_interruption(tmp_path: Path) -> None:
    _, trainer, keeper = begun(tmp_path, Scripted([1.5]))
    keeper.evaluate(trainer.state())
    _, trainer, keeper = begun(tmp_path, Scripted([1.4, 1.6]))
    trainer.train_step()
    keeper.evaluate(trainer.state())
    assert kept(tmp_path)["step"] == 0
    keeper.evaluate(trainer.state())
    assert kept(tmp_path)["step"] == 1


def test_figures_of_other_settings_are_not_compared(tmp_path: Path) -> None:
    _, trainer, keeper = begun(tmp_path, Scripted([1.5]))
    keeper.evaluate(trainer.state())
    again = Scripted([1.1, 1.2], tokens=8)
    _, trainer, keeper = begun(tmp_path, again)
    trainer.train_step()
    keeper.evaluate(trainer.state())
    assert again.folders == ["head", "last"]
    assert kept(tmp_path)["step"] == 1


def test_a_head_that_says_nothing_of_service_is_replaced(tmp_path: Path) -> None:
    _, trainer, keeper = begun(tmp_path, Scripted([1.5, 1.0]))
    keeper.evaluate(trainer.state())
    (tmp_path / "head" / "provenance.json").write_text("{}")
    _, trainer, keeper = begun(tmp_path, Scripted([1.0]))
    keeper.evaluate(trainer.state())
    assert kept(tmp_path)["evaluation"]["served"]["tau"] == 1.0


@pytest.mark.parametrize(
    ("changes", "saves", "evaluations"),
    [({}, 2, 2), ({"evaluate_steps": 4}, 5, 5), ({"save_minutes": 0.0}, 15, 2), ({"evaluate_minutes": 0.0}, 15, 15)],
)
def test_what_is_due_when(
    changes: dict[str, Any], saves: int, evaluations: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, trainer, keeper = begun(tmp_path, Scripted([1.0] * 20), **changes)
    saved: list[int] = []
    save = keeper.save
    monkeypatch.setattr(keeper, "save", lambda state: (saved.append(state["progress"]["step"]), save(state)))
    meter = Meter(torch.device("cpu"), 0)
    Loop(config, trainer, keeper, Throughput(1.0, 1.0), Report(False), meter, Interruption(speaks=False)).run()
    steps = trainer.progress.step
    assert steps == 14 and saved[0] == 0 and saved[-1] == steps
    log = read_log(tmp_path / "log.jsonl")
    assert (len(saved), sum("evaluation" in entry for entry in log)) == (saves, evaluations)
    assert [entry["step"] for entry in log if "loss_0" in entry] == list(range(1, steps + 1))
