"""What both rules share: alignment, purity, errors of single sequences, reports, masks, mixed batches."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pytest
import torch

from alula.config import AlulaError
from alula.sequence import PlanItem, SamplingParams, StepPlan, Verdict
from alula.tree import DraftTree
from alula.verify import coupled, rejection
from alula.verify.walk import LogitRows, lowest_argmax
from tests.verify import toys

BOTH = pytest.mark.parametrize("verify", [coupled.verify, rejection.verify], ids=["coupled", "rejection"])
V = 12


def tree(*tokens: int, parents: tuple[int, ...] | None = None) -> DraftTree:
    above = parents or tuple(range(-1, len(tokens) - 1))
    return DraftTree(np.array(tokens), np.array(above), np.zeros(len(tokens), np.float32))


def favour(*ids: int) -> torch.Tensor:
    """One row per id, which is far the likeliest there."""
    logits = torch.randn(len(ids), V, generator=torch.Generator().manual_seed(len(ids)))
    logits[range(len(ids)), list(ids)] += 40
    return logits


def verdict_of(verify: toys.Verify, logits: torch.Tensor, draft: DraftTree, **params: Any) -> Verdict:
    found = verify(logits, [draft], toys.plan_of(toys.sequences(SamplingParams(**params), [7])))[0]
    assert found is not None
    return found


@BOTH
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"logprobs": 1}], ids=str)
def test_paths_tokens_and_checked_children(verify: toys.Verify, params: dict[str, Any]) -> None:
    bushy = tree(0, 1, 2, 3, 4, 5, parents=(-1, 0, 0, 2, 2, 4))
    cases = {
        (9, 0, 0, 0, 0, 0): Verdict((), (9,), 2),
        (1, 8, 0, 0, 0, 0): Verdict((1,), (1, 8), 2),
        (2, 0, 9, 0, 0, 0): Verdict((2,), (2, 9), 4),
        (2, 0, 4, 0, 6, 0): Verdict((2, 4), (2, 4, 6), 5),
        (2, 0, 4, 0, 5, 11): Verdict((2, 4, 5), (2, 4, 5, 11), 5),
        (2, 0, 3, 10, 0, 0): Verdict((2, 3), (2, 3, 10), 4),
    }
    for best, wanted in cases.items():
        got = verdict_of(verify, favour(*best), bushy, **params)
        assert (got.path, got.tokens, got.checked) == (wanted.path, wanted.tokens, wanted.checked)


@BOTH
def test_verdicts_align_with_the_plan(verify: toys.Verify) -> None:
    rows = toys.sequences(SamplingParams(), [1, 2, 3])
    items = [PlanItem(row, range(0), toys.SHAPE) for row in rows]
    plan = StepPlan((items[0], PlanItem(rows[1], range(2), None), items[2]))
    verdicts = verify(favour(1, 5, 7), [tree(0, 1), None, tree(0)], plan)
    assert [None if v is None else v.tokens for v in verdicts] == [(1, 5), None, (7,)]


@BOTH
def test_rows_and_trees_that_do_not_fit_are_refused(verify: toys.Verify) -> None:
    rows = toys.sequences(SamplingParams(), [1])
    with pytest.raises(AlulaError, match="give one per tree node"):
        verify(favour(1, 2, 3), [tree(0, 1)], toys.plan_of(rows))
    with pytest.raises(AlulaError, match="exactly where the plan has a shape"):
        verify(favour(1), [None], toys.plan_of(rows))


def no_tokens(path: list[int], logits: torch.Tensor) -> torch.Tensor:
    return torch.full_like(logits, -torch.inf)


def breaks(path: list[int], logits: torch.Tensor) -> torch.Tensor:
    raise KeyError("lost")


def breaks_after_5(path: list[int], logits: torch.Tensor) -> torch.Tensor:
    return breaks(path, logits) if 5 in path else logits


@BOTH
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_the_faulty_sequence_fails(verify: toys.Verify, temperature: float) -> None:
    rows = toys.sequences(SamplingParams(temperature=temperature), range(4))
    for row, processor in ((rows[1], no_tokens), (rows[2], breaks)):
        row.params = SamplingParams(temperature=temperature, logits_processors=(processor,))
    verdicts = verify(favour(1, 2, 3, 4, 5), [tree(0), tree(0), tree(0), tree(0, 4)], toys.plan_of(rows))
    assert [v.tokens for v in verdicts if v is not None] == [(1,), (), (), (4, 5)]
    errors = [v.error for v in verdicts if v is not None]
    assert errors[0] is None and errors[3] is None
    assert errors[1] is not None and "no token is left" in errors[1]
    assert errors[2] is not None and "raised KeyError" in errors[2]


@BOTH
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_an_error(verify: toys.Verify, temperature: float, value: float) -> None:
    logits = favour(3)
    logits[0, 6] = value
    verdict = verdict_of(verify, logits, tree(0), temperature=temperature)
    assert verdict.error is not None and verdict.tokens == ()


@BOTH
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_failure_below_the_root_keeps_what_plain_decoding_would_have_said(
    verify: toys.Verify, temperature: float
) -> None:
    """Token 5 may end the output; if not, the next step fails at its root, as plain decoding would."""
    params = {"temperature": temperature, "logits_processors": (breaks_after_5,), "logprobs": 0}
    verdict = verdict_of(verify, favour(4, 5, 6, 7), tree(0, 4, 5, 6), **params)
    assert verdict.tokens == (4, 5) and verdict.path == (1,) and verdict.error is None
    assert verdict.logprobs is not None and [r.token for r in verdict.logprobs] == [4, 5]


@BOTH
def test_a5_logits_trees_and_sequences_are_unchanged(verify: toys.Verify) -> None:
    """Two requests share a buffer; every way of shaping is in play."""
    params = [
        SamplingParams(temperature=1.0, top_k=5, top_p=0.9, min_p=0.01, logit_bias={1: -9.0}, logprobs=2),
        SamplingParams(temperature=0.7, repetition_penalty=1.4, frequency_penalty=1.0, allowed_token_ids=(1, 2, 3)),
        SamplingParams(),
    ]
    rows = toys.sequences(params[0], range(3))
    for row, own in zip(rows, params, strict=True):
        row.params = own
    logits = torch.randn(9, V, generator=torch.Generator().manual_seed(0))
    proposals = {0: torch.rand(V), 1: torch.rand(V)}
    drafts = [tree(0, 1, 2) for _ in rows]
    if verify is rejection.verify:
        drafts = [DraftTree(t.tokens_N, t.parents_N, t.scores_N, True, proposals) for t in drafts]
    before = logits.clone(), [q.clone() for q in proposals.values()], [t.tokens_N.copy() for t in drafts]
    first = verify(logits, drafts, toys.plan_of(rows))
    assert torch.equal(logits, before[0])
    assert all(torch.equal(a, b) for a, b in zip(proposals.values(), before[1], strict=True))
    assert all(np.array_equal(t.tokens_N, b) for t, b in zip(drafts, before[2], strict=True))
    assert [row.tokens for row in rows] == [[0]] * 3
    assert verify(logits, drafts, toys.plan_of(rows)) == first


@BOTH
def test_grammar_masks_follow_each_path(verify: toys.Verify) -> None:
    asked: list[tuple[int, ...]] = []

    class Rising:
        def mask(self, path: Seq[int]) -> torch.Tensor | None:
            asked.append(tuple(path))
            return None if len(path) == 1 else torch.arange(V) == 3 + len(path)

        def advance(self, tokens: Seq[int]) -> None:
            raise AssertionError("verification is pure")

    rows = toys.sequences(SamplingParams(), range(2))
    rows[1].grammar = Rising()
    drafts = [tree(0, 3, 9), tree(0, 3, 9)]
    verdicts = verify(favour(8, 9, 0, 8, 9, 0), drafts, toys.plan_of(rows))
    assert [v.tokens for v in verdicts if v is not None] == [(8,), (3, 9, 5)]
    assert asked == [(), (3,), (3, 9)]


@BOTH
def test_user_processors_see_the_path_of_their_node(verify: toys.Verify) -> None:
    seen: list[list[int]] = []

    def processor(path: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(path)
        return logits

    verdict_of(verify, favour(4, 5, 6), tree(0, 4, 5), logits_processors=(processor,))
    assert seen == [[0], [0, 4], [0, 4, 5]]


def test_ties_of_the_device_argmax_go_to_the_lowest_id() -> None:
    rows = torch.zeros(3, 5000)
    rows[1, [4000, 70]] = 1
    assert lowest_argmax(rows).tolist() == [0, 70, 0]


def test_logits_off_the_host_take_the_argmax_that_is_given() -> None:
    asked: list[int] = []

    def argmax(rows: torch.Tensor) -> torch.Tensor:
        asked.append(len(rows))
        return lowest_argmax(rows)

    rows = LogitRows(favour(3, 1, 2))
    rows._host = None  # as for a tensor on another device
    ids, values = rows.best(1, 3, argmax)
    assert ids.tolist() == [1, 2] and values.min() > 30 and asked == [2]
    assert rows.best(0, 3, None)[0].tolist() == [3, 1, 2]
    assert np.array_equal(rows.take([2]), favour(3, 1, 2)[2:].numpy())
