"""Packs a plan and its trees into the rows of one target forward."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from alula.cache import Transaction
from alula.sequence import PlanItem, StepPlan
from alula.tree import AttentionInput, DraftTree, IntArray


@dataclass(frozen=True)
class Span:
    """Rows of one plan item: `chunk` catch-up rows from `start`, then `nodes` tree rows."""

    start: int
    chunk: int
    nodes: int

    @property
    def rows(self) -> range:
        return range(self.start, self.start + self.chunk + self.nodes)

    @property
    def tree(self) -> range:
        return range(self.start + self.chunk, self.start + self.chunk + self.nodes)


@dataclass(frozen=True)
class Packed:
    tokens_T: torch.Tensor
    where: AttentionInput
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class _Rows:
    """Of one plan item, see `AttentionInput.packed`."""

    tokens_T: IntArray
    places_2T: IntArray
    keys_4T: NDArray[np.int32]
    tail_TE: NDArray[np.int32]


def pack(
    plan: StepPlan, trees: Seq[DraftTree | None], txn: Transaction, page_size: int, device: torch.device
) -> Packed:
    """Rows in plan order; each sequence's catch-up rows stand before its tree, node by node."""
    lines = zip(plan.items, trees, strict=True)
    rows = _joined([_rows(line, item, tree, txn) for line, (item, tree) in enumerate(lines)])
    page_table_BP = txn.page_table([item.sequence.id for item in plan.items])
    where = AttentionInput.packed(rows.places_2T, rows.keys_4T, rows.tail_TE, page_table_BP, page_size)
    return Packed(torch.from_numpy(rows.tokens_T).to(device), where, _spans(plan, trees))


def _rows(line: int, item: PlanItem, tree: DraftTree | None, txn: Transaction) -> _Rows:
    """A catch-up row reads its whole past through the page table; a node reads its ancestors as a tail."""
    start, root = item.chunk.start, item.chunk.stop
    chunk, nodes = root - start, 0 if tree is None else len(tree)
    count = chunk + nodes
    tokens_T, places_2T = np.empty(count, np.int64), np.empty((2, count), np.int64)
    keys_4T = np.empty((4, count), np.int32)
    logical_T = np.arange(start, start + count)
    slots_T = txn.slots(item.sequence.id, logical_T)
    tokens_T[:chunk] = item.sequence.tokens[start:root]
    places_2T[0], places_2T[1] = logical_T, slots_T
    keys_4T[0], keys_4T[1], keys_4T[2:] = line, logical_T + 1, 0
    if tree is None:
        return _Rows(tokens_T, places_2T, keys_4T, np.zeros((count, 1), np.int32))
    tokens_T[chunk:], places_2T[0, chunk:] = tree.tokens_N, root + tree.depths_N
    keys_4T[1, chunk:], keys_4T[2, chunk:] = root, tree.depths_N + 1
    tails_NE = tree.tails_NE
    tail_TE = np.zeros((count, tails_NE.shape[1]), np.int32)
    tail_TE[chunk:] = np.where(tails_NE >= 0, slots_T[chunk:][tails_NE], 0)
    return _Rows(tokens_T, places_2T, keys_4T, tail_TE)


def _joined(parts: Seq[_Rows]) -> _Rows:
    if len(parts) == 1:
        return parts[0]
    widest, start = max(part.tail_TE.shape[1] for part in parts), 0
    tail_TE = np.zeros((sum(len(part.tokens_T) for part in parts), widest), np.int32)
    for part in parts:
        stop = start + len(part.tokens_T)
        tail_TE[start:stop, : part.tail_TE.shape[1]] = part.tail_TE
        start = stop
    return _Rows(
        np.concatenate([part.tokens_T for part in parts]),
        np.concatenate([part.places_2T for part in parts], 1),
        np.concatenate([part.keys_4T for part in parts], 1),
        tail_TE,
    )


def _spans(plan: StepPlan, trees: Seq[DraftTree | None]) -> tuple[Span, ...]:
    spans, start = [], 0
    for item, tree in zip(plan.items, trees, strict=True):
        spans.append(Span(start, len(item.chunk), 0 if tree is None else len(tree)))
        start = spans[-1].tree.stop
    return tuple(spans)
