"""The one definition of the target distribution of a node, and the choice of rule `coupled` from it.

logits -> shaping (`processors`) -> temperature -> top-k -> top-p -> min-p -> probabilities

Tokens are ordered by (logit descending, id ascending). Each cut keeps a prefix of that order, so the support is
the shortest of the three prefixes. The prefix is found among the tokens within `reach` nats of the best; where it is
not settled there, the reach grows, in the end to the whole vocabulary.

A row's result depends on that row alone, bit for bit: elementwise float64 arithmetic, cumulative sums in sorted
order, and one sum over the vocabulary that is always taken of a single row of full width.

Shape suffixes: B rows, K candidates of a row, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from alula.sampling.noise import (
    DoubleArray,
    Stream,
    UIntArray,
    all_steps,
    draw_bits,
    least_bits,
    near_gumbel,
    noisy_argmax,
    row_keys,
    steps,
)
from alula.sampling.processors import Context, SamplingError, Shaper, shape_rows
from alula.sequence import SamplingParams
from alula.tree import FloatArray, IntArray

if TYPE_CHECKING:
    import torch

    from alula.kernels.protocol import Sampler

_REACHES = (5.0, 10.0, 20.0, math.inf)
_SMALL_VOCABULARY = 1024
"""Up to here sorting everything at once is cheaper than looking for candidates."""
_FIRST_LOOK = 2048


@dataclass(frozen=True)
class Support:
    """Tokens left after the cuts, in order, padded with id 0 and score -inf; scores are logit / temperature."""

    ids_BK: IntArray
    scores_BK: DoubleArray


def has_cut(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def first_argmax(rows_RV: FloatArray) -> IntArray:
    """Id of each row's largest logit, the lowest of equals (numpy promises the first; torch promises none)."""
    chosen: IntArray = rows_RV.argmax(axis=1)
    return chosen


def scores_of(rows_BV: FloatArray, params_B: Sequence[SamplingParams]) -> DoubleArray:
    """logit / temperature in float64: distinct fp32 logits stay distinct and in order. [B, V]"""
    temperatures = np.array([p.temperature for p in params_B])
    scores: DoubleArray = rows_BV.astype(np.float64) / temperatures[:, None]
    return scores


def row_mass(row_V: FloatArray, temperature: float = 1.0) -> float:
    """Sum over the vocabulary of exp((logit - max) / temperature). One row of full width, so always the same bits."""
    shifted = row_V - row_V.max()
    if temperature != 1.0:
        shifted /= np.float32(temperature)
    np.exp(shifted, out=shifted)
    return float(np.add.reduce(shifted, dtype=np.float64))


def cut(rows_BV: FloatArray, params_B: Sequence[SamplingParams]) -> Support:
    """Temperature, top-k, top-p, min-p on shaped logits; every row needs a finite best logit."""
    size = rows_BV.shape[1]
    if size <= _SMALL_VOCABULARY or len(rows_BV) == 1:
        first = len(_REACHES) - 1 if size <= _SMALL_VOCABULARY else 0
        return _settle(rows_BV, params_B, first)
    parts = [_settle(rows_BV[b : b + 1], params_B[b : b + 1], 0) for b in range(len(rows_BV))]
    return _stack(parts)


def _settle(rows_BV: FloatArray, params_B: Sequence[SamplingParams], first: int) -> Support:
    for reach in _REACHES[first:]:
        candidates = _candidates(rows_BV, params_B, reach)
        keep_B = _kept(candidates.scores_BK, rows_BV, params_B, reach)
        if keep_B is not None:
            break
    else:
        raise AssertionError("an unlimited reach settles every cut")
    width = int(keep_B.max())
    scores = candidates.scores_BK[:, :width]
    return Support(candidates.ids_BK[:, :width], np.where(np.arange(width) < keep_B[:, None], scores, -np.inf))


def _candidates(rows_BV: FloatArray, params_B: Sequence[SamplingParams], reach: float) -> Support:
    """Tokens within `reach` nats of the best (all, for an infinite reach), in order. One row, or an infinite reach."""
    if math.isinf(reach):
        ids_BK: IntArray = np.argsort(-rows_BV, axis=1, kind="stable")
        return Support(ids_BK, scores_of(np.take_along_axis(rows_BV, ids_BK, axis=1), params_B))
    row_V = rows_BV[0]
    ids = np.flatnonzero(row_V >= _floor(row_V, reach * params_B[0].temperature))
    ids = ids[np.argsort(-row_V[ids], kind="stable")]
    return Support(ids[None], scores_of(row_V[ids][None], params_B))


def _floor(row_V: FloatArray, depth: float) -> np.float32:
    lowest = float(np.finfo(np.float32).min)
    return np.float32(max(float(row_V.max()) - depth, lowest))


