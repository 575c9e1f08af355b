"""The paged KV cache as the engine sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from alula.cache.integrity import check
from alula.cache.pages import PageStore
from alula.cache.pool import CacheLayout, KVLayer, KVShape, Pool
from alula.cache.state import CacheState
from alula.cache.transaction import Transaction
from alula.config import AlulaError


class OutOfPages(AlulaError):
    """Not enough pages for a step; nothing has changed. `needed` pages were wanted, `available` could be had."""

    def __init__(self, needed: int, available: int, total: int) -> None:
        super().__init__(
            f"the KV cache has {available} of {total} pages left and this step needs {needed}: "
            "release sequences, or give the cache more pages"
        )
        self.needed = needed
        self.available = available
        self.total = total


class PagedCache:
    """One pool of pages for the layers of target and drafter, with shared prefixes.

    Logical slot j of a sequence belongs to its token j. A page covers `page_size` slots in every layer, target's
    and drafter's alike. The drafter's entry made from the pair (f_{j-1}, t_j) lies in slot j, so slot 0 stays
    empty (drafter_first 1); a drafter that is a language model fills slot 0 too (drafter_first 0). Each page keeps
    the target feature of its last token.

    Not thread-safe. Raises AlulaError for sizes that cannot be, unknown sequences, and a second open transaction.
    """

    def __init__(
        self,
        *,
        pages: int,
        page_size: int,
        target: Sequence[KVShape],
        drafter: Sequence[KVShape] = (),
        feature_size: int = 0,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        drafter_first: int = 1,
        drafter_name: str = "",
        prefix_caching: bool = True,
    ) -> None:
        if isinstance(pages, bool) or not isinstance(pages, int) or not 1 <= pages < 2**31:
            raise AlulaError(f"pages is {pages!r}: give a whole number of at least 1 (and below 2**31)")
        if drafter_first not in (0, 1):
            raise AlulaError(f"drafter_first is {drafter_first!r}: give 1 for an EAGLE head, 0 for a language model")
        self.layout = CacheLayout(page_size, tuple(target), tuple(drafter), feature_size, dtype)
        self.device = torch.device(device)
        pool = Pool(self.layout, pages, self.device)
        store = PageStore(pages, page_size)
        self._state = CacheState(self.layout, pool, store, drafter_first, drafter_name, prefix_caching)
        self._transaction: Transaction | None = None

    @property
    def page_size(self) -> int:
        return self.layout.page_size

    @property
    def target_layers(self) -> tuple[KVLayer, ...]:
        return self._state.pool.target_layers

    @property
    def drafter_layers(self) -> tuple[KVLayer, ...]:
        return self._state.pool.drafter_layers

    @property
    def total_pages(self) -> int:
        return self._state.pages.total

    @property
    def free_pages(self) -> int:
        """Pages that can be had at once; those kept only for reuse are among them."""
        return self._state.available

    @property
    def cached_pages(self) -> int:
        """Pages that no sequence holds and that are kept for reuse."""
        return self._state.index.idle

    @property
    def extra_kv_bytes(self) -> int:
        """Memory that speculation adds: the drafter's layers and the kept features."""
        return self.total_pages * self.layout.extra_page_bytes

    def peek(self, tokens: Sequence[int]) -> int:
        """The hit length that `add` would return; changes nothing."""
        return len(self._state.hit(tokens)) * self.page_size

    def add(self, seq_id: int, tokens: Sequence[int], *, use_prefix: bool = True) -> int:
        """Take in a sequence and attach the pages it can share. Takes no free page.

        Returns the hit length m: whole pages, at most len(tokens) - 1. Slots < m are committed from the start.
        """
        if seq_id in self._state.tables:
            raise AlulaError(f"seq_id {seq_id} is in the cache already: release it first")
        if not len(tokens):
            raise AlulaError("tokens is empty: give at least one token")
        table = self._state.attach(self._state.hit(tokens) if use_prefix else [])
        self._state.tables[seq_id] = table
        return table.length

    def release(self, seq_id: int) -> None:
        """Forget a sequence (finished, aborted or preempted). Its full pages stay for reuse until evicted, the
        ones used longest ago first. Within a transaction a staged commit is put into effect before."""
        table = self._state.table(seq_id)
        if self._transaction is not None:
            self._transaction.forget(seq_id)
        self._state.shrink(table, 0)
        del self._state.tables[seq_id]

    def pages_needed(self, needs: Mapping[int, int]) -> int:
        """Pages that `begin(needs)` would take."""
        short = 0
        for seq_id, need in needs.items():
            if need < 0:
                raise AlulaError(f"need of sequence {seq_id} is {need}: give at least 0 slots")
            table = self._state.table(seq_id)
            short += table.pages_short(table.length + need)
        return short

    def can_begin(self, needs: Mapping[int, int]) -> bool:
        return self.pages_needed(needs) <= self.free_pages

    def begin(self, needs: Mapping[int, int]) -> Transaction:
        """Reserve, per seq_id, so many slots beyond its committed length, for all of them or none.

        Use as a context manager; what is not committed in the block is rolled back. Raises OutOfPages with
        nothing changed. Cached pages are evicted only as far as free ones do not suffice.
        """
        if self._transaction is not None and self._transaction.is_active:
            raise AlulaError("a transaction is open already: leave its block before the next begin")
        needed = self.pages_needed(needs)
        if needed > self.free_pages:
            raise OutOfPages(needed, self.free_pages, self.total_pages)
        self._transaction = Transaction(self._state, needs)
        return self._transaction

    def length(self, seq_id: int) -> int:
        """Slots with committed target KV."""
        return self._state.table(seq_id).length

    def draft_length(self, seq_id: int) -> int:
        """The slot at which the drafter continues."""
        return self._state.table(seq_id).draft_length

    def draft_first(self, seq_id: int) -> int:
        """The first slot the drafter may see. After a hit on pages that it has not filled this is the hit length,
        until their owner has filled them."""
        return self._state.draft_first(self._state.table(seq_id))

    def clear_prefix(self) -> None:
        """Free every page that is kept only for reuse."""
        while self._state.index.idle:
            self._state.index.evict()

    def use_drafter(self, name: str) -> None:
        """From now on the drafter's layers belong to the drafter `name`; what another one filled is masked.
        AlulaError while sequences are held."""
        if self._state.tables:
            raise AlulaError(f"the drafter cannot change to {name!r} while sequences are held: release them first")
        self._state.drafter_name = name

    def check_integrity(self) -> None:
        """Raises CacheCorrupted, saying what is wrong, if the bookkeeping contradicts itself."""
        check(self._state, settled=self._transaction is None or not self._transaction.is_active)
