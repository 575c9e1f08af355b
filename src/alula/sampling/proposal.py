"""What drafters need: the order in which to propose, log q under the request's own parameters, and draws from q.

The shaping of the target (masks, bias, penalties over the node's path) is applied to q as well, at the columns that
the draft vocabulary has for the target ids. User processors and cuts are not: a guess may be cheap.

Shape suffixes: R rows (nodes to expand), C draft vocabulary, V target vocabulary, k children.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from alula import sequence as seq
from alula.sampling.columns import DraftColumns
from alula.sampling.noise import DoubleArray, Stream, UIntArray, draw_bits, near_gumbel, row_keys, steps
from alula.sampling.processors import Context, Shaper
from alula.tree import FloatArray, IntArray

if TYPE_CHECKING:
    import torch

    from alula.kernels.protocol import Kernels, Sampler


def proposal_keys(
    logits_RC: torch.Tensor,
    contexts: Sequence[Context],
    *,
    vocabulary: DraftColumns | None = None,
    rule: str,
    noise_scale: float = 1.0,
    sampler: Sampler | None = None,
    shapers: Sequence[Shaper] | None = None,
) -> torch.Tensor:
    """Keys, fp32 [R, C]: the children of a node are the columns with the largest keys.

    vocabulary: target ids of the columns (None: the same vocabulary). Row r stands at contexts[r].
    sampler: of the kernel set; None is numpy's. shapers: see `proposal_log_q`.
    Keys are (log q + G) / noise_scale under rule `coupled` above temperature 0, with the very noise by which the target
    will choose at that position, and log q otherwise (temperature 0, and point-mass proposals of rule `rejection`),
    each up to a constant of its row. A column whose key is -inf is forbidden and must not become a child; a row may
    consist of such columns alone.
    """
    keys_RC = _shaped(logits_RC, contexts, vocabulary, shapers)
    if rule != "coupled":
        _temper(keys_RC, contexts)
    elif not all(context.sequence.params.is_greedy for context in contexts):
        _perturb(keys_RC, contexts, _target_ids(keys_RC.shape[1], vocabulary), noise_scale, sampler)
    return _tensor(keys_RC, logits_RC)


def proposal_log_q(
    logits_RC: torch.Tensor,
    contexts: Sequence[Context],
    *,
    vocabulary: DraftColumns | None = None,
    kernels: Kernels | None = None,
    shapers: Sequence[Shaper] | None = None,
) -> torch.Tensor:
    """log q, fp32 [R, C], at each request's temperature (1 for greedy ones) after its masks, bias and penalties.

    kernels: the set whose log softmax is used; None is numpy's.
    shapers: one per row, of `draft_shapers`, which count a history once for all levels of a draft; None makes them.
    """
    log_q_RC = _shaped(logits_RC, contexts, vocabulary, shapers)
    _temper(log_q_RC, contexts)
    if kernels is not None:
        return kernels.log_softmax(_tensor(log_q_RC, logits_RC))
    best_R1 = log_q_RC.max(axis=1, keepdims=True)
    log_q_RC -= np.where(np.isfinite(best_R1), best_R1, np.float32(0.0))
    with np.errstate(divide="ignore"):
        mass_R1 = np.log(np.exp(log_q_RC).sum(axis=1, keepdims=True))
    log_q_RC -= np.where(np.isfinite(mass_R1), mass_R1, np.float32(0.0))
    return _tensor(log_q_RC, logits_RC)


def _shaped(
    logits_RC: torch.Tensor,
    contexts: Sequence[Context],
    vocabulary: DraftColumns | None,
    shapers: Sequence[Shaper] | None,
) -> FloatArray:
    """A copy of the logits after masks, bias and penalties."""
    import torch

    rows_RC: FloatArray = logits_RC.detach().to("cpu", torch.float32, copy=True).contiguous().numpy()
    if shapers is None:
        shapers = draft_shapers([context.sequence for context in contexts], vocabulary)
    for row_C, shaper, context in zip(rows_RC, shapers, contexts, strict=True):
        shaper.apply(row_C, context.path, context.mask)
    return rows_RC


def _temper(rows_RC: FloatArray, contexts: Sequence[Context]) -> None:
    """Divides each row by its temperature (1 for greedy ones)."""
    temperatures = [1.0 if c.sequence.params.is_greedy else c.sequence.params.temperature for c in contexts]
    if any(t != 1.0 for t in temperatures):
        rows_RC /= np.array(temperatures, np.float32)[:, None]


def _tensor(values: FloatArray, like: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.from_numpy(values).to(like.device)


def draft_shapers(sequences: Sequence[seq.Sequence], vocabulary: DraftColumns | None) -> list[Shaper]:
    """What shapes the draft logits of each, one and the same for the same sequence. For as long as none is changed."""
    shapers = {id(sequence): Shaper(sequence, strict=False, vocabulary=vocabulary) for sequence in sequences}
    return [shapers[id(sequence)] for sequence in sequences]


def _target_ids(size: int, vocabulary: DraftColumns | None) -> IntArray:
    return np.arange(size) if vocabulary is None else vocabulary.ids_C


def _perturb(
    rows_RC: FloatArray, contexts: Sequence[Context], ids_C: IntArray, noise_scale: float, sampler: Sampler | None
) -> None:
    """(row / temperature + the target's noise) / noise_scale in place of each row that is not greedy."""
    sequences = [context.sequence for context in contexts]
    temperatures_R = np.array([0.0 if s.params.is_greedy else s.params.temperature for s in sequences], np.float32)
    keys_R = row_keys(
        Stream.TARGET,
        [sequence.seed for sequence in sequences],
        [sequence.sample for sequence in sequences],
        [context.position for context in contexts],
    )
    if sampler is None:
        _perturb_by_numpy(rows_RC, temperatures_R, noise_scale, keys_R, ids_C)
    else:
        sampler.perturb(rows_RC, temperatures_R, noise_scale, keys_R, ids_C)


def _perturb_by_numpy(
    rows_RC: FloatArray, temperatures_R: FloatArray, noise_scale: float, keys_R: UIntArray, ids_C: IntArray
) -> None:
    noisy = np.flatnonzero(temperatures_R)
    noise_NC = near_gumbel(draw_bits(keys_R[noisy, None], steps(ids_C))).astype(np.float32)
    rows_RC[noisy] = (rows_RC[noisy] / temperatures_R[noisy, None] + noise_NC) / np.float32(noise_scale)


def sample_children(
    log_q_RC: torch.Tensor,
    k: int,
    contexts: Sequence[Context],
    nodes: Sequence[int] | IntArray,
    *,
    vocabulary: DraftColumns | None = None,
    target_size: int | None = None,
) -> tuple[IntArray, torch.Tensor]:
    """Children drawn from q without replacement, for rule `rejection` on chains and static trees.

    Returns (columns [R, k] in the order of the draws, -1 where q has fewer than k tokens; q, fp32 [R, V], which goes
    into `DraftTree.proposals` of the parent). nodes: the tree index of each parent; a parent is drawn from once,
    since its noise depends on (seed, sample, root position, node) alone. The k largest of log q + Gumbel noise, in
    descending order, are k draws without replacement (Kool et al., arXiv 1903.06059, section 3), here from the
    very fp32 numbers that are returned.
    """
    import torch

    q_RC: FloatArray = np.exp(log_q_RC.detach().to("cpu", torch.float32).numpy())
    keys_RC = _draft_keys(q_RC, contexts, nodes, _target_ids(q_RC.shape[1], vocabulary))
    width = min(k, keys_RC.shape[1])
    best_Rk = np.argpartition(-keys_RC, width - 1, axis=1)[:, :width]
    best_Rk = np.take_along_axis(best_Rk, np.argsort(-np.take_along_axis(keys_RC, best_Rk, 1), axis=1), axis=1)
    columns_Rk = np.full((len(keys_RC), k), -1, np.int64)
    columns_Rk[:, :width] = np.where(np.take_along_axis(keys_RC, best_Rk, axis=1) > -np.inf, best_Rk, -1)
    return columns_Rk, torch.from_numpy(_over_target(q_RC, vocabulary, target_size))


def _draft_keys(
    q_RC: FloatArray, contexts: Sequence[Context], nodes: Sequence[int] | IntArray, ids_C: IntArray
) -> DoubleArray:
    keys_R = row_keys(
        Stream.DRAFT,
        [context.sequence.seed for context in contexts],
        [context.sequence.sample for context in contexts],
        [context.sequence.root_position for context in contexts],
        nodes,
    )
    with np.errstate(divide="ignore"):
        log_q_RC: DoubleArray = np.log(q_RC.astype(np.float64))
    return log_q_RC + near_gumbel(draw_bits(keys_R[:, None], steps(ids_C)))


def _over_target(q_RC: FloatArray, vocabulary: DraftColumns | None, target_size: int | None) -> FloatArray:
    if vocabulary is None:
        return q_RC
    ids_C = _target_ids(q_RC.shape[1], vocabulary)
    q_RV = np.zeros((len(q_RC), int(ids_C.max()) + 1 if target_size is None else target_size), np.float32)
    q_RV[:, ids_C] = q_RC
    return q_RV