def _kept(
    scores_BK: DoubleArray, rows_BV: FloatArray, params_B: Sequence[SamplingParams], reach: float
) -> IntArray | None:
    """Length of each row's support, or None if more candidates are needed to tell.

    Beyond the small vocabularies there is one row, and top-p without top-k takes its total from the whole row
    whether or not the candidates are complete, so that the cut does not depend on the way it was found.
    """
    complete = math.isinf(reach)
    width = scores_BK.shape[1]
    alive_B = np.count_nonzero(scores_BK > -np.inf, axis=1)
    limit_B = np.array([p.top_k if p.top_k > 0 else rows_BV.shape[1] for p in params_B])
    ranked = limit_B < rows_BV.shape[1]
    if not complete and (ranked & (alive_B < limit_B)).any():
        return None
    keep_B = np.minimum(alive_B, limit_B)
    top_p_B = np.array([p.top_p for p in params_B])
    weights_BK = np.exp(scores_BK - scores_BK[:, :1])
    weights_BK[np.arange(width) >= keep_B[:, None]] = 0.0
    mass_BK = np.cumsum(weights_BK, axis=1)
    if (top_p_B < 1.0).any():
        total_B = mass_BK[:, -1]
        if rows_BV.shape[1] > _SMALL_VOCABULARY and not ranked.all():
            total_B = np.array([row_mass(rows_BV[0], params_B[0].temperature)])
            if not complete and mass_BK[0, -1] < top_p_B[0] * total_B[0]:
                return None
        goal_B = np.where(top_p_B < 1.0, top_p_B * total_B, np.inf)
        keep_B = np.minimum(keep_B, 1 + np.count_nonzero(mass_BK < goal_B[:, None], axis=1))
    return _apply_min_p(keep_B, weights_BK, params_B, reach)


def _apply_min_p(
    keep_B: IntArray, weights_BK: DoubleArray, params_B: Sequence[SamplingParams], reach: float
) -> IntArray | None:
    min_p_B = np.array([p.min_p for p in params_B])
    kept: IntArray = np.minimum(keep_B, np.count_nonzero(weights_BK >= min_p_B[:, None], axis=1))
    only_min_p = not math.isinf(reach) and params_B[0].top_k <= 0 and params_B[0].top_p >= 1.0
    if only_min_p and min_p_B[0] < math.exp(-reach) * 1.001:
        return None
    return kept


def _stack(parts: Sequence[Support]) -> Support:
    width = max(part.ids_BK.shape[1] for part in parts)
    ids_BK = np.zeros((len(parts), width), np.int64)
    scores_BK = np.full((len(parts), width), -np.inf)
    for b, part in enumerate(parts):
        ids_BK[b, : part.ids_BK.shape[1]] = part.ids_BK[0]
        scores_BK[b, : part.ids_BK.shape[1]] = part.scores_BK[0]
    return Support(ids_BK, scores_BK)


def probabilities(rows_BV: FloatArray, params_B: Sequence[SamplingParams]) -> DoubleArray:
    """Target distributions [B, V] of shaped logits; a greedy row has all its mass on its choice."""
    target_BV = np.zeros(rows_BV.shape)
    greedy = np.array([p.is_greedy for p in params_B], np.bool_)
    cuts = np.array([has_cut(p) for p in params_B], np.bool_) & ~greedy
    for chosen, fill in ((greedy, _one_hot), (cuts, _cut_weights), (~greedy & ~cuts, _all_weights)):
        rows = np.flatnonzero(chosen)
        if len(rows):
            target_BV[rows] = fill(rows_BV[rows], [params_B[b] for b in rows.tolist()])
    return target_BV


def _one_hot(rows_BV: FloatArray, params_B: Sequence[SamplingParams]) -> DoubleArray:
    target_BV = np.zeros(rows_BV.shape)
    target_BV[np.arange(len(rows_BV)), first_argmax(rows_BV)] = 1.0
    return target_BV


def _cut_weights(rows_BV: FloatArray, params_B: Sequence[SamplingParams]) -> DoubleArray:
    support = cut(rows_BV, params_B)
    weights_BK = np.exp(support.scores_BK - support.scores_BK[:, :1])
    weights_BK /= np.cumsum(weights_BK, axis=1)[:, -1:]
    target_BV = np.zeros(rows_BV.shape)
    live_BK = weights_BK > 0
    target_BV[live_BK.nonzero()[0], support.ids_BK[live_BK]] = weights_BK[live_BK]
    return target_BV


def _all_weights(rows_BV: FloatArray, params_B: Sequence[SamplingParams]) -> DoubleArray:
    weights_BV = scores_of(rows_BV, params_B)
    weights_BV -= weights_BV.max(axis=1, keepdims=True)
    np.exp(weights_BV, out=weights_BV)
    weights_BV /= np.array([np.add.reduce(weights_V) for weights_V in weights_BV])[:, None]
    return weights_BV


