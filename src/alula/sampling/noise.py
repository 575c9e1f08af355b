"""Counter-based random numbers: any draw can be computed at any time, in any order, from its key alone.

A key is (stream, seed, sample, position, node); a draw adds a token id. Keys are folded with the finaliser of
SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, with the
constants of Stafford's variant 13): the draws of one key are the SplitMix64 sequence that starts at the key.
52 bits become u in (0, 1), never 0 or 1, and Gumbel noise is -log(-log u).

Everything up to u is integer arithmetic. The logarithm is a fixed sequence of IEEE additions, multiplications
and one division in float64, each correctly rounded by any hardware and any vector width, so noise has the same bits
everywhere. It is rarely evaluated: `noisy_argmax` first prunes with the platform's own logarithm.

Shape suffixes: B rows, K candidates of a row, I ids.
"""

from __future__ import annotations

import enum
import math
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from alula.tree import IntArray

UIntArray = NDArray[np.uint64]
DoubleArray = NDArray[np.float64]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9), np.uint64(27), np.uint64(0x94D049BB133111EB), np.uint64(31))
_FEW = 16
"""So few keys are made one by one: a call of numpy takes longer than one of them."""
_ROUNDS, _LAST, _STRIDE, _ALL = ((30, int(_MIX[1])), (27, int(_MIX[3]))), 31, int(_STEP), 2**64 - 1
_BYTE, _HALF, _LOW_HALF = np.uint64(8), np.uint64(32), np.uint64(2**32 - 1)
_SQRT_HALF = 0.7071067811865476
_LN2 = 0.6931471805599453
_SERIES = tuple(2.0 / n for n in range(21, 1, -2))
"""2/21, 2/19, ..., 2/3: the series of log((1 + s) / (1 - s)) / s - 2 in s squared, highest power first."""
_PRUNE = 1e-9
"""Far above the error of any logarithm used here (about 1e-15), far below the gap of two noisy scores."""


class Stream(enum.IntEnum):
    """Separate sources of randomness. Sharing one between roles biases the output of rule `rejection`."""

    TARGET = 1
    """Rule `coupled`: the noise by which the target chooses, and which the drafter knows."""
    DRAFT = 2
    ACCEPT = 3
    RESIDUAL = 4


def _mix(z: UIntArray) -> UIntArray:
    """SplitMix64's finaliser, in place."""
    first, mul_1, second, mul_2, third = _MIX
    shifted = z >> first
    z ^= shifted
    z *= mul_1
    np.right_shift(z, second, out=shifted)
    z ^= shifted
    z *= mul_2
    np.right_shift(z, third, out=shifted)
    z ^= shifted
    return z


def _words(values: ArrayLike) -> UIntArray:
    """Whole numbers of 64 bits, negative ones in two's complement, as an array of at least one dimension."""
    return np.atleast_1d(np.asarray(values, np.int64)).view(np.uint64)


def _mix_one(z: int) -> int:
    for shift, factor in _ROUNDS:
        z = (z ^ z >> shift) * factor & _ALL
    return z ^ z >> _LAST


def _row_key(stream: Stream, seed: int, sample: int, position: int, node: int) -> int:
    key = _mix_one(seed + _STRIDE & _ALL)
    key = _mix_one(key + (position << 8 | stream) * _STRIDE & _ALL)
    return _mix_one(key + (sample << 32 | node & 0xFFFFFFFF) * _STRIDE & _ALL)


def row_keys(
    stream: Stream, seeds: ArrayLike, samples: ArrayLike, positions: ArrayLike, nodes: ArrayLike = 0
) -> UIntArray:
    """Keys, one per row; the arguments broadcast against each other.

    For one seed, positions below 2**56 and samples and nodes below 2**32 give different places and choices, and each
    fold is one-to-one.
    """
    if isinstance(positions, list) and len(positions) <= _FEW:
        columns = [c if isinstance(c, list) else [c] * len(positions) for c in (seeds, samples, positions, nodes)]
        if all(len(column) == len(positions) for column in columns):
            return np.array([_row_key(stream, *map(int, row)) for row in zip(*columns, strict=True)], np.uint64)
    place: UIntArray = (_words(positions) << _BYTE) | np.uint64(stream)
    which: UIntArray = (_words(samples) << _HALF) | (_words(nodes) & _LOW_HALF)
    key = _mix(_words(seeds) + _STEP)
    key = _mix(key + place * _STEP)
    return _mix(key + which * _STEP)


