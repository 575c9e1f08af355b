"""The one definition of the target distribution, against a plain reading of it, and the choices made from it."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from alula.sampling import distribution as subject
from alula.sampling.distribution import choose, cut, distribution, first_argmax, probabilities
from alula.sampling.noise import gumbel
from alula.sampling.processors import Context, SamplingError
from alula.sequence import SamplingParams, Sequence
from tests.verify.toys import p_value

LARGE = 1531  # odd, and above the size at which everything is sorted at once


def by_definition(row_V: NDArray[np.float32], p: SamplingParams) -> dict[int, float]:
    """Temperature, top-k, top-p, min-p, one after another, over Python numbers."""
    alive = [(float(x), i) for i, x in enumerate(row_V) if x > -math.inf]
    ranked = sorted(alive, key=lambda pair: (-pair[0], pair[1]))
    if p.top_k > 0:
        ranked = ranked[: p.top_k]
    best = ranked[0][0]
    weights = [math.exp((x - best) / p.temperature) for x, _ in ranked]
    if p.top_p < 1:
        goal, mass, kept = p.top_p * math.fsum(weights), 0.0, 0
        while kept < len(weights) and mass < goal:
            mass += weights[kept]
            kept += 1
        weights = weights[:kept]
    weights = [w for w in weights if w >= p.min_p * weights[0]]
    return {i: w / math.fsum(weights) for (_, i), w in zip(ranked, weights, strict=False)}


def row_of(size: int, seed: int, kind: str = "normal") -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    row = rng.standard_normal(size) * {"normal": 3.0, "flat": 0.01, "peaked": 1.0, "ties": 3.0, "masked": 3.0}[kind]
    if kind == "peaked":
        row[rng.integers(size)] += 30
    if kind == "ties":
        row = np.round(row)
    if kind == "masked":
        row[rng.random(size) < 0.7] = -np.inf
    return row.astype(np.float32)


KINDS = ("normal", "flat", "peaked", "ties", "masked")
CUTS = (
    SamplingParams(temperature=1.0, top_p=0.95),
    SamplingParams(temperature=0.7, top_p=0.3),
    SamplingParams(temperature=1.7, top_p=0.99),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=1.0, top_k=50),
    SamplingParams(temperature=1.0, top_k=700, top_p=0.8),
    SamplingParams(temperature=0.5, min_p=0.1),
    SamplingParams(temperature=2.0, min_p=1e-6),
    SamplingParams(temperature=1.3, top_k=200, top_p=0.9, min_p=0.05),
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("params", CUTS)
@pytest.mark.parametrize("size", [40, LARGE])
def test_probabilities_follow_the_definition(size: int, params: SamplingParams, kind: str) -> None:
    row = row_of(size, 3, kind)
    wanted = by_definition(row, params)
    got = probabilities(row[None], [params])[0]
    assert set(np.flatnonzero(got)) == set(wanted)
    assert got[list(wanted)] == pytest.approx(list(wanted.values()), rel=1e-9)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(-6, 6), min_size=1, max_size=12),
    st.floats(0.2, 3.0),
    st.integers(-1, 12),
    st.floats(0.05, 1.0),
    st.floats(0.0, 1.0),
)
def test_probabilities_follow_the_definition_with_many_ties(
    logits: list[int], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    wanted = by_definition(np.array(logits, np.float32), params)
    got = probabilities(np.array([logits], np.float32), [params])[0]
    assert {int(i): float(got[i]) for i in np.flatnonzero(got)} == pytest.approx(wanted)


def test_ties_at_every_cut_keep_the_lowest_ids() -> None:
    row = np.array([[1, 2, 2, 2, 0]], np.float32)
    kept = {
        "top-k": SamplingParams(temperature=1.0, top_k=2),
        "top-p": SamplingParams(temperature=1.0, top_p=0.4),
    }
    for name, params in kept.items():
        assert np.flatnonzero(probabilities(row, [params])[0]).tolist() == [1, 2], name
    assert np.flatnonzero(probabilities(row, [SamplingParams(temperature=1.0, min_p=1.0)])[0]).tolist() == [1, 2, 3]


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    rows = np.zeros((3, 50_000), np.float32)
    rows[1, [49_999, 777, 40_000]] = 1
    rows[2, 31:] = 5
    assert first_argmax(rows).tolist() == [0, 777, 31]
    assert choose(rows, [SamplingParams()] * 3, [1, 2, 3], [0] * 3, [9] * 3).tolist() == [0, 777, 31]


@pytest.mark.parametrize("reaches", [(math.inf,), (0.5, 1.0, 3.0, 6.0, math.inf), (20.0, math.inf)])
def test_cut_does_not_depend_on_how_it_is_found(reaches: tuple[float, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row_of(LARGE, seed, kind) for seed in range(3) for kind in KINDS]
    before = [cut(row[None], [params]) for row in rows for params in CUTS]
    monkeypatch.setattr(subject, "_REACHES", reaches)
    after = [cut(row[None], [params]) for row in rows for params in CUTS]
    for one, other in zip(before, after, strict=True):
        assert np.array_equal(one.ids_BK, other.ids_BK) and np.array_equal(one.scores_BK, other.scores_BK)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.05, 1.0, 4.0])
def test_pruned_choice_among_all_is_the_argmax_over_all(temperature: float, kind: str) -> None:
    params = SamplingParams(temperature=temperature)
    ids = np.arange(LARGE)
    for seed in range(60):
        row = row_of(LARGE, seed, kind)
        keys = row.astype(np.float64) / temperature + gumbel(seed, 0, 12, ids)
        assert choose(row[None], [params], [seed], [0], [12])[0] == keys.argmax()


def test_pruned_choice_finds_a_lucky_token_far_below_the_best() -> None:
    """Far tokens are many and win often: such a winner must come out of the bound, not of the first look."""
    row = np.full(LARGE, -6.0, np.float32)
    row[5] = 0
    ids = np.arange(LARGE)
    chosen = [int(choose(row[None], [SamplingParams(temperature=1.0)], [s], [0], [1])[0]) for s in range(200)]
    assert chosen == [int((row.astype(np.float64) + gumbel(s, 0, 1, ids)).argmax()) for s in range(200)]
    assert len(set(chosen)) > 50


@pytest.mark.parametrize("size", [37, 1024, LARGE])
def test_rows_do_not_depend_on_their_company(size: int) -> None:
    rows = np.stack([row_of(size, seed, kind) for seed in range(4) for kind in KINDS])
    params = [(*CUTS, SamplingParams(temperature=1.0), SamplingParams())[b % 11] for b in range(len(rows))]
    seeds, places = list(range(len(rows))), [3 * b for b in range(len(rows))]
    together = choose(rows, params, seeds, [0] * len(rows), places)
    dense = probabilities(rows, params)
    for order in (range(len(rows) - 1, -1, -1), [7], [3, 0, 11], range(1, len(rows), 3)):
        some = list(order)
        alone = choose(
            rows[some], [params[b] for b in some], [seeds[b] for b in some], [0] * len(some), some_of(places, some)
        )
        assert alone.tolist() == together[some].tolist()
        assert np.array_equal(probabilities(rows[some], [params[b] for b in some]), dense[some])


def some_of(values: list[int], which: list[int]) -> list[int]:
    return [values[b] for b in which]


@pytest.mark.parametrize(
    ("size", "params"),
    [
        (5, SamplingParams(temperature=1.0)),
        (12, SamplingParams(temperature=0.7, top_k=9)),
        (12, SamplingParams(temperature=1.0, top_p=0.9)),
        (12, SamplingParams(temperature=1.5, min_p=0.1)),
        (40, SamplingParams(temperature=0.7, top_k=30, top_p=0.95, min_p=0.01)),
    ],
)
def test_law_of_the_choice_is_the_distribution(size: int, params: SamplingParams) -> None:
    row, trials = row_of(size, 8) * np.float32(0.5), 60_000
    law = probabilities(row[None], [params])[0]
    rows = np.broadcast_to(row, (trials, size))
    chosen = choose(rows, [params] * trials, list(range(trials)), [0] * trials, [4] * trials)
    p = p_value(chosen, law)
    print(f"choice of {size}: p = {p:.4f}")
    assert p > 1e-4


def test_law_of_the_pruned_choice_is_the_distribution() -> None:
    """The large vocabulary's own path, over positions of one seed; ids in groups of like probability."""
    row, trials = row_of(LARGE, 8), 2000
    params = SamplingParams(temperature=1.5)
    law = probabilities(row[None], [params])[0]
    groups = np.empty(LARGE, np.int64)
    groups[np.argsort(-law)] = np.minimum(np.cumsum(np.sort(law)[::-1]) * 20, 19)
    chosen = np.array([choose(row[None], [params], [1], [0], [place])[0] for place in range(trials)])
    p = p_value(groups[chosen], np.bincount(groups, weights=law))
    print(f"pruned choice: p = {p:.4f}")
    assert p > 1e-4