def distribution(logits_RV: torch.Tensor, contexts: Sequence[Context]) -> torch.Tensor:
    """Target distributions, float64 [R, V], of logits at these contexts. The logits are not changed.

    Raises SamplingError where no token can be chosen.
    """
    import torch

    rows_RV = logits_RV.detach().to("cpu", torch.float32, copy=True).contiguous().numpy()
    shapers = [Shaper(context.sequence) for context in contexts]
    for error in shape_rows(rows_RV, shapers, [c.path for c in contexts], [c.mask for c in contexts]):
        if error is not None:
            raise SamplingError(error)
    return torch.from_numpy(probabilities(rows_RV, [context.sequence.params for context in contexts]))


def choose(
    rows_BV: FloatArray,
    params_B: Sequence[SamplingParams],
    seeds_B: Sequence[int],
    samples_B: Sequence[int],
    positions_B: Sequence[int],
    sampler: Sampler | None = None,
) -> IntArray:
    """Tokens [B] that the target chooses at absolute positions, by rule `coupled`, from shaped logits.

    sampler: makes the choice where any row is not greedy; None is numpy's. The two differ at most where the mass
    of some first tokens is within about a millionth of a top-p bound.
    """
    if all(p.is_greedy for p in params_B):
        return first_argmax(rows_BV)
    keys_B = row_keys(Stream.TARGET, seeds_B, samples_B, positions_B)
    if sampler is None:
        return _choose_by_numpy(rows_BV, params_B, keys_B)
    return _choose_by(sampler, rows_BV, params_B, keys_B)


def _choose_by(
    sampler: Sampler, rows_BV: FloatArray, params_B: Sequence[SamplingParams], keys_B: UIntArray
) -> IntArray:
    return sampler.choose(
        rows_BV,
        np.array([0.0 if p.is_greedy else p.temperature for p in params_B]),
        np.array([p.top_k for p in params_B], np.int64),
        np.array([p.top_p for p in params_B]),
        np.array([p.min_p for p in params_B]),
        keys_B,
    )


def _choose_by_numpy(rows_BV: FloatArray, params_B: Sequence[SamplingParams], keys_B: UIntArray) -> IntArray:
    chosen_B = np.zeros(len(rows_BV), np.int64)
    greedy = np.array([p.is_greedy for p in params_B], np.bool_)
    cuts = np.array([has_cut(p) for p in params_B], np.bool_) & ~greedy
    chosen_B[greedy] = first_argmax(rows_BV[greedy])
    for wanted, choose_rows in ((cuts, _choose_cut), (~greedy & ~cuts, _choose_any)):
        rows = np.flatnonzero(wanted)
        if len(rows):
            some = rows_BV if len(rows) == len(rows_BV) else rows_BV[rows]
            chosen_B[rows] = choose_rows(some, [params_B[b] for b in rows.tolist()], keys_B[rows])
    return chosen_B


def _choose_cut(rows_BV: FloatArray, params_B: Sequence[SamplingParams], keys_B: UIntArray) -> IntArray:
    support = cut(rows_BV, params_B)
    return noisy_argmax(support.scores_BK, draw_bits(keys_B[:, None], steps(support.ids_BK)), support.ids_BK)


def _choose_any(rows_BV: FloatArray, params_B: Sequence[SamplingParams], keys_B: UIntArray) -> IntArray:
    """With no cut every token of the vocabulary may win."""
    steps_V = all_steps(rows_BV.shape[1])
    if len(steps_V) <= _SMALL_VOCABULARY:
        ids_BV = np.broadcast_to(np.arange(len(steps_V)), rows_BV.shape)
        return noisy_argmax(scores_of(rows_BV, params_B), draw_bits(keys_B[:, None], steps_V), ids_BV)
    return np.array(
        [
            _choose_among_all(row_V, params.temperature, keys_B[b : b + 1], steps_V)
            for b, (row_V, params) in enumerate(zip(rows_BV, params_B, strict=True))
        ]
    )


def _choose_among_all(row_V: FloatArray, temperature: float, key: UIntArray, steps_V: UIntArray) -> int:
    """The noisy argmax of a whole row, with noise only for ids that can win.

    The best noisy score among likely tokens is a lower bound of the winner's. Any other token scores at most
    `floor`, so it needs noise above the difference, which `least_bits` turns into a test of its bits alone.
    """
    floor = _floor(row_V, 4.0 * temperature)
    likely = np.flatnonzero(row_V > floor)
    rest = float(floor) / temperature
    if not 0 < len(likely) <= _FIRST_LOOK:
        likely, rest = np.append(likely[:_FIRST_LOOK], row_V.argmax()), float(row_V.max()) / temperature
    noisy = row_V[likely].astype(np.float64) / temperature + near_gumbel(draw_bits(key, steps_V[likely]))
    bits_V = draw_bits(key, steps_V)
    lucky_V = bits_V >= least_bits(float(noisy.max()) - rest - 1e-6 * (1.0 + abs(rest)))
    lucky_V[likely] = False
    ids = np.concatenate([likely, np.flatnonzero(lucky_V)])
    scores = row_V[ids].astype(np.float64) / temperature
    return int(noisy_argmax(scores[None], bits_V[ids][None], ids[None])[0])
