"""The counter-based noise: its definition, its bits on any shape, its law, and the bounds that save work."""

from __future__ import annotations

import math
from decimal import Decimal, getcontext

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alula.sampling.noise import (
    Stream,
    draw_bits,
    exact_log,
    gumbel,
    gumbel_rows,
    least_bits,
    near_gumbel,
    noisy_argmax,
    row_keys,
    steps,
    to_gumbel,
    to_unit,
    uniform,
)

WORD = 2**64 - 1
STEP = 0x9E3779B97F4A7C15


def mix(z: int) -> int:
    """SplitMix64's finaliser in plain whole numbers."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & WORD
    return z ^ (z >> 31)


def reference_bits(stream: int, seed: int, sample: int, position: int, node: int, token: int) -> int:
    key = mix(((seed & WORD) + STEP) & WORD)
    key = mix((key + (position << 8 | stream) * STEP) & WORD)
    key = mix((key + (sample << 32 | node) * STEP) & WORD)
    return mix((key + (token + 1) * STEP) & WORD)


@given(
    st.sampled_from(Stream),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 2**20),
    st.integers(0, 2**30),
    st.integers(0, 2**10),
    st.integers(0, 2**20),
)
def test_bits_follow_the_written_definition(
    stream: Stream, seed: int, sample: int, position: int, node: int, token: int
) -> None:
    key = row_keys(stream, seed, sample, position, node)
    assert int(draw_bits(key, steps(token))[0]) == reference_bits(stream, seed, sample, position, node, token)


def test_noise_has_the_recorded_bits() -> None:
    """Written down once: any platform must give these, or seeds would not carry over."""
    noise = gumbel(seed=1, sample=2, position=3, token_ids=np.array([0, 1, 49151]))
    assert [x.hex() for x in noise.tolist()] == RECORDED


RECORDED = ["-0x1.a12698340f3fbp-2", "-0x1.62fd940fdf8fap-2", "-0x1.ed4cd583fa65ep-1"]


def test_uniforms_never_reach_their_ends() -> None:
    ends = to_unit(np.array([0, WORD], np.uint64))
    assert ends[0] == 2.0**-53 and ends[1] == 1 - 2.0**-53
    assert np.isfinite(to_gumbel(np.array([0, WORD], np.uint64))).all()


def test_logarithm_is_right_to_a_few_units_in_the_last_place() -> None:
    getcontext().prec = 40
    rng = np.random.default_rng(0)
    numbers = np.concatenate(
        [rng.random(300), 1 - rng.random(100) * 1e-9, rng.random(100) * 40, 2.0 ** rng.integers(-53, 6, 50), [1.0]]
    )
    for x, got in zip(numbers.tolist(), exact_log(numbers).tolist(), strict=True):
        true = Decimal(x).ln()
        assert abs(Decimal(got) - true) <= 3 * Decimal(math.ulp(float(true)))


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 8, 17, 1000])
def test_bits_do_not_depend_on_shape_or_place(count: int) -> None:
    ids = np.arange(3000)
    whole = gumbel(9, 0, 77, ids)
    for start in (0, 1, 13):
        part = ids[start : start + 2 * count : 2]
        assert np.array_equal(gumbel(9, 0, 77, part), whole[part])
    rows = gumbel_rows([1, 9, 3], [0, 0, 0], [5, 77, 77], ids[:count])
    assert np.array_equal(rows[1], whole[:count])


def test_quick_noise_agrees_with_the_exact_one() -> None:
    bits = np.random.default_rng(1).integers(0, WORD, 200_000, np.uint64, endpoint=True)
    assert np.abs(near_gumbel(bits) - to_gumbel(bits)).max() < 1e-12


@given(st.integers(0, WORD))
def test_bound_never_excludes_bits_that_reach_the_level(bits: int) -> None:
    level = float(to_gumbel(np.array([bits], np.uint64))[0])
    assert least_bits(level) <= bits


def test_bound_is_tight() -> None:
    for level in (-2.0, 0.0, 3.0, 9.0):
        share = 1 - int(least_bits(level)) / 2**64
        assert share == pytest.approx(-math.expm1(-math.exp(-level)), rel=1e-6)
    assert least_bits(-1e9) == 0 and least_bits(1e9) >= 2**64 - 2**14


def test_equal_noisy_scores_go_to_the_lowest_id() -> None:
    bits = np.full((1, 4), 2**60, np.uint64)
    scores = np.array([[0.5, 1.0, 1.0, -np.inf]])
    assert noisy_argmax(scores, bits, np.array([[3, 9, 4, 1]])).tolist() == [4]


def test_scores_that_the_quick_logarithm_cannot_tell_apart_go_by_the_exact_one() -> None:
    rng = np.random.default_rng(2)
    bits = rng.integers(0, WORD, (500, 2), np.uint64, endpoint=True)
    level = to_gumbel(bits).max(axis=1, keepdims=True) + 1.0
    scores = level - to_gumbel(bits) + rng.integers(-2, 3, bits.shape) * 2.0**-51
    keys = scores + to_gumbel(bits)
    assert np.array_equal(
        noisy_argmax(scores, bits, np.tile([7, 3], (500, 1))), np.where(keys[:, 0] > keys[:, 1], 7, 3)
    )


def _evenness(u: np.ndarray) -> float:
    counts = np.bincount((u * 100).astype(int), minlength=100)
    statistic = float(((counts - len(u) / 100) ** 2 / (len(u) / 100)).sum())
    return float(torch.special.gammaincc(torch.tensor(49.5), torch.tensor(statistic / 2)))


def test_noise_is_uniform_along_every_part_of_the_key() -> None:
    many = np.arange(100_000)
    draws = {
        "tokens": to_unit(draw_bits(row_keys(Stream.TARGET, 1, 0, 5), steps(many))),
        "positions": uniform(Stream.TARGET, 1, 0, many, 0),
        "seeds": uniform(Stream.TARGET, many, 0, 5, 0),
        "samples": uniform(Stream.TARGET, 1, many, 5, 0),
        "nodes": uniform(Stream.ACCEPT, 1, 0, 5, many),
    }
    for name, u in draws.items():
        p = _evenness(u)
        print(f"uniform along {name}: p = {p:.4f}")
        assert p > 1e-4
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 5 / math.sqrt(len(u))


def test_streams_positions_and_samples_are_uncorrelated() -> None:
    seeds = np.arange(100_000)
    columns = [uniform(stream, seeds, 0, 9, 3) for stream in Stream]
    columns += [uniform(Stream.TARGET, seeds, 0, 10, 3), uniform(Stream.TARGET, seeds, 1, 9, 3)]
    columns += [uniform(Stream.TARGET, seeds + 1, 0, 9, 3), uniform(Stream.TARGET, seeds, 0, 9, 4)]
    correlation = np.corrcoef(columns) - np.eye(len(columns))
    assert np.abs(correlation).max() < 5 / math.sqrt(len(seeds))


def test_negative_seeds_differ_from_positive_ones() -> None:
    assert uniform(Stream.TARGET, -1, 0, 0, 0)[0] != uniform(Stream.TARGET, 1, 0, 0, 0)[0]


@given(st.lists(st.tuples(*[st.integers(-(2**63), 2**63 - 1), *[st.integers(0, 2**31)] * 3]), min_size=1, max_size=16))
def test_keys_of_few_rows_are_those_of_many(rows: list[tuple[int, int, int, int]]) -> None:
    columns = [list(column) for column in zip(*rows, strict=True)]
    for stream in Stream:
        many = row_keys(stream, *[np.array(column, np.int64) for column in columns])
        assert row_keys(stream, *columns).tolist() == many.tolist()
        assert (
            row_keys(stream, columns[0], 3, columns[2]).tolist()
            == row_keys(stream, np.array(columns[0]), 3, np.array(columns[2])).tolist()
        )
