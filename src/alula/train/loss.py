"""Losses of the drafter's logits against the target's distribution over the draft vocabulary.

Soft targets over 8k ids for every step of the training-time test are the largest tensors of training. So the
logits are made, used and dropped in blocks of rows, gradients included (the idea of fused linear cross-entropy);
the target's distribution is made once per learned token and shared by all steps.

Shapes: R rows, M learned tokens of the batch, C draft vocabulary, D hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_BLOCK = 1024
"""Rows whose logits exist at one time."""
_LEAST = 1e-6
"""A chance of acceptance below this is counted as this much."""


def target_distribution(hidden_MD: Tensor, draft_rows_CD: Tensor) -> Tensor:
    """The target's distribution [M, C] at temperature 1, renormalised over the draft vocabulary.

    ``hidden_MD`` is the target's LM-head input one token before each learned token, ``draft_rows_CD`` the rows of
    the target's LM head that the draft vocabulary keeps; the softmax over these alone is the renormalisation.
    """
    with torch.no_grad(), torch.autocast(hidden_MD.device.type, enabled=False):
        return (hidden_MD @ draft_rows_CD.T).softmax(-1)


@dataclass(frozen=True)
class Candidates:
    """The draft ids of one batch whose logits are made, and what is added to each."""

    ids_N: Tensor
    """int64."""
    correction_N: Tensor
    """0 for ids that are always there; the log of the inverse chance for those drawn at random in place of the rest."""


def choose_candidates(probabilities_MC: Tensor, count: int, generator: torch.Generator) -> Candidates:
    """Most of ``count`` ids are the likeliest in the batch; a fifth is drawn from the rest and stands for all of it.

    Sampled softmax (Jean et al., arXiv 1412.2007): the normaliser stays right in expectation of its tail, for a
    fraction of the cost of the largest matrix of the head.
    """
    draft, place = probabilities_MC.shape[1], probabilities_MC.device
    if count <= 0 or count >= draft:
        return Candidates(torch.arange(draft, device=place), torch.zeros(draft, device=place))
    order_C = probabilities_MC.sum(0).argsort(descending=True)
    drawn = max(1, count // 5)
    likely_N, rest = order_C[: count - drawn], order_C[count - drawn :]
    chosen_N = rest[torch.randperm(len(rest), generator=generator)[:drawn].to(place)]
    correction_N = torch.zeros(count, device=place)
    correction_N[len(likely_N) :] = math.log(len(rest) / drawn)
    return Candidates(torch.cat([likely_N, chosen_N]), correction_N)


@dataclass(frozen=True)
class Teacher:
    """The target's distributions at the learned tokens of a batch, over the ids whose logits are made."""

    ids_N: Tensor
    """int64: rows of the LM head."""
    probabilities_MN: Tensor
    correction_N: Tensor
    """Added to the drafter's logits, see `Candidates`."""


def teacher(hidden_MD: Tensor, rows_CD: Tensor, candidates: int, generator: torch.Generator) -> Teacher:
    """``candidates``: how many ids to keep, 0 for all; see `choose_candidates`."""
    probabilities_MC = target_distribution(hidden_MD, rows_CD)
    chosen = choose_candidates(probabilities_MC, candidates, generator)
    probabilities_MN = probabilities_MC[:, chosen.ids_N]
    probabilities_MN /= probabilities_MN.sum(-1, keepdim=True)
    return Teacher(chosen.ids_N, probabilities_MN, chosen.correction_N)


