"""What the facade and the transactions share: tensors, page bookkeeping, prefix index and the page tables."""

from __future__ import annotations

from collections.abc import Sequence

from alula.cache.pages import PageStore
from alula.cache.pool import CacheLayout, Pool
from alula.cache.prefix import Entry, PrefixIndex
from alula.cache.table import NEVER, PageTable
from alula.config import AlulaError

RECOMPUTED_SLOTS = 64
"""Longest undrafted tail of a prefix hit that is given up, in slots (but one page at least)."""


class CacheState:
    """The cache's parts and the moves on them that keep them consistent with each other.

    An EAGLE entry in slot j is a function of the pair (f_{j-1}, t_j) alone as long as the drafter has a single
    layer, whatever that layer could see; only with more layers (an LM drafter) do later entries depend on earlier
    ones being visible. `pairwise` tells the two apart.
    """

    def __init__(
        self, layout: CacheLayout, pool: Pool, pages: PageStore, drafter_first: int, drafter_name: str, caching: bool
    ) -> None:
        self.layout = layout
        self.pool = pool
        self.pages = pages
        self.index = PrefixIndex(pages, self._is_better)
        self.tables: dict[int, PageTable] = {}
        self.drafter_first = drafter_first
        self.drafter_name = drafter_name
        self.caching = caching
        self.pairwise = len(layout.drafter) == 1

    @property
    def available(self) -> int:
        """Pages that can be had at once: free ones and idle ones of the prefix index."""
        return self.pages.free + self.index.idle

    def table(self, seq_id: int) -> PageTable:
        try:
            return self.tables[seq_id]
        except KeyError:
            raise AlulaError(f"seq_id {seq_id} is not in the cache: add it first") from None

    def grow(self, table: PageTable, count: int) -> None:
        """Reserve `count` more pages, of which there must be enough; evicts only what the free list lacks."""
        for _ in range(count - self.pages.free):
            self.index.evict()
        if count:
            table.extend([self.pages.take() for _ in range(count)])

    def shrink(self, table: PageTable, slots: int) -> None:
        """Let go of the pages that slots < `slots` do not need, the last one first."""
        first = table.count - 1
        for number, page in enumerate(table.cut(slots)):
            position = first - number
            if position < len(table.entries):
                self.index.drop(table.entries[position], page)
            else:
                self.pages.refs[page] -= 1
                self.pages.give_back(page)

    def hit(self, tokens: Sequence[int]) -> list[Entry]:
        """Entries that a sequence of these tokens may share; at least its last token stays to be computed.

        A hit ends with a page whose feature is known.
        """
        if not self.caching:
            return []
        found = self.index.match(tokens, (len(tokens) - 1) // self.layout.page_size)
        if self.layout.drafter:
            self._drop_undrafted_tail(found)
        while self.layout.feature_size and found and not self.pages.has_feature[found[-1].page]:
            found.pop()
        return found

    def _drop_undrafted_tail(self, found: list[Entry]) -> None:
        """A finished sequence leaves its last tokens undrafted. To share those pages would hide the whole prefix
        from the drafter for good, so a short undrafted tail that nobody is left to fill is computed again."""
        drafted = next((n for n, entry in enumerate(found) if not self.is_drafted(entry.page)), len(found))
        tail = len(found) - drafted
        if 0 < tail <= min(drafted, max(1, RECOMPUTED_SLOTS // self.layout.page_size)):
            will_be_filled = self.pairwise and self.pages.refs[found[drafted].page]
            if not will_be_filled:
                del found[drafted:]

    def attach(self, entries: list[Entry]) -> PageTable:
        """A page table that starts with shared pages."""
        length = len(entries) * self.layout.page_size
        first = self.drafter_first
        table = PageTable(
            self.layout.page_size,
            length=length,
            hit=length,
            draft_length=max(length, first),
            draft_first=first,
            record_from=length,
            entries=entries,
        )
        table.extend([self.index.share(entry) for entry in entries])
        if self.layout.drafter and not all(self.is_drafted(entry.page) for entry in entries):
            table.draft_first = length
            table.waiting = self.pairwise
            table.record_from = length if self.pairwise else NEVER
        return table

    def draft_first(self, table: PageTable) -> int:
        """First slot the drafter may see. Shared pages come into view once their owner has filled all of them."""
        if table.waiting:
            pages, stop = table.pages, table.hit // self.layout.page_size
            while table.checked < stop and self.is_drafted(int(pages[table.checked])):
                table.checked += 1
            if table.checked == stop:
                table.draft_first, table.waiting = self.drafter_first, False
        return table.draft_first

    def record_written(self, table: PageTable, length: int, tokens: Sequence[int], has_features: bool) -> None:
        """Slots up to `length` are committed: note it, and index the pages this completes."""
        size, start = self.layout.page_size, table.length
        for position in range(start // size, -(-length // size)):
            self.pages.written[table.pages[position]] = min(size, length - position * size)
        full = range(start // size, length // size)
        if has_features:
            for page in table.pages[full.start : full.stop].tolist():
                self.pages.has_feature[page] = True
        table.length = length
        if self.caching and full:
            parent = table.entries[-1] if table.entries else None
            pages = table.pages[full.start : full.stop].tolist()
            for key, page in zip(self.index.keys(tokens[full.start * size : full.stop * size]), pages, strict=True):
                parent = self.index.insert(parent, key, page)
                table.entries.append(parent)

    def record_drafted(self, table: PageTable, first: int, length: int) -> None:
        """The drafter has filled slots up to `length`; with `first` above the length so far, it has skipped some."""
        size = self.layout.page_size
        if first > table.draft_length:
            table.draft_first, table.waiting = first, False
            table.record_from = -(-first // size) * size if self.pairwise else NEVER
        start = max(min(table.draft_length, length - 1) // size, table.record_from // size)
        table.draft_length = length
        for position in range(start, -(-length // size)):
            page = int(table.pages[position])
            self.pages.note_drafted(page, min(size, length - position * size), self.drafter_name)
            if position < len(table.entries):
                self.index.promote(table.entries[position], page)

    def is_drafted(self, page: int) -> bool:
        return self.pages.is_drafted(page, self.drafter_name)

    def _is_better(self, page: int, other: int) -> bool:
        pages = self.pages
        return (pages.has_feature[page], self.is_drafted(page)) > (pages.has_feature[other], self.is_drafted(other))
