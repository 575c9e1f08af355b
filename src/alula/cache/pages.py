"""Pages by number: which are free, who holds the others, and what is known of each page's contents."""

from __future__ import annotations


class CacheCorrupted(AssertionError):
    """The cache's bookkeeping contradicts itself: a fault in alula, not in what the user gave."""


class PageStore:
    """Free list, reference counts and notes of `total` pages.

    refs: page tables that hold the page. 0 means free, or cached for reuse (the prefix index knows which).
    written: leading slots with committed target KV.
    drafted, drafter: leading slots that are settled for the drafter of that name (an always empty slot counts).
    has_feature: whether the target feature of the page's last token is kept.
    """

    def __init__(self, total: int, page_size: int) -> None:
        self.total = total
        self.page_size = page_size
        self.refs = [0] * total
        self.written = [0] * total
        self.drafted = [0] * total
        self.drafter = [""] * total
        self.has_feature = [False] * total
        self._free = list(range(total - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def free_list(self) -> tuple[int, ...]:
        return tuple(self._free)

    def take(self) -> int:
        """A free page, now held once and blank. The page freed last comes first: its memory is warm."""
        page = self._free.pop()
        self.refs[page] = 1
        self.written[page] = 0
        self.drafted[page] = 0
        self.has_feature[page] = False
        return page

    def give_back(self, page: int) -> None:
        """Put a page that nobody holds on the free list."""
        self._free.append(page)

    def note_drafted(self, page: int, slots: int, drafter: str) -> None:
        self.drafted[page] = slots
        self.drafter[page] = drafter

    def is_drafted(self, page: int, drafter: str) -> bool:
        """Whether `drafter` has filled all of the page."""
        return self.drafted[page] == self.page_size and self.drafter[page] == drafter
