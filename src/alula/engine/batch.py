"""Packs a plan and its trees into the rows of one target forward."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

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
    def tree(self) -> range:
        return range(self.start + self.chunk, self.start + self.chunk + self.nodes)


@dataclass(frozen=True)
class Packed:
    tokens_T: torch.Tensor
    where: AttentionInput
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class _Rows:
    tokens: IntArray
    positions: IntArray
    slots: IntArray
    prefix: IntArray
    tails: IntArray
    tail_len: IntArray


def pack(
    plan: StepPlan, trees: Seq[DraftTree | None], txn: Transaction, page_size: int, device: torch.device
) -> Packed:
    """Rows in plan order; each sequence's catch-up rows stand before its tree, node by node."""
    parts = [_rows(item, tree, txn) for item, tree in zip(plan.items, trees, strict=True)]
    widest = max(part.tails.shape[1] for part in parts)
    counts = [len(part.tokens) for part in parts]

    def joined(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([getattr(part, name) for part in parts])).to(device, dtype)

    starts = np.concatenate([[0], np.cumsum(counts)])
    tails = np.zeros((starts[-1], widest), np.int32)
    for start, part in zip(starts, parts, strict=False):
        tails[start : start + len(part.tails), : part.tails.shape[1]] = part.tails
    where = AttentionInput(
        positions_T=joined("positions", torch.int64),
        slots_T=joined("slots", torch.int64),
        sequence_T=torch.from_numpy(np.repeat(np.arange(len(parts)), counts)).to(device, torch.int32),
        page_table_BP=txn.page_table([item.sequence.id for item in plan.items]),
        prefix_T=joined("prefix", torch.int32),
        tail_TE=torch.from_numpy(tails).to(device, torch.int32),
        tail_len_T=joined("tail_len", torch.int32),
        first_T=torch.zeros(sum(counts), dtype=torch.int32, device=device),
        page_size=page_size,
    )
    spans = tuple(
        Span(int(start), len(item.chunk), 0 if tree is None else len(tree))
        for start, item, tree in zip(starts, plan.items, trees, strict=False)
    )
    return Packed(joined("tokens", torch.int64), where, spans)


def _rows(item: PlanItem, tree: DraftTree | None, txn: Transaction) -> _Rows:
    """A catch-up row reads its whole past through the page table; a node reads its ancestors as a tail."""
    chunk = np.arange(item.chunk.start, item.chunk.stop)
    if tree is None:
        tree_tokens, depths, tails = np.zeros(0, np.int64), np.zeros(0, np.int64), np.full((0, 1), -1)
    else:
        tree_tokens, depths, tails = tree.tokens_N, tree.depths_N, tree.tails_NE
    root = item.chunk.stop
    slots = txn.slots(item.sequence.id, np.arange(item.chunk.start, root + len(tree_tokens)))
    node_slots = slots[len(chunk) :]
    tail_slots = np.where(tails >= 0, node_slots[tails], 0) if len(node_slots) else tails
    no_tail = np.zeros((len(chunk), tails.shape[1]), np.int64)
    return _Rows(
        tokens=np.concatenate([item.sequence.tokens[item.chunk.start : root], tree_tokens]).astype(np.int64),
        positions=np.concatenate([chunk, root + depths]),
        slots=slots,
        prefix=np.concatenate([chunk + 1, np.full(len(tree_tokens), root)]),
        tails=np.concatenate([no_tail, tail_slots]),
        tail_len=np.concatenate([np.zeros(len(chunk), np.int64), (tails >= 0).sum(1)]),
    )