def context(**params: object) -> Context:
    return Context(Sequence(0, 1, [0, 1], SamplingParams(temperature=1.0, **params), 1))  # type: ignore[arg-type]


def test_distribution_leaves_its_logits_alone_and_shapes_first() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    before = logits.clone()
    law = distribution(logits, [context(logit_bias={3: -100.0}, top_k=2)])
    assert torch.equal(logits, before)
    assert law[0].tolist() == pytest.approx([0, 1 / (1 + math.e), math.e / (1 + math.e), 0])


def _raises(path: list[int], logits: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no")


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: context(allowed_token_ids=(1,), logit_bias={1: -math.inf}), "no token is left"),
        (lambda: context(logits_processors=(_raises,)), "logits_processors raised RuntimeError"),
        (lambda: context(logits_processors=(lambda path, logits: logits[:2],)), "logits_processors returned"),
        (lambda: context(logits_processors=(lambda path, logits: None,)), "logits_processors returned NoneType"),
        (lambda: context(allowed_token_ids=(4,)), "allowed_token_ids holds token id 4"),
        (lambda: context(logit_bias={-1: 1.0}), "logit_bias holds token id -1"),
    ],
)
def test_rows_without_a_choice_say_why(build: Callable[[], Context], named: str) -> None:
    with pytest.raises(SamplingError, match=named):
        distribution(torch.zeros(1, 4), [build()])


def test_a3_near_ties_in_bf16_are_sampled_from_the_fp32_distribution_they_are_judged_by() -> None:
    logits = torch.tensor([[1.0, 1.0 + 2**-9, 1.0 + 2**-8, 0.5]]).bfloat16()
    law = distribution(logits, [context()])
    assert torch.allclose(law, logits.double().softmax(-1), atol=1e-15)
    trials = 50_000
    rows = logits.float().numpy().repeat(trials, 0)
    chosen = choose(rows, [SamplingParams(temperature=1.0)] * trials, list(range(trials)), [0] * trials, [0] * trials)
    p = p_value(chosen, law[0].numpy())
    print(f"bf16 near ties: p = {p:.4f}")
    assert p > 1e-4


def test_a_temperature_beyond_fp32_is_refused() -> None:
    """Sums of the whole row divide by it in fp32, where infinite temperatures would make NaN."""
    with pytest.raises(ValueError, match=r"temperature is 1e\+39: give a number from 0 to 1,000,000"):
        SamplingParams(temperature=1e39, top_p=0.9)
