"""The native sampler against the definition in `sampling.noise`, on every level this CPU has."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alula.kernels.extension import _native
from alula.kernels.sampler import NativeSampler
from alula.sampling.noise import Stream, draw_bits, row_keys, steps, to_gumbel
from alula.tree import FloatArray

LEVELS = _native.levels()


@pytest.fixture(params=LEVELS)
def sampler(request: pytest.FixtureRequest) -> NativeSampler:
    return NativeSampler(_native.Level(request.param))


def keys(count: int, seed: int = 0) -> np.ndarray:
    return row_keys(Stream.TARGET, np.arange(count) + seed, 0, 17)


def uncut(sampler: NativeSampler, rows: FloatArray, temperatures: np.ndarray, row_keys_: np.ndarray) -> np.ndarray:
    count = len(rows)
    return sampler.choose(rows, temperatures, np.zeros(count, np.int64), np.ones(count), np.zeros(count), row_keys_)


def by_definition(rows: FloatArray, temperatures: np.ndarray, row_keys_: np.ndarray) -> list[int]:
    noise = to_gumbel(draw_bits(row_keys_[:, None], steps(np.arange(rows.shape[1]))))
    return (rows.astype(np.float64) / temperatures[:, None] + noise).argmax(axis=1).tolist()


@pytest.mark.parametrize("width", [1, 63, 64, 65, 3003])
@pytest.mark.parametrize("scale", [1.0, 0.8])
def test_perturbed_rows_have_the_bits_of_the_definition(sampler: NativeSampler, width: int, scale: float) -> None:
    """Rows of the same key, before and after others and greedy ones; any ids."""
    own_keys = keys(4)[[0, 0, 1, 0, 2, 2, 3]]
    temperatures = np.array([1.0, 0.7, 0.0, 2.0, 0.3, 0.0, 1.0], np.float32)
    ids = np.concatenate([[49151, 2**31 - 1, 2**40], np.arange(3000)])[:width]
    rows = np.random.default_rng(width).normal(size=(7, width)).astype(np.float32)
    rows[::2, width // 2] = -np.inf
    noise = to_gumbel(draw_bits(own_keys[:, None], steps(ids))).astype(np.float32)
    wanted, noisy = rows.copy(), temperatures > 0
    wanted[noisy] = (rows[noisy] / temperatures[noisy, None] + noise[noisy]) / np.float32(scale)
    sampler.perturb(rows, temperatures, scale, own_keys, ids)
    assert np.array_equal(rows, wanted)


@pytest.mark.parametrize("width", [1, 2, 63, 64, 65, 1000, 20_000, 49_152])
@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0, 30.0])
@pytest.mark.parametrize("temperature", [0.01, 0.7, 1.0, 2.0])
def test_the_choice_is_that_of_the_definition(
    sampler: NativeSampler, width: int, spread: float, temperature: float
) -> None:
    generator = np.random.default_rng(width)
    rows = (generator.normal(size=(12, width)) * spread).astype(np.float32)
    rows[::3, ::2] = -np.inf
    rows[:, -1] = np.maximum(rows[:, -1], np.float32(-3.0))
    temperatures = np.full(12, temperature)
    found = uncut(sampler, rows, temperatures, keys(12))
    assert found.tolist() == by_definition(rows, temperatures, keys(12))


@given(seed=st.integers(0, 2**63 - 1), width=st.integers(1, 300), scale=st.floats(0.0, 50.0), t=st.floats(1e-3, 8.0))
@settings(max_examples=150, deadline=None)
def test_any_row_of_any_seed(seed: int, width: int, scale: float, t: float) -> None:
    rows = (np.random.default_rng(seed).normal(size=(3, width)) * scale).astype(np.float32)
    own_keys = row_keys(Stream.TARGET, [seed] * 3, 0, [1, 2, 3])
    wanted = by_definition(rows, np.full(3, t), own_keys)
    for level in LEVELS:
        assert uncut(NativeSampler(_native.Level(level)), rows, np.full(3, t), own_keys).tolist() == wanted


def test_thousands_of_unlikely_ids_win_as_often_as_they_should(sampler: NativeSampler) -> None:
    """One id of probability about a half beside many of tiny ones, most of which only their noise can bring up."""
    row = np.full(40_000, -10.6, np.float32)
    row[123] = 0.0
    rows, own_keys = np.repeat(row[None], 400, 0), keys(400, seed=5)
    found = uncut(sampler, rows, np.ones(400), own_keys)
    assert found.tolist() == by_definition(rows, np.ones(400), own_keys)
    assert 150 < np.count_nonzero(found != 123) < 250


def test_extreme_logits(sampler: NativeSampler) -> None:
    largest = np.finfo(np.float32).max
    rows = np.array([[largest, -largest, 0.0], [-largest, -np.inf, -np.inf], [-np.inf, 5.0, -np.inf]], np.float32)
    assert uncut(sampler, rows, np.ones(3), keys(3)).tolist() == [0, 0, 1]


def test_threads_and_neighbours_do_not_matter(sampler: NativeSampler) -> None:
    rows = np.random.default_rng(3).normal(size=(5, 30_000)).astype(np.float32)
    together = uncut(sampler, rows, np.ones(5), keys(5)).tolist()
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            alone = [uncut(sampler, rows[b : b + 1], np.ones(1), keys(5)[b : b + 1])[0] for b in range(5)]
            assert alone == together
    finally:
        torch.set_num_threads(before)


def test_wrong_arguments_are_refused(sampler: NativeSampler) -> None:
    rows = np.zeros((2, 9), np.float32)
    with pytest.raises(ValueError, match="float64"):
        uncut(sampler, np.zeros((2, 9)), np.ones(2), keys(2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="strided"):
        uncut(sampler, np.zeros((2, 18), np.float32)[:, ::2], np.ones(2), keys(2))
    with pytest.raises(ValueError, match="keys are int64: give uint64"):
        uncut(sampler, rows, np.ones(2), np.zeros(2, np.int64))
    warm, ids = np.ones(2, np.float32), np.arange(9)
    with pytest.raises(ValueError, match="keys are float64"):
        sampler.perturb(rows, warm, 1.0, np.zeros(2), ids)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="strided"):
        sampler.perturb(np.zeros((2, 18), np.float32)[:, ::2], warm, 1.0, keys(2), ids)
    for wrong in ((warm[:1], keys(2), ids), (warm, keys(1), ids), (warm, keys(2), ids[:5])):
        with pytest.raises(ValueError, match="2 rows of 9 have"):
            sampler.perturb(rows, wrong[0], 1.0, wrong[1], wrong[2])
    with pytest.raises(ValueError, match="2 rows have 1, 2, 2, 2, 2 temperatures"):
        uncut(sampler, rows, np.ones(1), keys(2))
    for short in range(3):
        cuts = [np.zeros(1 if short == i else 2) for i in range(3)]
        with pytest.raises(ValueError, match="give one of each"):
            sampler.choose(rows, np.ones(2), cuts[0], cuts[1], cuts[2], keys(2))
    with pytest.raises(ValueError, match="give one of each"):
        uncut(sampler, rows, np.ones(2), keys(1))
