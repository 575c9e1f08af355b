"""Figures of a drafter on held-out texts, by what it proposes along the true text.

They say how training goes. What counts in the end is the serving path, which the engine measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from alula.train.batch import Batch
from alula.train.methods.method import Method


@dataclass(frozen=True)
class StepFigures:
    """One step, pooled over all chains."""

    rows: int
    """Predictions looked at."""
    top1: float
    """Share where the drafter's first choice is the target's."""
    top4: float
    """Share where the target's choice is among the drafter's first four."""
    conditional_top1: float
    """top1 among the chains whose earlier first choices were all the text's tokens (alpha of EAGLE-3)."""
    conditional_top4: float
    """top4 among the chains where each earlier token was among the first four."""


def evaluate(method: Method, batches: Sequence[Batch], *, steps: int) -> list[StepFigures]:
    """Figures per step. A target choice that the drafter cannot say counts as a miss."""
    counts = torch.zeros(steps, 7, dtype=torch.float64)
    with torch.inference_mode():
        for batch in batches:
            counts += _count(method, batch, steps)
    return [_figures(row.tolist()) for row in counts]


def _count(method: Method, batch: Batch, steps: int) -> Tensor:
    """Per step: rows, top-1 hits, top-4 hits, then (rows, hits) of the chains alive by top-1 and by top-4."""
    counts = torch.zeros(steps, 7, dtype=torch.float64)
    alive1 = batch.valid_BA.reshape(-1).clone()
    alive4 = alive1.clone()
    for step, guesses in enumerate(method.guesses(batch, steps=steps, width=4)):
        flat_R, index_R, best_R4 = guesses.flat_R, guesses.index_R, guesses.tokens_RK
        hit_R4 = best_R4 == batch.choice_M[index_R, None]
        hit1_R, hit4_R = hit_R4[:, 0], hit_R4.any(-1)
        on1_R, on4_R = alive1[flat_R], alive4[flat_R]
        figures = (torch.ones_like(on1_R), hit1_R, hit4_R, on1_R, on1_R & hit1_R, on4_R, on4_R & hit4_R)
        counts[step] = torch.stack([figure.sum() for figure in figures])
        followed_R4 = best_R4 == batch.token_M[index_R, None]
        alive1 = _only(alive1, flat_R, followed_R4[:, 0])
        alive4 = _only(alive4, flat_R, followed_R4.any(-1))
    return counts


def _only(alive: Tensor, flat_R: Tensor, followed_R: Tensor) -> Tensor:
    """Chains that were alive, had a row, and were followed."""
    still = torch.zeros_like(alive)
    still[flat_R] = alive[flat_R] & followed_R
    return still


def _figures(counts: list[float]) -> StepFigures:
    rows, top1, top4, on1, hit1, on4, hit4 = counts
    return StepFigures(int(rows), top1 / max(rows, 1), top4 / max(rows, 1), hit1 / max(on1, 1), hit4 / max(on4, 1))


def expected_length(figures: Sequence[StepFigures], *, branch: int) -> float:
    """Expected tokens per forward of an endless-width walk: 1 + a0 + a0 a1 + ...; ``branch`` is 1 or 4."""
    total, alive = 1.0, 1.0
    for figure in figures:
        alive *= figure.conditional_top1 if branch == 1 else figure.conditional_top4
        total += alive
    return total
