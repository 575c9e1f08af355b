"""The native choice under top-k, top-p and min-p against a plain reading of the cuts, on every level this CPU has."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alula.kernels.extension import _native
from alula.kernels.sampler import NativeSampler
from alula.sampling.distribution import choose
from alula.sampling.noise import gumbel
from alula.sequence import SamplingParams
from alula.tree import FloatArray

SAMPLERS = [NativeSampler(_native.Level(name)) for name in _native.levels()]
TOP_P_SLACK = 1e-6
"""Masses so near to a top-p bound, relatively, may fall on either side of it."""
KINDS = ("normal", "flat", "peaked", "ties", "masked", "alone")
GREEDY = SamplingParams()


def grid(size: int) -> list[SamplingParams]:
    """Every combination of cuts, uncut and greedy rows among them, in an order that mixes them."""
    cuts = itertools.product(
        (0, 1, 2, 50, size, size + 5),
        (1.0, 1e-9, 0.5, 0.95, 0.999999),
        (0.0, 1e-6, 0.05, 0.5, 1.0),
        (0.01, 0.7, 1.0, 5.0),
    )
    params = [SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m) for k, p, m, t in cuts]
    order = np.random.default_rng(size).permutation(len(params))
    return [GREEDY, *(params[i] for i in order)]


def row_of(size: int, seed: int, kind: str) -> FloatArray:
    rng = np.random.default_rng(seed)
    row = rng.standard_normal(size) * {"flat": 0.01, "peaked": 1.0}.get(kind, 3.0)
    if kind == "peaked":
        row[rng.integers(size)] += 15
    if kind == "ties":
        row = np.round(row)
    if kind == "masked":
        row[rng.random(size) < 0.7] = -np.inf
    if kind == "alone":
        row[np.arange(size) != size // 3] = -np.inf
    return row.astype(np.float32)


def by_definition(row_V: FloatArray, p: SamplingParams, seed: int, position: int) -> set[int]:
    """The choice; both where the mass is too near to the bound of top-p to tell."""
    order = np.argsort(-row_V, kind="stable")
    order = order[row_V[order] > -np.inf]
    if p.is_greedy:
        return {int(order[0])}
    scores = row_V[order].astype(np.float64) / p.temperature
    weights = np.exp(scores - scores[0])
    if p.top_k > 0:
        weights = weights[: p.top_k]
    noisy, found = scores + gumbel(seed, 0, position, order), set()
    mass, bounds = np.cumsum(weights), (p.top_p * (1 - TOP_P_SLACK), p.top_p * (1 + TOP_P_SLACK))
    keep = [len(weights)] * 2 if p.top_p >= 1 else [1 + np.count_nonzero(mass < bound * mass[-1]) for bound in bounds]
    for width in range(keep[0], keep[1] + 1):
        support = min(width, np.count_nonzero(weights >= p.min_p))
        best = np.flatnonzero(noisy[:support] == noisy[:support].max())
        found.add(int(order[best].min()))
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "some"), [(64, 601), (1500, 601), (49_152, 30)])
def test_the_choice_is_that_of_the_definition(size: int, some: int, kind: str) -> None:
    params = grid(size)[:some]
    rows = np.stack([row_of(size, seed, kind) for seed in range(some)])
    seeds, places = list(range(some)), [5 + b % 7 for b in range(some)]
    wanted = [by_definition(*row) for row in zip(rows, params, seeds, places, strict=True)]
    for sampler in SAMPLERS:
        found = choose(rows, params, seeds, [0] * some, places, sampler).tolist()
        wrong = [(params[b], found[b], wanted[b]) for b in range(some) if found[b] not in wanted[b]]
        assert not wrong
    assert sum(len(choices) > 1 for choices in wanted) <= some // 20


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(-4, 4), min_size=1, max_size=150),
    st.floats(0.2, 3.0),
    st.integers(-1, 12),
    st.floats(0.01, 1.0),
    st.floats(0.0, 1.0),
    st.integers(0, 2**63 - 1),
)
def test_rows_of_many_ties(
    logits: list[int], temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    rows = np.array([logits] * 8, np.float32)
    places = list(range(8))
    wanted = [by_definition(rows[0], params, seed, place) for place in places]
    for sampler in SAMPLERS:
        found = choose(rows, [params] * 8, [seed] * 8, [0] * 8, places, sampler).tolist()
        assert all(token in choices for token, choices in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    ("params", "support"),
    [
        (SamplingParams(temperature=1.0, top_k=1), 1),
        (SamplingParams(temperature=1.0, top_k=5), 5),
        (SamplingParams(temperature=1.0, top_p=6.5 / 16), 7),
        (SamplingParams(temperature=1.0, top_p=0.5), 8),
        (SamplingParams(temperature=1.0, top_p=1e-9), 1),
        (SamplingParams(temperature=1.0, top_k=8, top_p=0.5), 4),
        (SamplingParams(temperature=1.0, min_p=1.0), 16),
        (SamplingParams(temperature=1.0, min_p=0.99), 16),
        (SamplingParams(temperature=1.0, top_p=0.5, min_p=1.0), 8),
        (SamplingParams(temperature=1.0, top_k=3, min_p=0.5), 3),
    ],
)
@pytest.mark.parametrize("size", [70, 20_000])
def test_ties_at_a_bound_keep_the_lowest_ids(params: SamplingParams, support: int, size: int) -> None:
    """Sixteen equals far above the others, spread out: masses are whole numbers, so every sum is exact."""
    ids = np.arange(size - 1, -1, -(size // 16))[:16][::-1]
    row, trials = np.full(size, -200.0, np.float32), 300
    row[ids] = 4.0
    rows = np.repeat(row[None], trials, 0)
    for sampler in SAMPLERS:
        found = choose(rows, [params] * trials, list(range(trials)), [0] * trials, [3] * trials, sampler)
        assert np.array_equal(np.unique(found), ids[:support])


@pytest.mark.parametrize(("size", "spread"), [(64, 0.5), (1500, 1.0), (49_152, 0.0), (49_152, 0.01), (49_152, 1.0)])
def test_each_bound_ends_at_the_very_token(size: int, spread: float) -> None:
    """The token with the largest noisy score is chosen by bounds that just keep it, and by none that just drop it."""
    row = (np.random.default_rng(size).standard_normal(size) * spread - 0.4).astype(np.float32)
    row[size // 2] = row.max() + np.float32(1.11)  # plain fp32 sums of such equals all err to the same side
    order = np.argsort(-row, kind="stable")
    scores = row[order].astype(np.float64)
    weights = np.exp(scores - scores[0])
    mass, total = np.cumsum(weights), weights.sum()
    seen = 0
    for seed in range(40):
        last = int((scores + gumbel(seed, 0, 2, order)).argmax())
        if last == 0 or weights[last] < 5 * TOP_P_SLACK * total:
            continue
        seen += 1
        half, before = weights[last] / 2, mass[last - 1]
        keeping = [{"top_k": last + 1}, {"top_p": (before + half) / total}, {"min_p": weights[last] * (1 - 1e-9)}]
        dropping = [{"top_k": last}, {"top_p": (before - half) / total}, {"min_p": weights[last] * (1 + 1e-9)}]
        params = [SamplingParams(temperature=1.0, **cut) for cut in (*keeping, *dropping)]  # type: ignore[arg-type]
        rows = np.repeat(row[None], 6, 0)
        for sampler in SAMPLERS:
            found = choose(rows, params, [seed] * 6, [0] * 6, [2] * 6, sampler)
            assert (found == order[last]).tolist() == [True] * 3 + [False] * 3
    assert seen > 20


def test_noisy_scores_that_are_equal_go_to_the_lowest_id() -> None:
    """Beside such a score the noise is too small to be seen."""
    rows = np.zeros((1, 300), np.float32)
    rows[0, [70, 150, 290]] = 1e30
    for cuts in ({}, {"top_k": 3}, {"top_k": 50}, {"top_p": 0.99}, {"min_p": 0.5}):
        params = [SamplingParams(temperature=1.0, **cuts)]  # type: ignore[arg-type]
        for seed, sampler in itertools.product(range(20), SAMPLERS):
            assert choose(rows, params, [seed], [0], [2], sampler).tolist() == [70]


def test_min_p_keeps_what_is_just_above_it_and_drops_what_is_just_below() -> None:
    row, trials = np.full(3000, -9.0, np.float32), 300
    row[2000], row[100], row[2999] = 1.0, np.float32(1 + math.log(0.501)), np.float32(1 + math.log(0.499))
    rows = np.repeat(row[None], trials, 0)
    for top in ({}, {"top_k": 40}, {"top_p": 0.9}):
        params = [SamplingParams(temperature=1.0, min_p=0.5, **top)] * trials  # type: ignore[arg-type]
        for sampler in SAMPLERS:
            found = choose(rows, params, list(range(trials)), [0] * trials, [3] * trials, sampler)
            assert np.unique(found).tolist() == [100, 2000]


def test_a_wide_support_takes_its_luckiest_token() -> None:
    """Thousands of tokens are left, most of which only their noise can bring up: such winners must be found."""
    size, trials = 5000, 200
    row = np.linspace(0, -6, size).astype(np.float32)
    rows, params = np.repeat(row[None], trials, 0), SamplingParams(temperature=1.0, top_p=0.999)
    wanted = [by_definition(row, params, seed, 2) for seed in range(trials)]
    for sampler in SAMPLERS:
        found = choose(rows, [params] * trials, list(range(trials)), [0] * trials, [2] * trials, sampler).tolist()
        assert all(token in choices for token, choices in zip(found, wanted, strict=True))
    assert len(set(found)) > 100


def test_many_far_tokens_count_in_the_mass() -> None:
    """Half of the mass lies in equals 10.6 nats down, so that top-p must look farther than its first reaches."""
    size, trials = 40_000, 60
    row = np.full(size, -10.6, np.float32)
    row[7] = 0.0
    each = math.exp(float(row[0]))
    total = 1 + (size - 1) * each
    for top_p, last in ((0.99 / total, 7), ((1 + 9.5 * each) / total, 10), ((1 + 20_000 * each) / total, 20_000)):
        params = SamplingParams(temperature=1.0, top_p=top_p)
        wanted = [by_definition(row, params, seed, 2) for seed in range(trials)]
        for sampler in SAMPLERS:
            rows = np.repeat(row[None], trials, 0)
            found = choose(rows, [params] * trials, list(range(trials)), [0] * trials, [2] * trials, sampler)
            assert all(token in choices for token, choices in zip(found.tolist(), wanted, strict=True))
            assert found.max() <= last


def test_threads_and_neighbours_do_not_matter() -> None:
    size = 30_000
    rows = np.stack([row_of(size, seed, kind) for seed in range(3) for kind in KINDS])
    count, params = len(rows), [*grid(size)[: len(rows) - 2], GREEDY, SamplingParams(temperature=1.0)]
    together = [choose(rows, params, [1] * count, [0] * count, [9] * count, sampler) for sampler in SAMPLERS]
    assert all(np.array_equal(found, together[0]) for found in together)
    before = torch.get_num_threads()
    try:
        for threads, sampler in itertools.product((1, 2), SAMPLERS):
            torch.set_num_threads(threads)
            for some in ([*range(count)][::-1], *([b] for b in range(count))):
                few = len(some)
                found = choose(rows[some], [params[b] for b in some], [1] * few, [0] * few, [9] * few, sampler)
                assert np.array_equal(found, together[0][some])
    finally:
        torch.set_num_threads(before)


def test_one_call_chooses_all_rows() -> None:
    """Greedy, cut and free rows together; none at all where every row is greedy."""
    rows = (np.random.default_rng(1).normal(size=(6, 5000)) * 3).astype(np.float32)
    free, cut = SamplingParams(temperature=0.9), SamplingParams(temperature=1.0, top_p=0.8)
    params = [free, cut, GREEDY, free, SamplingParams(temperature=1.0, top_k=9), free]
    where = ([1, 2, 3, 4, 5, 6], [0, 0, 0, 1, 1, 1], [9, 8, 7, 6, 5, 4])
    asked: list[int] = []

    class Spy(NativeSampler):
        def choose(self, rows_BV: FloatArray, *columns: np.ndarray) -> np.ndarray:  # type: ignore[override]
            asked.append(len(rows_BV))
            return super().choose(rows_BV, *columns)

    spy = Spy(_native.Level(_native.levels()[0]))
    assert choose(rows, params, *where, spy).tolist() == choose(rows, params, *where).tolist()
    assert choose(rows, [GREEDY] * 6, *where, spy).tolist() == rows.argmax(axis=1).tolist()
    assert asked == [6]


def test_rows_without_a_finite_logit_do_no_harm() -> None:
    """They are refused before; a number must come back all the same."""
    rows = np.array([[-np.inf] * 70, [np.nan] * 70, [np.inf] * 70], np.float32)
    for params in grid(70)[:100]:
        for sampler in SAMPLERS:
            found = choose(rows, [params] * 3, [1] * 3, [0] * 3, [9] * 3, sampler)
            assert ((found >= 0) & (found < 70)).all()
