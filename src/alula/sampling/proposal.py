"""What drafters need: log q under the request's own parameters, the order in which to propose, and honest draws from q.

The shaping of the target (masks, bias, penalties over the node's path) is applied to q as well, through the map
from the draft vocabulary to target ids. User processors and cuts are not: a guess may be cheap.

Shape suffixes: R rows (nodes to expand), C draft vocabulary, V target vocabulary, k children.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from alula.sampling.noise import DoubleArray, Stream, draw_bits, near_gumbel, row_keys, steps
from alula.sampling.processors import Context, Shaper
from alula.tree import IntArray

if TYPE_CHECKING:
    import torch


def proposal_scores(
    logits_RC: torch.Tensor, contexts: Sequence[Context], *, vocabulary: torch.Tensor | None = None, rule: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log q, keys), both fp32 [R, C]: the children of a node are the columns with the largest keys.

    vocabulary: target ids [C] of the columns (None: the same vocabulary). Row r stands at contexts[r].
    Keys are log q + G under rule `coupled` above temperature 0, with the very noise by which the target will choose
    at that position, and log q otherwise (temperature 0, and point-mass proposals of rule `rejection`). A column whose
    key is -inf is forbidden and must not become a child; a row may consist of such columns alone.
    """
    log_q_RC = proposal_log_q(logits_RC, contexts, vocabulary=vocabulary)
    noisy = [r for r, context in enumerate(contexts) if rule == "coupled" and not context.sequence.params.is_greedy]
    if not noisy:
        return log_q_RC, log_q_RC
    keys_RC = log_q_RC.clone()
    keys_RC[noisy] += _target_noise([contexts[r] for r in noisy], _target_ids(log_q_RC, vocabulary)).to(keys_RC)
    return log_q_RC, keys_RC


def proposal_log_q(
    logits_RC: torch.Tensor, contexts: Sequence[Context], *, vocabulary: torch.Tensor | None = None
) -> torch.Tensor:
    """log q, fp32 [R, C], at each request's temperature (1 for greedy ones) after its masks, bias and penalties."""
    import torch

    scaled_RC = logits_RC.to(torch.float32, copy=True)
    for r, shaper, context in _shaped_rows(contexts):
        row_C = shape_draft_row(scaled_RC[r], shaper, context, vocabulary)
        scaled_RC[r] = row_C
    temperatures = [1.0 if c.sequence.params.is_greedy else c.sequence.params.temperature for c in contexts]
    if any(t != 1.0 for t in temperatures):
        scaled_RC /= torch.tensor(temperatures, device=scaled_RC.device)[:, None]
    log_q_RC = scaled_RC.log_softmax(-1)
    return log_q_RC.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def _shaped_rows(contexts: Sequence[Context]) -> list[tuple[int, Shaper, Context]]:
    shapers: dict[int, Shaper] = {}
    found = []
    for r, context in enumerate(contexts):
        if context.mask is not None or context.sequence.params.shapes_logits:
            shaper = shapers.setdefault(id(context.sequence), Shaper(context.sequence, strict=False))
            found.append((r, shaper, context))
    return found


def shape_draft_row(
    row_C: torch.Tensor, shaper: Shaper, context: Context, vocabulary: torch.Tensor | None
) -> torch.Tensor:
    """One row of draft logits, shaped like the target's at the same node: laid out by target id, shaped, read back."""
    import torch

    draft_C = row_C.detach().cpu().numpy()
    if vocabulary is None:
        row_V = draft_C.copy()
        shaper.apply(row_V, context.path, context.mask)
        return torch.from_numpy(row_V)
    ids_C = vocabulary.cpu().numpy()
    row_V = np.full(int(ids_C.max()) + 1, -np.inf, np.float32)
    row_V[ids_C] = draft_C
    shaper.apply(row_V, context.path, context.mask)
    return torch.from_numpy(row_V[ids_C])


def _target_ids(log_q_RC: torch.Tensor, vocabulary: torch.Tensor | None) -> IntArray:
    ids_C: IntArray = np.arange(log_q_RC.shape[1]) if vocabulary is None else vocabulary.cpu().numpy()
    return ids_C


def _target_noise(contexts: Sequence[Context], ids_C: IntArray) -> torch.Tensor:
    """The target's noise [R, C], computed once per (seed, sample, position) and shared by the nodes of a level."""
    import torch

    keys_R = row_keys(
        Stream.TARGET,
        [context.sequence.seed for context in contexts],
        [context.sequence.sample for context in contexts],
        [context.position for context in contexts],
    )
    keys_U, which_R = np.unique(keys_R, return_inverse=True)
    noise_UC = near_gumbel(draw_bits(keys_U[:, None], steps(ids_C))).astype(np.float32)
    return torch.from_numpy(noise_UC[which_R])


def sample_children(
    log_q_RC: torch.Tensor,
    k: int,
    contexts: Sequence[Context],
    nodes: Sequence[int],
    *,
    vocabulary: torch.Tensor | None = None,
    target_size: int | None = None,
) -> tuple[IntArray, torch.Tensor]:
    """Children drawn from q without replacement, for rule `rejection` on chains and static trees.

    Returns (columns [R, k] in the order of the draws, -1 where q has fewer than k tokens; q, fp32 [R, V], which goes into
    `DraftTree.proposals` of the parent). nodes: the tree index of each parent; a parent is drawn from once, since its
    noise depends on (seed, sample, root position, node) alone. The k largest of log q + Gumbel noise, in descending
    order, are k draws without replacement (Kool et al., arXiv 1903.06059, section 3), here from the very fp32 numbers
    that are returned.
    """
    import torch

    q_RC = log_q_RC.detach().to("cpu", torch.float32).exp()
    keys_RC = _draft_keys(q_RC, contexts, nodes, _target_ids(q_RC, vocabulary))
    width = min(k, keys_RC.shape[1])
    best_Rk = np.argpartition(-keys_RC, width - 1, axis=1)[:, :width]
    best_Rk = np.take_along_axis(best_Rk, np.argsort(-np.take_along_axis(keys_RC, best_Rk, 1), axis=1), axis=1)
    columns_Rk = np.full((len(keys_RC), k), -1, np.int64)
    columns_Rk[:, :width] = np.where(np.take_along_axis(keys_RC, best_Rk, axis=1) > -np.inf, best_Rk, -1)
    return columns_Rk, _over_target(q_RC, vocabulary, target_size)


def _draft_keys(q_RC: torch.Tensor, contexts: Sequence[Context], nodes: Sequence[int], ids_C: IntArray) -> DoubleArray:
    keys_R = row_keys(
        Stream.DRAFT,
        [context.sequence.seed for context in contexts],
        [context.sequence.sample for context in contexts],
        [context.sequence.root_position for context in contexts],
        nodes,
    )
    with np.errstate(divide="ignore"):
        log_q_RC: DoubleArray = np.log(q_RC.numpy().astype(np.float64))
    return log_q_RC + near_gumbel(draw_bits(keys_R[:, None], steps(ids_C)))


def _over_target(q_RC: torch.Tensor, vocabulary: torch.Tensor | None, target_size: int | None) -> torch.Tensor:
    if vocabulary is None:
        return q_RC
    size = int(vocabulary.max()) + 1 if target_size is None else target_size
    q_RV = q_RC.new_zeros(q_RC.shape[0], size)
    q_RV[:, vocabulary.cpu()] = q_RC
    return q_RV
