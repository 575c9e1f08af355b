"""Rule `rejection`: children are accepted or rejected so that the output follows the target's distribution.

A child drawn from q is accepted with probability min(1, p/q). On rejection p becomes norm(max(p - q, 0)), q loses the
token and is renormalised, and the next sibling is tried; at the end the rest of p is drawn from (Leviathan et al.,
arXiv 2211.17192, and Chen et al., arXiv 2302.01318; siblings without replacement as in EAGLE, arXiv 2401.15077).
A point-mass proposal is accepted with probability p(x), else p(x) becomes 0. Proof: docs/losslessness.md.

Draws are keyed by (seed, sample, root position, node, stream). Every step commits at least one token, so a root
position belongs to one step, and a step repeated after a rollback repeats its draws.

Shape suffixes: B sequences still walking, J children, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from alula.config import AlulaError
from alula.sampling.distribution import probabilities
from alula.sampling.noise import DoubleArray, Stream, uniform
from alula.sequence import StepPlan, Verdict
from alula.tree import DraftTree, FloatArray, IntArray
from alula.verify.walk import Argmax, Walk, run

if TYPE_CHECKING:
    import torch


def verify(
    logits_RV: torch.Tensor,
    trees: Sequence[DraftTree | None],
    plan: StepPlan,
    *,
    argmax: Argmax | None = None,
) -> list[Verdict | None]:
    """Verdicts aligned with `plan.items`; arguments and purity as in `coupled.verify`.

    Raises AlulaError for a tree with sampled children whose parent's proposal is missing.
    """
    return run(logits_RV, trees, plan, _decide, argmax=argmax)


def _decide(shaped_BV: FloatArray, walks: Sequence[Walk]) -> list[tuple[int, int | None]]:
    target_BV = probabilities(shaped_BV, [walk.sequence.params for walk in walks])
    accepted_B = _try_children(target_BV, walks)
    drawn_B = draw(target_BV, _uniforms(Stream.RESIDUAL, walks, np.array([[walk.node] for walk in walks]))[:, 0])
    moves: list[tuple[int, int | None]] = []
    for walk, child, drawn in zip(walks, accepted_B.tolist(), drawn_B.tolist(), strict=True):
        moves.append((drawn, None) if child < 0 else (int(walk.tree.tokens_N[child]), child))
    return moves


def _try_children(target_BV: DoubleArray, walks: Sequence[Walk]) -> IntArray:
    """Accepted child of each walk, or -1; the rows of rejected ones are left as what is still to be drawn from."""
    child_BJ = _padded([walk.children for walk in walks])
    accepted_B = np.full(len(walks), -1)
    if not child_BJ.shape[1]:
        return accepted_B
    token_BJ = _padded([walk.tree.tokens_N[list(walk.children)] for walk in walks])
    uniform_BJ = _uniforms(Stream.ACCEPT, walks, child_BJ)
    sampled_B = np.array([walk.tree.sampled and bool(walk.children) for walk in walks])
    for kind, try_group in ((~sampled_B, accept_points), (sampled_B, accept_sampled)):
        rows = np.flatnonzero(kind)
        if not len(rows):
            continue
        group_BV = target_BV[rows]
        proposals = (
            [_proposal(walks[b], group_BV.shape[1]) for b in rows.tolist()] if try_group is accept_sampled else []
        )
        which_B = try_group(group_BV, token_BJ[rows], uniform_BJ[rows], proposals)
        target_BV[rows] = group_BV
        accepted_B[rows] = np.where(which_B < 0, -1, child_BJ[rows, which_B])
    return accepted_B


def accept_points(
    target_BV: DoubleArray, token_BJ: IntArray, uniform_BJ: DoubleArray, proposals: Sequence[DoubleArray] = ()
) -> IntArray:
    """Index of the accepted child per row, or -1, for children that were certain to be proposed.

    token_BJ: padded with -1. target_BV (changed in place): what remains of p after the rejections.
    """
    which_B = np.full(len(target_BV), -1)
    for j in range(token_BJ.shape[1]):
        rows = np.flatnonzero((which_B < 0) & (token_BJ[:, j] >= 0))
        tokens = token_BJ[rows, j]
        accept = uniform_BJ[rows, j] < target_BV[rows, tokens]
        which_B[rows[accept]] = j
        rows, tokens = rows[~accept], tokens[~accept]
        residual = target_BV[rows]
        residual[np.arange(len(rows)), tokens] = 0.0
        target_BV[rows] = _normalised(residual, target_BV[rows])
    return which_B


def accept_sampled(
    target_BV: DoubleArray, token_BJ: IntArray, uniform_BJ: DoubleArray, proposals: Sequence[DoubleArray]
) -> IntArray:
    """The same for children drawn from `proposals` (one row per sequence) one after another without replacement.

    A child that q cannot produce (its support ran out) and those after it are not tried.
    """
    which_B = np.full(len(target_BV), -1)
    proposal_BV = np.stack(proposals)
    proposal_BV = _normalised(proposal_BV, proposal_BV)
    stopped_B = np.zeros(len(target_BV), np.bool_)
    for j in range(token_BJ.shape[1]):
        rows = np.flatnonzero((which_B < 0) & ~stopped_B & (token_BJ[:, j] >= 0))
        chance = proposal_BV[rows, token_BJ[rows, j]]
        stopped_B[rows[chance <= 0]] = True
        rows, chance = rows[chance > 0], chance[chance > 0]
        tokens = token_BJ[rows, j]
        accept = uniform_BJ[rows, j] * chance < target_BV[rows, tokens]
        which_B[rows[accept]] = j
        rows, tokens = rows[~accept], tokens[~accept]
        target_BV[rows] = _normalised(np.maximum(target_BV[rows] - proposal_BV[rows], 0.0), target_BV[rows])
        proposal_BV[rows, tokens] = 0.0
        proposal_BV[rows] = _normalised(proposal_BV[rows], proposal_BV[rows])
    return which_B


def draw(target_BV: DoubleArray, uniform_B: DoubleArray) -> IntArray:
    """One id per row from its distribution, by the inverse of the cumulative sum."""
    mass_BV = np.cumsum(target_BV, axis=1)
    drawn_B = np.count_nonzero(mass_BV <= (uniform_B * mass_BV[:, -1])[:, None], axis=1)
    last_B = target_BV.shape[1] - 1 - (target_BV[:, ::-1] > 0).argmax(axis=1)
    chosen_B: IntArray = np.minimum(drawn_B, last_B)
    return chosen_B


def _normalised(weights_BV: DoubleArray, otherwise_BV: DoubleArray) -> DoubleArray:
    """Rows divided by their sums; a row without any mass is replaced."""
    mass_B = weights_BV.sum(axis=1)
    empty_B = mass_B <= 0
    scaled_BV: DoubleArray = weights_BV / np.where(empty_B, 1.0, mass_B)[:, None]
    scaled_BV[empty_B] = otherwise_BV[empty_B]
    return scaled_BV


def _padded(rows: Sequence[Sequence[int] | IntArray]) -> IntArray:
    width = max(len(row) for row in rows)
    padded_BJ = np.full((len(rows), width), -1, np.int64)
    for b, row in enumerate(rows):
        padded_BJ[b, : len(row)] = row
    return padded_BJ


def _uniforms(stream: Stream, walks: Sequence[Walk], nodes_BJ: IntArray) -> DoubleArray:
    keys = np.array([(w.sequence.seed, w.sequence.sample, w.sequence.root_position) for w in walks], np.int64)
    return uniform(stream, keys[:, :1], keys[:, 1:2], keys[:, 2:], nodes_BJ)


def _proposal(walk: Walk, size: int) -> DoubleArray:
    """q of the walk's node in float64, padded with zeros to the target's vocabulary."""
    given = walk.tree.proposals.get(walk.node)
    if given is None:
        raise AlulaError(f"proposals lack node {walk.node}, whose children were sampled: store the q they came from")
    proposal_V = np.zeros(size)
    proposal_V[: len(given)] = given.detach().cpu().numpy()
    return proposal_V