def soft_cross_entropy(
    hidden_RD: Tensor,
    weight_CD: Tensor,
    probabilities_MC: Tensor,
    rows_R: Tensor,
    row_weights_R: Tensor,
    correction_C: Tensor,
    *,
    acceptance: float = 0.0,
) -> Tensor:
    """The sum over rows of row weight x cross-entropy of the logits hidden W^T + correction.

    ``rows_R`` names each row's distribution in ``probabilities_MC``. acceptance: the share that -log of the chance of
    acceptance has in each row's loss, in place of as much cross-entropy. A token drawn from q is accepted against p
    with the chance sum min(p, q), whose logarithm is what this loss raises.
    """
    apply: Callable[..., Tensor] = _SoftCrossEntropy.apply
    with torch.autocast(hidden_RD.device.type, enabled=False):
        return apply(
            hidden_RD.to(weight_CD.dtype), weight_CD, probabilities_MC, rows_R, row_weights_R, correction_C, acceptance
        )


def mean_cross_entropy(
    hidden_RD: Tensor, weight_CD: Tensor, teacher: Teacher, rows_R: Tensor, *, acceptance: float = 0.0
) -> Tensor:
    """The mean over rows, 0 for none, against the teacher's distributions that ``rows_R`` names."""
    share_R = weight_CD.new_full((len(rows_R),), 1 / max(len(rows_R), 1))
    return soft_cross_entropy(
        hidden_RD, weight_CD, teacher.probabilities_MN, rows_R, share_R, teacher.correction_N, acceptance=acceptance
    )


class _SoftCrossEntropy(torch.autograd.Function):
    """The weighted sum, with its gradients made block by block in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: Tensor,
        weight_CD: Tensor,
        probabilities_MC: Tensor,
        rows_R: Tensor,
        row_weights_R: Tensor,
        correction_C: Tensor,
        acceptance: float,
    ) -> Tensor:
        total = hidden_RD.new_zeros(())
        grad_hidden_RD = torch.empty_like(hidden_RD)
        grad_weight_CD = torch.zeros_like(weight_CD) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden_RD), _BLOCK):
            block = slice(start, start + _BLOCK)
            hidden_TD, weights_T1 = hidden_RD[block], row_weights_R[block, None]
            logits_TC = torch.addmm(correction_C, hidden_TD, weight_CD.T)
            losses_T1, gradient_TC = _rows(logits_TC, probabilities_MC[rows_R[block]], acceptance)
            total += (losses_T1 * weights_T1).sum()
            gradient_TC.mul_(weights_T1)
            torch.mm(gradient_TC, weight_CD, out=grad_hidden_RD[block])
            if grad_weight_CD is not None:
                grad_weight_CD.addmm_(gradient_TC.T, hidden_TD)
        ctx.save_for_backward(grad_hidden_RD, grad_weight_CD)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden_RD, grad_weight_CD = ctx.saved_tensors
        of_weight = None if grad_weight_CD is None else grad_weight_CD * gradient
        return grad_hidden_RD * gradient, of_weight, None, None, None, None, None


def _rows(logits_TC: Tensor, wanted_TC: Tensor, acceptance: float) -> tuple[Tensor, Tensor]:
    """(loss of each row [T, 1], its gradient by the logits [T, C]); the logits are overwritten."""
    normaliser_T1 = logits_TC.logsumexp(-1, keepdim=True)
    entropy_T1 = normaliser_T1 - torch.linalg.vecdot(logits_TC, wanted_TC)[:, None]
    q_TC = logits_TC.sub_(normaliser_T1).exp_()
    if not acceptance:
        return entropy_T1, q_TC.sub_(wanted_TC)
    # d(-log a)/dz = (q s - q below) / a, with a = sum min(p, q), below = [q < p] and s = sum q below.
    accepted_T1 = torch.minimum(q_TC, wanted_TC).sum(-1, keepdim=True).clamp_min(_LEAST)
    below_TC = q_TC * (q_TC < wanted_TC)
    raised_TC = (q_TC * below_TC.sum(-1, keepdim=True) - below_TC) * (acceptance / accepted_T1)
    losses_T1 = entropy_T1 * (1 - acceptance) - accepted_T1.log() * acceptance
    return losses_T1, q_TC.sub_(wanted_TC).mul_(1 - acceptance).add_(raised_TC)