def steps(token_ids: ArrayLike) -> UIntArray:
    """What an id adds to a key."""
    return (_words(token_ids) + np.uint64(1)) * _STEP


@lru_cache(maxsize=2)
def all_steps(size: int) -> UIntArray:
    """Steps of the ids 0 .. size - 1, read-only: the same for every row of a model."""
    table = steps(np.arange(size))
    table.setflags(write=False)
    return table


def draw_bits(keys: UIntArray, steps_: UIntArray) -> UIntArray:
    """64 random bits per (key, step); the arguments broadcast against each other."""
    return _mix(keys + steps_)


def to_unit(bits: UIntArray) -> DoubleArray:
    """The top 52 bits as a number strictly between 0 and 1 (an odd multiple of 2**-53)."""
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def exact_log(x: DoubleArray) -> DoubleArray:
    """Natural logarithm of positive normal numbers, within 3 units in the last place, with the same bits everywhere.

    x = 2**e * m with m in [sqrt(1/2), sqrt(2)); log m = 2 artanh(s) with s = (m - 1) / (m + 1), |s| < 0.172.
    """
    m, e = np.frexp(x)
    low = m < _SQRT_HALF
    m = np.where(low, m + m, m)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    series = np.full_like(s, _SERIES[0])
    for coefficient in _SERIES[1:]:
        series = series * z + coefficient
    tail: DoubleArray = s * z * series
    logarithm: DoubleArray = (e.astype(np.float64) - low) * _LN2 + (s + s + tail)
    return logarithm


def to_gumbel(bits: UIntArray) -> DoubleArray:
    """Standard Gumbel noise of the bits, with the same value on every platform."""
    noise: DoubleArray = -exact_log(-exact_log(to_unit(bits)))
    return noise


def near_gumbel(bits: UIntArray) -> DoubleArray:
    """The same noise to about 1e-14 by the platform's logarithm: for bounds and for drafters."""
    noise: DoubleArray = -np.log(-np.log(to_unit(bits)))
    return noise


def gumbel_rows(
    seeds: ArrayLike, samples: ArrayLike, positions: ArrayLike, token_ids: IntArray, stream: Stream = Stream.TARGET
) -> DoubleArray:
    """Noise [B, K] of the ids [B, K] (or [K], the same for all rows), one (seed, sample, position) per row."""
    return to_gumbel(draw_bits(row_keys(stream, seeds, samples, positions)[:, None], steps(token_ids)))


def gumbel(seed: int, sample: int, position: int, token_ids: IntArray) -> DoubleArray:
    """Noise [I] of the ids [I] at an absolute position of sample number `sample`: the law of rule `coupled`."""
    noise_I: DoubleArray = gumbel_rows(seed, sample, position, token_ids)[0]
    return noise_I


def uniform(
    stream: Stream, seeds: ArrayLike, samples: ArrayLike, positions: ArrayLike, nodes: ArrayLike
) -> DoubleArray:
    """Uniform numbers in (0, 1), one per (seed, sample, root position, node); the arguments broadcast."""
    return to_unit(draw_bits(row_keys(stream, seeds, samples, positions, nodes), steps(0)))


def least_bits(level: float) -> np.uint64:
    """A bound: noise of at least `level` can only come from bits of at least this value."""
    chance = -math.expm1(-math.exp(-max(level - _PRUNE, -30.0)))
    reaching = int(chance * (1 + _PRUNE) * 2.0**64) + 2**14
    return np.uint64(max(2**64 - reaching, 0))


def noisy_argmax(scores_BK: DoubleArray, bits_BK: UIntArray, ids_BK: IntArray) -> IntArray:
    """Id with the largest score + noise of each row, the lowest id of equals; shape [B].

    Scores of -inf never win. The choice is that of `to_gumbel`; it is evaluated only for near ties.
    """
    near_BK = scores_BK + near_gumbel(bits_BK)
    best_B = near_BK.max(axis=1)
    ties_BK = near_BK >= (best_B - _PRUNE * (1.0 + np.abs(best_B)))[:, None]
    chosen_B: IntArray = ids_BK[np.arange(len(ids_BK)), ties_BK.argmax(axis=1)]
    for row in np.flatnonzero(np.count_nonzero(ties_BK, axis=1) > 1):
        tied = np.flatnonzero(ties_BK[row])
        keys = scores_BK[row, tied] + to_gumbel(bits_BK[row, tied])
        chosen_B[row] = ids_BK[row, tied[keys == keys.max()]].min()
    return chosen_B
