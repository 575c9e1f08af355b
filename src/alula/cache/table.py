"""What the cache knows of one sequence: its pages in logical order and how far they are filled."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from alula.cache.prefix import Entry
from alula.tree import IntArray

NEVER = sys.maxsize


@dataclass(eq=False)
class PageTable:
    """Pages of one sequence, in logical order: slot j lies in page j // page_size.

    length: slots with committed target KV.
    hit: slots that came from the prefix index.
    draft_length: the drafter continues here.
    draft_first: the first slot that the drafter may see.
    waiting: whether the slots before `hit` are masked only until their owner has filled them for the drafter;
        `checked` of their pages are known to be filled.
    record_from: the first slot from which pages may be noted as filled for the drafter.
    entries: the prefix index's entries of the full committed pages (none without prefix caching).
    """

    page_size: int
    length: int = 0
    hit: int = 0
    draft_length: int = 0
    draft_first: int = 0
    waiting: bool = False
    checked: int = 0
    record_from: int = 0
    entries: list[Entry] = field(default_factory=list)
    count: int = 0
    _buffer: NDArray[np.int32] = field(default_factory=lambda: np.zeros(16, np.int32))

    @property
    def pages(self) -> NDArray[np.int32]:
        return self._buffer[: self.count]

    @property
    def reserved(self) -> int:
        """Slots that have a page."""
        return self.count * self.page_size

    def pages_short(self, slots: int) -> int:
        """Pages to add before slots < `slots` all have one."""
        return max(0, -(-slots // self.page_size) - self.count)

    def extend(self, pages: list[int]) -> None:
        stop = self.count + len(pages)
        if stop > len(self._buffer):
            grown = np.zeros(2 * stop, np.int32)
            grown[: self.count] = self.pages
            self._buffer = grown
        self._buffer[self.count : stop] = pages
        self.count = stop

    def cut(self, slots: int) -> list[int]:
        """Take away the pages that slots < `slots` do not need; returns them, the last one first."""
        keep = -(-slots // self.page_size)
        taken: list[int] = self._buffer[keep : self.count][::-1].tolist()
        self.count = min(self.count, keep)
        return taken

    def slots(self, positions: IntArray) -> IntArray:
        """Pool slots (int64) of logical slots, which must have pages."""
        return self._buffer[positions // self.page_size].astype(np.int64) * self.page_size + positions % self.page_size
