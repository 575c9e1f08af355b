"""Going on: the same losses after a kill, and nothing but the same run unless a change is named."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from alula.config import AlulaError
from alula.train.checkpoint import load_state
from alula.train.config import Recipe, TrainConfig
from alula.train.logs import RunLog, read_log
from alula.train.methods.options import Eagle3Options
from alula.train.resume import check_names, check_resumable, data_record, same_data, settings_of
from alula.train.run import run
from tests.engine.tiny import save_tiny_llama
from tests.train.tiny_run import learned, start, tiny_run, tiny_start, write_data


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny") / "model", layers=3)


@pytest.mark.slow
def test_a_killed_run_goes_on_with_bitwise_the_same_losses(tmp_path: Path, model: Path) -> None:
    head = tiny_start(tmp_path / "start", model)
    whole = tiny_run(tmp_path / "whole", model, start_from=head)
    run(whole)
    cut = tiny_run(tmp_path / "cut", model, start_from=head, save_minutes=0.001)
    after = random.Random().randint(2, 9)
    with start(cut) as process:
        while process.poll() is None and len(learned(cut)) < after:
            time.sleep(0.002)
        process.kill()
    state = load_state(cut.output / "checkpoint.pt")
    reached = state["progress"]["step"] if state else 0
    assert reached < learned(whole)[-1]["step"], "it was over before the kill"
    run(replace(cut, save_minutes=5.0))
    assert learned(cut) == learned(whole), f"cut after step {after}, gone on from step {reached}"
    final, expected = (load_state(config.output / "checkpoint.pt") for config in (cut, whole))
    assert final is not None and expected is not None
    assert all(torch.equal(tensor, expected["head"][name]) for name, tensor in final["head"].items())


def test_lines_of_steps_that_come_again_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    lines = [json.dumps({"step": step, "loss_0": 1.0}) for step in (1, 2, 3)]
    path.write_text("\n".join(["nonsense", *lines]) + '\n{"step": 4, "lo')
    assert [entry["step"] for entry in read_log(path)] == [1, 2, 3]
    log = RunLog(tmp_path, step=2, tensorboard=False)
    log.add({"step": 3, "loss_0": 2.0})
    assert [(entry["step"], entry["loss_0"]) for entry in read_log(path)] == [(1, 1.0), (2, 1.0), (3, 2.0)]


def test_tensorboard_gets_the_same_figures(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = RunLog(tmp_path, step=0, tensorboard=True)
    log.add({"step": 1, "tokens": 40, "loss_0": 2.5})
    log.add({"step": 1, "tokens": 40, "evaluation": {"top1": [0.5, 0.25], "served": {"tau": 1.5}, "kept": True}})
    log.close()
    found = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    names = ["tokens", "loss_0", "evaluation/top1/0", "evaluation/top1/1", "evaluation/served/tau"]
    assert sorted(found.Tags()["scalars"]) == sorted(names)
    assert [(event.step, event.value) for event in found.Scalars("evaluation/served/tau")] == [(1, 1.5)]


def test_data_may_grow_at_its_end_but_not_change(tmp_path: Path) -> None:
    path = write_data(tmp_path / "a.jsonl", 4)
    record = data_record([path])
    content = path.read_text()
    path.write_text(content + content)
    assert same_data(record, [path]) and same_data(record, [path, path])
    path.write_text(content[:-1])
    assert not same_data(record, [path])
    path.write_text(content.replace("prompt_ids", "tokens_ids", 1))
    assert not same_data(record, [path])
    assert not same_data(record, [])


CHANGES = (
    ({"recipe": Recipe(clip=2.0)}, "recipe.clip"),
    ({"method": Eagle3Options(steps=2)}, "method.steps"),
    ({"seed": 3}, "seed"),
    ({"dtype": "float32"}, "dtype"),
)


@pytest.mark.parametrize(("change", "name"), CHANGES)
def test_other_settings_are_refused_unless_they_are_named(change: dict[str, object], name: str, tmp_path: Path) -> None:
    files = [write_data(tmp_path / "a.jsonl", 4)]
    config = TrainConfig(output=tmp_path, data=tuple(files))
    state = {"settings": settings_of(config, "abc"), "data": data_record(files)}
    now = settings_of(replace(config, **change), "abc")  # type: ignore[arg-type]
    path = tmp_path / "checkpoint.pt"
    check_resumable(path, state, state["settings"], files, ())  # type: ignore[arg-type]
    check_resumable(path, state, now, files, (name,))
    with pytest.raises(AlulaError, match=rf"{path} is of {name} .*--change {name}"):
        check_resumable(path, state, now, files, ("max_tokens",))
    with pytest.raises(AlulaError, match="is of target 'abc', and this run's is 'xyz'"):
        check_resumable(path, state, settings_of(config, "xyz"), files, ())
    files[0].write_text("{}\n")
    with pytest.raises(AlulaError, match=r"is of other data.*--change data"):
        check_resumable(path, state, settings_of(config, "abc"), files, ())
    check_resumable(path, state, settings_of(config, "abc"), files, ("data",))


def test_what_does_not_decide_the_losses_may_change_freely(tmp_path: Path) -> None:
    config = TrainConfig(output=tmp_path)
    others = replace(config, output=tmp_path / "x", save_minutes=1.0, threads=1, features="stored", change=("seed",))
    assert settings_of(config, "abc") == settings_of(others, "abc")
    with pytest.raises(AlulaError, match="change names 'sede': give one of data, target"):
        check_names(("sede",), settings_of(config, "abc"))


def test_other_data_is_planned_anew(tmp_path: Path, model: Path) -> None:
    config = tiny_run(tmp_path, model, recipe=Recipe(total_tokens=80, tokens_per_batch=40))
    run(config)
    write_data(config.data[0], 60)
    lines = config.data[0].read_text().splitlines(keepends=True)
    config.data[0].write_text("".join(lines[20:]))
    longer = replace(config, recipe=replace(config.recipe, total_tokens=160), change=("recipe.total_tokens",))
    with pytest.raises(AlulaError, match="--change data"):
        run(longer)
    run(replace(longer, change=("data", "recipe.total_tokens")))
    assert len(learned(config)) > 3


def test_a_run_must_name_its_format(tmp_path: Path) -> None:
    with pytest.raises(AlulaError, match=r"dtype is 'auto'.*give the format"):
        TrainConfig(tmp_path, dtype="auto")
