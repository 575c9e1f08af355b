"""The floor of a path's probability, per engine and per request: other trees, the same text."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from alula.config import AlulaError
from alula.draft.drafter import Drafter
from alula.draft.load import load_drafter
from alula.engine.request import Request, Speculation
from alula.model.load import LoadedModel, load_model
from alula.sequence import SamplingParams
from alula.tree import ROOT_ONLY, TreeShape
from tests.engine.tiny import engine_for, prompt_of, run, save_tiny_llama

SHAPE = TreeShape(nodes=8, depth=4, branch=2)
ASKED = (None, 0.0, 0.2, 0.6, 0.999)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("floor"), layers=2)


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_model(str(folder), dtype="float32")


@pytest.fixture
def drafter(folder: Path, model: LoadedModel) -> Drafter:
    """The target as its own drafter, which is often right."""
    return load_drafter(str(folder), model)


def requests(temperature: float, **params: Any) -> list[Request]:
    """One for each floor, with one prompt and seed."""
    options = SamplingParams(temperature, seed=5, max_tokens=40, ignore_eos=True, **params)
    return [Request(tuple(prompt_of(20, seed=3)), options, Speculation(floor=floor)) for floor in ASKED]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("shape", [SHAPE, replace(SHAPE, floor=0.3)], ids=["free", "floored"])
def test_requests_of_a_batch_have_floors_of_their_own(
    model: LoadedModel, drafter: Drafter, temperature: float, shape: TreeShape
) -> None:
    """Without one they take the engine's; 0 takes it away."""
    plain = run(engine_for(model), requests(temperature)[:1])[0].outputs[0]
    found = [output.outputs[0] for output in run(engine_for(model, drafter, shape=shape), requests(temperature))]
    assert [sample.token_ids for sample in found] == [plain.token_ids] * len(ASKED)
    default, free, low, high, most = (sample.stats.drafted / sample.stats.target_forwards for sample in found)
    assert free > low > high > most
    assert (default == free) if not shape.floor else (low > default > high)


def test_greedy_text_under_rule_rejection(folder: Path, model: LoadedModel) -> None:
    plain = run(engine_for(model), requests(0.0)[:1])[0].outputs[0]
    engine = engine_for(model, load_drafter(str(folder), model, rule="rejection"), rule="rejection", shape=SHAPE)
    assert [out.outputs[0].token_ids for out in run(engine, requests(0.0))] == [plain.token_ids] * len(ASKED)


def test_the_scheduler_keeps_the_floor_of_a_tree_that_it_cuts(model: LoadedModel, drafter: Drafter) -> None:
    """Few rows are left beside a prompt, and few tokens at the end."""
    floored = replace(SHAPE, floor=0.25)
    engine = engine_for(model, drafter, shape=floored, max_num_seqs=2, max_num_batched_tokens=5)
    engine.add(Request(tuple(prompt_of(4)), SamplingParams(max_tokens=12, ignore_eos=True)))
    seen = set()
    while engine.has_work:
        seen |= {item.shape for item in engine.plan().items if item.shape not in (None, ROOT_ONLY)}
        engine.step()
    assert {shape.floor for shape in seen if shape} == {0.25}
    assert all(shape.nodes == 5 for shape in seen if shape) and len({shape.depth for shape in seen if shape}) > 1


def test_what_a_request_asks_for() -> None:
    floored = TreeShape(8, 4, 3, 0.25)
    assert Speculation().shape(floored) == floored
    assert Speculation(nodes=3, depth=2).shape(floored) == TreeShape(3, 2, 3, 0.25)
    assert Speculation(floor=0.5).shape(floored) == TreeShape(8, 4, 3, 0.5)
    assert Speculation(floor=0).shape(floored) == TreeShape(8, 4, 3)
    assert Speculation(off=True, floor=0.5).shape(floored) == ROOT_ONLY


@pytest.mark.parametrize("floor", [-0.1, 1.0, math.nan, True, "0.1"])
def test_a_floor_is_a_probability_below_one(floor: Any) -> None:
    with pytest.raises(AlulaError, match=r"^speculation\.floor is .*: give a number of at least 0 and below 1$"):
        Speculation(floor=floor)
