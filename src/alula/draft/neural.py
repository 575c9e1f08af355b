"""Drafting with a model: catch up with what was committed, then grow the trees level by level.

All sequences of a plan go together: one pass over everything that waits to be read, then one per level over the
frontiers of all trees. Suffixes: B growing sequences (lanes), F frontier rows, D state width, C draft vocabulary.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from alula.cache import KVLayer, KVShape, Transaction
from alula.draft.drafter import grows, root_only_trees
from alula.draft.policy import TreePolicy
from alula.draft.propose import Proposer
from alula.draft.rows import Lanes
from alula.draft.walk import Walk, pick
from alula.kernels.protocol import Kernels
from alula.sampling.columns import DraftColumns
from alula.sequence import PlanItem, StepPlan
from alula.tree import AttentionInput, DraftTree, IntArray, TreeShape

LAZY_ROWS = 64
"""While a sequence is not drafted for, its features wait until this many can be read in one pass."""


class DraftModel(Protocol):
    """A model that reads rows and proposes the token after each.

    vocabulary_C: the target id of each draft id, None where they are the same.
    """

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]: ...

    @property
    def vocabulary_C(self) -> torch.Tensor | None: ...

    def fuse(self, features_TF: torch.Tensor) -> torch.Tensor:
        """States [T, D] that stand for true target features."""

    def step(
        self,
        tokens_T: torch.Tensor,
        states_TD: torch.Tensor,
        where: AttentionInput,
        layers: Sequence[KVLayer],
        keep: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the rows' keys and values; the new states of the rows in `keep` (None: all)."""

    def logits(self, states_RD: torch.Tensor) -> torch.Tensor:
        """fp32 [R, C]."""


@dataclass
class DraftTimes:
    """Seconds spent reading committed tokens and growing levels, and how many of each there were."""

    read_s: float = 0.0
    reads: int = 0
    level_s: float = 0.0
    levels: int = 0


@dataclass(frozen=True)
class _Reading:
    """Slots start .. stop - 1 of one item are to be filled from true tokens and features."""

    item: PlanItem
    start: int
    stop: int
    grows: bool

    @property
    def indexes(self) -> IntArray:
        return np.arange(self.start, self.stop)


