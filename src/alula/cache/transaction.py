"""One step's changes to the cache: reserved slots that become committed ones, or nothing.

Tree nodes are written to tentative slots; `commit` moves the accepted path to where it belongs, and what is
left when the block ends is freed (cf. the paged memory of Kwon et al., "PagedAttention", 2023, section 4.3).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType

import numpy as np
import torch

from alula.cache.pool import KVLayer
from alula.cache.state import CacheState
from alula.cache.table import PageTable
from alula.config import AlulaError
from alula.tree import IntArray


@dataclass(frozen=True)
class _Commit:
    """A staged commit: its new length, the pool slots to read and to write (None: all rows are in place), and
    features f_length .. f_{new length - 1}."""

    table: PageTable
    length: int
    tokens: Sequence[int]
    moves_2T: IntArray | None
    features_TF: torch.Tensor | None


class Transaction:
    """A context manager. Commits take effect together when the block ends, or earlier with `flush()`; until then
    nothing that other steps can see has changed, so an error leaves the cache as it was before."""

    def __init__(self, state: CacheState, needs: Mapping[int, int]) -> None:
        """`needs`: seq_id -> slots beyond the committed length. There must be enough pages."""
        self._state = state
        self._open = {seq_id: state.table(seq_id) for seq_id in needs}
        self._commits: dict[int, _Commit] = {}
        self._fills: dict[int, tuple[int, int]] = {}
        for seq_id, need in needs.items():
            table = self._open[seq_id]
            state.grow(table, table.pages_short(table.length + need))
        self.is_active = True

    def __enter__(self) -> Transaction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.flush()
        finally:
            self.is_active = False
            for table in self._open.values():
                self._state.shrink(table, table.length)
            self._open.clear()

    @property
    def page_size(self) -> int:
        return self._state.layout.page_size

    @property
    def drafter_layers(self) -> tuple[KVLayer, ...]:
        return self._state.pool.drafter_layers

    def page_table(self, seq_ids: Sequence[int]) -> torch.Tensor:
        """Page tables [B, P], int32, on the pool's device; P is the most pages any of them has (at least 1)."""
        tables = [self._table(seq_id) for seq_id in seq_ids]
        width = max((table.count for table in tables), default=0)
        filled = np.zeros((len(tables), max(width, 1)), np.int32)
        for row, table in zip(filled, tables, strict=True):
            row[: table.count] = table.pages
        return torch.from_numpy(filled).to(self._state.pool.device)

    def slots(self, seq_id: int, positions: IntArray) -> IntArray:
        """Pool slots (int64) of logical slots of the sequence. ValueError for one that is not reserved."""
        table = self._table(seq_id)
        if positions.size and not 0 <= positions.min() <= positions.max() < table.reserved:
            raise ValueError(
                f"positions of sequence {seq_id} run from {positions.min()} to {positions.max()}, but only slots "
                f"0 to {table.reserved - 1} are reserved: begin with a larger need"
            )
        return table.slots(positions)

    def length(self, seq_id: int) -> int:
        """Committed slots, without what this transaction has staged."""
        return self._table(seq_id).length

    def draft_length(self, seq_id: int) -> int:
        """The slot at which the drafter continues, what this transaction has staged included."""
        table = self._table(seq_id)
        return self._fills[seq_id][1] if seq_id in self._fills else table.draft_length

    def draft_first(self, seq_id: int) -> int:
        """The first slot the drafter may see, what this transaction has staged included."""
        table = self._table(seq_id)
        first, _ = self._fills.get(seq_id, (0, 0))
        return first if first > table.draft_length else self._state.draft_first(table)

    def boundary_feature(self, seq_id: int) -> torch.Tensor | None:
        """After a prefix hit of m tokens f_{m-1} [F], which the drafter pairs with t_m in slot m; None once it has
        done so, without a hit, and where no features are kept."""
        table = self._table(seq_id)
        if not (table.hit and self._state.layout.feature_size) or self.draft_length(seq_id) != table.hit:
            return None
        return self._state.pool.features_PF[int(table.pages[table.hit // table.page_size - 1])]

    def fill_draft(self, seq_id: int, length: int, *, first: int = 0) -> None:
        """The drafter has valid entries in all slots from its previous length up to `length` (exclusive).

        Staged: it counts only if the sequence commits. With `first` above the previous length it has skipped
        slots, and entries before `first` are masked from now on.
        """
        table = self._table(seq_id)
        if not max(first, table.draft_length) <= length <= table.reserved:
            raise ValueError(
                f"length is {length}: the drafter's entries of sequence {seq_id} can reach from "
                f"{max(first, table.draft_length)} to {table.reserved}"
            )
        self._fills[seq_id] = (first, length)

    def commit(
        self,
        seq_id: int,
        tokens: Sequence[int],
        chunk: int,
        path: Sequence[int] | None,
        features: torch.Tensor | None,
    ) -> None:
        """Keep `chunk` catch-up slots and, unless `path` is None, the root and the accepted nodes.

        With base = length + chunk, tree node i was written in slot base + i (root: i = 0); node path[d] moves to
        slot base + 1 + d. Only the target's rows move: the drafter's entries of accepted nodes are guesses, which
        true features overwrite in its next draft. Rows of the root and of nodes already in place stay.

        tokens: all tokens of the sequence so far, at least up to its new length.
        features: of the committed slots, [chunk + 1 + len(path), F] ([chunk, F] without a path), or None.
        Raises ValueError, with nothing staged, for what does not fit the reservation or the tree.
        """
        table = self._table(seq_id)
        if seq_id in self._commits:
            raise ValueError(f"sequence {seq_id} is committed already: commit once per transaction")
        base = table.length + chunk
        length = base if path is None else base + 1 + len(path)
        self._check(seq_id, table, tokens, base, length, chunk, path, features)
        self._commits[seq_id] = _Commit(table, length, tokens, _moves(table, base, path or ()), features)

    def flush(self) -> None:
        """Put the staged commits into effect now. Their sequences leave the transaction.

        Tensors come first and only touch slots and pages that are not committed yet, so a device error here
        leaves every sequence as it was.
        """
        commits, fills = self._commits, self._fills
        self._commits, self._fills = {}, {seq_id: fill for seq_id, fill in fills.items() if seq_id not in commits}
        self._move(commits.values())
        for commit in commits.values():
            self._store_features(commit)
        for seq_id, commit in commits.items():
            table = self._open.pop(seq_id)
            has_features = commit.features_TF is not None and self._state.layout.feature_size > 0
            self._state.record_written(table, commit.length, commit.tokens, has_features)
            if seq_id in fills:
                self._state.record_drafted(table, *fills[seq_id])
            self._state.shrink(table, table.length)

    def forget(self, seq_id: int) -> None:
        """The sequence leaves the transaction: with its commit in effect if one is staged, else rolled back."""
        if seq_id in self._commits:
            self.flush()
        table = self._open.pop(seq_id, None)
        if table is not None:
            self._state.shrink(table, table.length)

    def _table(self, seq_id: int) -> PageTable:
        try:
            return self._open[seq_id]
        except KeyError:
            raise AlulaError(f"sequence {seq_id} is not in this transaction: name it in begin") from None

    def _check(
        self,
        seq_id: int,
        table: PageTable,
        tokens: Sequence[int],
        base: int,
        length: int,
        chunk: int,
        path: Sequence[int] | None,
        features: torch.Tensor | None,
    ) -> None:
        nodes = [0, *(path or ())]
        if any(child <= parent for parent, child in pairwise(nodes)):
            raise ValueError(f"path is {list(nodes[1:])}: nodes must rise from 1 on, parents before children")
        last = base - 1 if path is None else base + nodes[-1]
        if chunk < 0 or last >= table.reserved:
            raise ValueError(f"slot {last} of sequence {seq_id} is not among its {table.reserved} reserved ones")
        if len(tokens) < length:
            raise ValueError(f"tokens holds {len(tokens)} tokens: sequence {seq_id} commits {length}")
        if features is not None and tuple(features.shape) != (rows := length - table.length, self._width):
            raise ValueError(f"features has shape {tuple(features.shape)}: give {(rows, self._width)}")
        if seq_id in self._fills and self._fills[seq_id][1] > length:
            raise ValueError(f"the drafter filled {self._fills[seq_id][1]} slots of {length} committed ones")

    @property
    def _width(self) -> int:
        return self._state.layout.feature_size

    def _move(self, commits: Iterable[_Commit]) -> None:
        """All sequences' rows in one go; no slot of one is a slot of another."""
        moves = [commit.moves_2T for commit in commits if commit.moves_2T is not None]
        if moves:
            self._state.pool.move_rows(np.concatenate(moves, axis=1) if len(moves) > 1 else moves[0])

    def _store_features(self, commit: _Commit) -> None:
        size, table = self._state.layout.page_size, commit.table
        start, stop = table.length // size, commit.length // size
        if commit.features_TF is not None and self._width and start < stop:
            rows = np.arange(start + 1, stop + 1) * size - 1 - table.length
            self._state.pool.store_features(table.pages[start:stop].astype(np.int64), commit.features_TF, rows)


def _moves(table: PageTable, base: int, path: Sequence[int]) -> IntArray | None:
    """Pool slots to read and to write so that path[d] ends up in logical slot base + 1 + d."""
    moved = [(node, place) for place, node in enumerate(path, start=1) if node != place]
    if not moved:
        return None
    nodes, places = zip(*moved, strict=True)
    return table.slots(np.array((nodes, places), np.int64) + base)
