"""Outputs end exactly where they should, inside an accepted run too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from alula.draft.drafter import Drafter
from alula.draft.load import load_drafter
from alula.model.load import LoadedModel
from alula.tree import TreeShape
from tests.draft.heads import save_random_head
from tests.draft.medusas import save_random_medusa
from tests.engine.test_forced_verdicts import Scripted, accept_all
from tests.engine.tiny import complete, engine_for, prompt_of

LENGTH = 24
SHAPE = TreeShape(nodes=8, depth=5, branch=2)


@pytest.fixture(scope="module", params=[save_random_head, save_random_medusa], ids=["eagle3", "medusa"])
def head(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny: LoadedModel) -> Drafter:
    folder: Path = request.param(tmp_path_factory.mktemp("head"), tiny)
    return load_drafter(str(folder), tiny, allow_unverified=True)


def test_eos_at_every_position_of_a_greedy_run(tiny: LoadedModel, head: Drafter) -> None:
    prompt = prompt_of(11)
    plain = complete(engine_for(tiny), prompt, max_tokens=LENGTH + 8, ignore_eos=True).outputs[0].token_ids
    drafter = Scripted(head, prompt + plain, accept_all)
    for position in range(LENGTH):
        eos = plain[position]
        model = replace(tiny, eos_ids=frozenset({eos}))
        output = complete(engine_for(model, drafter, shape=SHAPE), prompt, max_tokens=LENGTH).outputs[0]
        assert output.token_ids == plain[: plain.index(eos) + 1]
        assert output.finish_reason == "stop"


@pytest.mark.parametrize("limit", range(1, 13))
def test_max_tokens_is_exact(tiny: LoadedModel, head: Drafter, limit: int) -> None:
    prompt = prompt_of(11)
    plain = complete(engine_for(tiny), prompt, max_tokens=20, ignore_eos=True).outputs[0].token_ids
    engine = engine_for(tiny, Scripted(head, prompt + plain, accept_all), shape=SHAPE)
    output = complete(engine, prompt, max_tokens=limit, ignore_eos=True).outputs[0]
    assert output.token_ids == plain[:limit]
    assert output.finish_reason == "length"
    assert engine.totals.committed == limit


@pytest.mark.parametrize("room", range(1, 9))
def test_context_limit_is_exact(tiny: LoadedModel, head: Drafter, room: int) -> None:
    prompt = prompt_of(11)
    plain = complete(engine_for(tiny), prompt, max_tokens=20, ignore_eos=True).outputs[0].token_ids
    settings = {"shape": SHAPE, "max_model_len": len(prompt) + room}
    engine = engine_for(tiny, Scripted(head, prompt + plain, accept_all), **settings)
    output = complete(engine, prompt, max_tokens=20, ignore_eos=True).outputs[0]
    assert output.token_ids == plain[:room]
    assert output.finish_reason == "length"