class NeuralDrafter:
    """A draft model, its tree policy, and its entries in the paged cache.

    taps: target features it reads; () for a model that reads tokens only. kv_first: slot of the first entry, which
    is also how far RoPE positions lag behind slots: a pair (f_j, t_{j+1}) lies in slot j + 1 at position j.
    target_size: the target's vocabulary. limit: RoPE positions the model has; None where it has as many as the target.
    A sequence that outgrows it is no longer drafted for.
    """

    def __init__(
        self,
        name: str,
        model: DraftModel,
        taps: tuple[int, ...],
        policy: TreePolicy,
        kernels: Kernels,
        target_size: int,
        *,
        limit: int | None = None,
    ) -> None:
        self.name = name
        self.taps = taps
        self.kv_first = 1 if taps else 0
        self.kv_shapes = model.kv_shapes
        self.policy = policy
        self.times = DraftTimes()
        self._limit = sys.maxsize if limit is None else limit
        self.model, self._kernels, self._target_size = model, kernels, target_size
        self._vocabulary = DraftColumns.of(model.vocabulary_C)

    def scratch(self, shape: TreeShape) -> int:
        return self.policy.scratch(shape)

    def draft(self, plan: StepPlan, txn: Transaction) -> list[DraftTree | None]:
        trees = root_only_trees(plan)
        found = [self._reading(item, txn) for item in plan.items]
        places = [place for place, reading in enumerate(found) if reading is not None]
        if not places:
            return trees
        readings = [reading for reading in found if reading is not None]
        lanes = self._lanes(readings, txn)
        states_BD = self._read(readings, lanes, txn)
        growing = [lane for lane, reading in enumerate(readings) if reading.grows]
        if growing:
            own = lanes if len(growing) == len(readings) else lanes.of(growing)
            grown = self._grow([readings[lane].item for lane in growing], states_BD, own, txn)
            for lane, tree in zip(growing, grown, strict=True):
                trees[places[lane]] = tree
        return trees

    def _reading(self, item: PlanItem, txn: Transaction) -> _Reading | None:
        """What to read for one item; None while there is nothing, or too little to be worth a pass."""
        sequence, root = item.sequence, item.sequence.root_position
        start = max(txn.draft_length(sequence.id), self.kv_first)
        if self.taps:
            stop = min(root, sequence.features.stop) + 1
        else:
            stop = min(item.chunk.stop if len(item.chunk) else root + 1, self._limit)
        growing = grows(item) and start < stop == root + 1 and self._reaches(item)
        idle = item.shape is not None and not len(item.chunk) and not growing
        if start >= stop or (idle and stop - start < LAZY_ROWS):
            return None
        return _Reading(item, start, stop, growing)

    def _reaches(self, item: PlanItem) -> bool:
        """Whether the model has positions for the deepest node that is expanded."""
        return item.shape is not None and item.sequence.root_position + item.shape.depth <= self._limit

    def _lanes(self, readings: Sequence[_Reading], txn: Transaction) -> Lanes:
        ids = [reading.item.sequence.id for reading in readings]
        first = [max(self.kv_first, txn.draft_first(sequence_id)) for sequence_id in ids]
        return Lanes(txn.page_table(ids), np.array(first, np.int64), txn.page_size)

    def _read(self, readings: Sequence[_Reading], lanes: Lanes, txn: Transaction) -> torch.Tensor:
        """One pass over all that waits; the states at the growing sequences' roots, [B, D]."""
        begun = time.perf_counter()
        counts = [reading.stop - reading.start for reading in readings]
        lane_T = np.repeat(np.arange(len(readings)), counts)
        slots = [txn.slots(reading.item.sequence.id, reading.indexes) for reading in readings]
        indexes_T = np.concatenate([reading.indexes for reading in readings])
        tokens = [reading.item.sequence.tokens[reading.start : reading.stop] for reading in readings]
        tokens_T = torch.from_numpy(np.concatenate(tokens)).to(lanes.page_table_BP.device, torch.int64)
        where = lanes.committed(lane_T, indexes_T, np.concatenate(slots), self.kv_first)
        last_B = np.cumsum(counts)[[reading.grows for reading in readings]] - 1
        states_TD = self._features(readings, txn) if self.taps else tokens_T.new_zeros((len(tokens_T), 0))
        keep_B = torch.from_numpy(last_B).to(tokens_T.device)
        states_BD = self.model.step(tokens_T, states_TD, where, txn.drafter_layers, keep_B)
        for reading in readings:
            txn.fill_draft(reading.item.sequence.id, reading.stop)
        self.times.read_s += time.perf_counter() - begun
        self.times.reads += 1
        return states_BD

    def _features(self, readings: Sequence[_Reading], txn: Transaction) -> torch.Tensor:
        """True features f_{slot - 1} of all rows, fused. After a prefix hit the first comes from the cache."""
        parts = []
        for reading in readings:
            queue, start = reading.item.sequence.features, reading.start - 1
            if start < queue.start:
                boundary_F = txn.boundary_feature(reading.item.sequence.id)
                if boundary_F is None or start != queue.start - 1:
                    raise RuntimeError(f"features {start} to {queue.start - 1} are neither queued nor cached")
                parts.append(boundary_F[None])
                start += 1
            if start < reading.stop - 1:
                parts.append(queue.read(start, reading.stop - 1))
        return self.model.fuse(torch.cat(parts) if len(parts) > 1 else parts[0])

    def _grow(
        self, items: Sequence[PlanItem], states_BD: torch.Tensor, lanes: Lanes, txn: Transaction
    ) -> list[DraftTree]:
        """Trees of the growing sequences from the states at their roots."""
        begun = time.perf_counter()
        shapes = [item.shape for item in items if item.shape is not None]
        sequences = [item.sequence for item in items]
        roots_B = np.array([sequence.tokens[-1] for sequence in sequences])
        growth = self.policy.growth(roots_B, shapes, self._kernels)
        proposer = Proposer(self.policy, sequences, self._vocabulary, self._target_size, self._kernels)
        walk = self._walk(items, shapes, lanes, txn)
        states_FD = states_BD
        while len(frontier := growth.frontier):
            if frontier.origin_F[0] >= 0:
                tokens_F = torch.from_numpy(frontier.tokens_F).to(states_BD.device)
                states_FD = pick(states_FD, frontier.origin_F)
                states_FD = self.model.step(tokens_F, states_FD, walk.descend(frontier), txn.drafter_layers)
            proposer.expand(growth, self.model.logits(states_FD), walk.paths)
            self.times.levels += 1
        self.times.level_s += time.perf_counter() - begun
        return proposer.finish(growth)

    def _walk(self, items: Sequence[PlanItem], shapes: Sequence[TreeShape], lanes: Lanes, txn: Transaction) -> Walk:
        roots = [item.sequence.root_position for item in items]
        scratch = [
            txn.slots(item.sequence.id, np.arange(root + 1, root + 1 + self.scratch(shape)))
            for item, root, shape in zip(items, roots, shapes, strict=True)
        ]
        return Walk(lanes, np.array(roots), scratch, self.kv_first)
