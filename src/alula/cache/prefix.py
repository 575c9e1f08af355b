"""The prefix index: finds committed pages that hold the KV of a prompt's first tokens.

A tree of full pages, as in RadixAttention (Zheng et al., "SGLang", 2024, section 3), with whole pages as
edges: an entry is found by hashing its page's tokens among its parent's children and verified by comparing
the tokens themselves, so a hit stands for equal tokens all the way from position 0.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from alula.cache.pages import PageStore

_TOKEN_BYTES = array("q").itemsize


class Entry:
    """One full page of tokens after its parent's tokens.

    page: the page that new sequences share. spares: pages of the same contents that running sequences computed
    for themselves; one of them takes over when nobody holds `page` any more. So an entry whose tokens some
    sequence holds is never idle, and neither are its ancestors.
    """

    __slots__ = ("children", "key", "page", "parent", "spares")

    def __init__(self, parent: Entry | None, key: bytes, page: int) -> None:
        self.parent = parent
        self.key = key
        self.page = page
        self.spares: list[int] = []
        self.children: dict[bytes, Entry] = {}


class PrefixIndex:
    """Entries by tokens, and the idle ones (held by nobody) from least to most recently used."""

    def __init__(self, pages: PageStore, is_better: Callable[[int, int], bool]) -> None:
        """`is_better(a, b)`: whether page a, of the same tokens as page b, knows more than b."""
        self._pages = pages
        self._is_better = is_better
        self._root = Entry(None, b"", -1)
        self._idle: OrderedDict[Entry, None] = OrderedDict()

    @property
    def idle(self) -> int:
        """Pages kept only for reuse. All of them can be evicted."""
        return len(self._idle)

    @property
    def idle_entries(self) -> tuple[Entry, ...]:
        return tuple(self._idle)

    def match(self, tokens: Sequence[int], limit: int) -> list[Entry]:
        """Entries of the longest known prefix of `tokens`, at most `limit` pages."""
        found: list[Entry] = []
        entry = self._root
        for key in self.keys(tokens[: limit * self._pages.page_size]):
            child = entry.children.get(key)
            if child is None:
                break
            found.append(child)
            entry = child
        return found

    def keys(self, tokens: Sequence[int]) -> Iterator[bytes]:
        """The tokens of each full page as bytes."""
        size = self._pages.page_size * _TOKEN_BYTES
        text = array("q", tokens).tobytes()
        return (text[start : start + size] for start in range(0, len(text) - size + 1, size))

    def share(self, entry: Entry) -> int:
        """Hold the entry's page once more."""
        self._idle.pop(entry, None)
        self._pages.refs[entry.page] += 1
        return entry.page

    def insert(self, parent: Entry | None, key: bytes, page: int) -> Entry:
        """Index a page that its sequence has just completed. The first page of equal contents stays the shared
        one, unless nobody holds it or the new one knows more."""
        parent = parent or self._root
        entry = parent.children.get(key)
        if entry is None:
            entry = parent.children[key] = Entry(parent, key, page)
        elif entry in self._idle:
            del self._idle[entry]
            self._pages.give_back(entry.page)
            entry.page = page
        else:
            entry.spares.append(page)
            self.promote(entry, page)
        return entry

    def promote(self, entry: Entry, page: int) -> None:
        """Share the spare `page` from now on, if it knows more than the page shared so far."""
        if page != entry.page and self._is_better(page, entry.page):
            entry.spares[entry.spares.index(page)] = entry.page
            entry.page = page

    def drop(self, entry: Entry, page: int) -> None:
        """A sequence lets go of `page`, which holds the entry's tokens. Call for a sequence's last page first:
        then the idle entries stand in an order in which children come before their parents."""
        self._pages.refs[page] -= 1
        if self._pages.refs[page]:
            return
        if page != entry.page:
            entry.spares.remove(page)
            self._pages.give_back(page)
        elif entry.spares:
            entry.page = entry.spares.pop(0)
            self._pages.give_back(page)
        else:
            self._idle[entry] = None

    def evict(self) -> None:
        """Free the page that was used longest ago. It has no children: they were let go before their parents."""
        entry, _ = self._idle.popitem(last=False)
        assert entry.parent is not None and not entry.children
        del entry.parent.children[entry.key]
        self._pages.give_back(entry.page)

    def entries(self) -> Iterator[Entry]:
        """All entries, parents first."""
        waiting = list(self._root.children.values())
        while waiting:
            entry = waiting.pop()
            yield entry
            waiting.extend(entry.children.values())
