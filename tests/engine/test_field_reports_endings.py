"""Ends of outputs, limits and bad requests: faults reported of other engines (D2 to D9)."""

from __future__ import annotations

import pytest

from alula.config import AlulaError
from alula.engine.request import Request
from alula.model.load import LoadedModel
from alula.sequence import PlanItem, SamplingParams
from alula.tree import TreeShape
from tests.engine.guesses import Guesser, Script, spoiled_by_turns
from tests.engine.tiny import EOS, engine_for, prompt_of, run

SHAPE = TreeShape(nodes=6, depth=5, branch=1)


def _eos_at(depth: int) -> Script:
    def script(truth: list[int], item: PlanItem) -> list[int]:
        return [*truth[: depth - 1], EOS, *truth[depth:]]

    return script


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_d2_a_drafted_eos_that_the_target_rejects_ends_nothing(tiny: LoadedModel, depth: int) -> None:
    params = SamplingParams(max_tokens=24, logit_bias={EOS: -1000.0})
    requests = [Request(tuple(prompt_of(7, seed=number)), params) for number in range(3)]
    plain = run(engine_for(tiny), requests)
    engine = engine_for(tiny, Guesser(plain, _eos_at(depth)), shape=SHAPE)
    outputs = run(engine, requests)
    assert [output.outputs[0].token_ids for output in outputs] == [output.outputs[0].token_ids for output in plain]
    assert all(output.outputs[0].finish_reason == "length" for output in outputs)
    assert engine.totals.accepted == 0 if depth == 1 else engine.totals.tau > 1


def test_d5b_a_crowd_of_single_token_requests_ends(tiny: LoadedModel) -> None:
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    requests = [Request(tuple(prompt_of(3 + number % 5, seed=number)), params) for number in range(2000)]
    plain = run(engine_for(tiny, max_num_seqs=64, check_integrity=False), requests[:50])
    engine = engine_for(tiny, Guesser(plain), shape=SHAPE, max_num_seqs=64, check_integrity=False)
    outputs = run(engine, requests)
    assert [output.outputs[0].token_ids for output in outputs[:50]] == [o.outputs[0].token_ids for o in plain]
    assert all(len(output.outputs[0].token_ids) == 1 for output in outputs)
    assert engine.totals.drafted == 0, "a last token needs no guess"
    assert engine.times.steps <= 2000 // 5


def test_d9_a_prompt_over_the_limit_fails_alone(tiny: LoadedModel) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    good = [Request(tuple(prompt_of(9, seed=number)), params) for number in range(3)]
    plain = run(engine_for(tiny), good)
    engine = engine_for(tiny, Guesser(plain, spoiled_by_turns), shape=SHAPE, max_model_len=64)
    free = engine.cache.free_pages
    first = engine.add(good[0])
    for length in (64, 65, 500):
        with pytest.raises(AlulaError, match="context limit is 64"):
            engine.add(Request(tuple(prompt_of(length)), params))
    others = [engine.add(request) for request in good[1:]]
    while engine.has_work:
        engine.step()
    outputs = [engine.pop(request_id) for request_id in (first, *others)]
    assert [output.outputs[0].token_ids for output in outputs] == [output.outputs[0].token_ids for output in plain]
    assert engine.cache.free_pages == free
