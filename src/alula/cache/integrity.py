"""Checks that the cache's bookkeeping adds up. Host work only, linear in the pages."""

from __future__ import annotations

from collections import Counter

from alula.cache.pages import CacheCorrupted
from alula.cache.prefix import Entry
from alula.cache.state import CacheState
from alula.cache.table import PageTable


def check(state: CacheState, *, settled: bool) -> None:
    """Raises CacheCorrupted at the first contradiction. `settled`: no transaction is open, so no sequence holds
    a page beyond its committed length."""
    refs = Counter[int]()
    for seq_id, table in state.tables.items():
        fault = _table_fault(state, table, settled) or _written_fault(state, table)
        if fault:
            raise CacheCorrupted(f"sequence {seq_id} {fault}")
        refs.update(table.pages.tolist())
    entries = list(state.index.entries())
    fault = _pages_fault(state, refs) or _index_fault(state, entries, refs) or _order_fault(state, entries)
    if fault:
        raise CacheCorrupted(fault)


def _table_fault(state: CacheState, table: PageTable, settled: bool) -> str | None:
    size, pages = state.layout.page_size, table.pages.tolist()
    if len(set(pages)) != len(pages):
        return "has a page twice in its table"
    least = -(-table.length // size)
    if len(pages) < least or (settled and len(pages) > least):
        return f"holds {len(pages)} pages for {table.length} committed slots"
    if table.hit > table.length:
        return f"has {table.length} committed slots after a prefix hit of {table.hit}"
    if table.draft_length > max(table.length, state.drafter_first):
        return f"has {table.length} committed slots, {table.draft_length} of them drafted"
    full = table.length // size if state.caching else 0
    if len(table.entries) != full:
        return f"has {len(table.entries)} prefix entries for {full} full pages"
    parent = None
    for page, entry in zip(pages, table.entries, strict=False):
        if page != entry.page and page not in entry.spares:
            return f"holds page {page}, which its prefix entry does not know"
        if parent is not None and entry.parent is not parent:
            return f"has a prefix entry for page {page} that does not follow the one before"
        parent = entry
    return None


def _written_fault(state: CacheState, table: PageTable) -> str | None:
    size = state.layout.page_size
    for position, page in enumerate(table.pages.tolist()):
        if state.pages.written[page] < min(size, table.length - position * size):
            return f"has {table.length} committed slots, but page {page} is not written so far"
    return None


def _pages_fault(state: CacheState, refs: Counter[int]) -> str | None:
    pages = state.pages
    free, free_list = set(pages.free_list), pages.free_list
    cached = {entry.page for entry in state.index.idle_entries}
    if len(free) != len(free_list):
        return "the free list has a page twice"
    held = set(refs)
    overlaps = {"free and held": free & held, "cached and held": cached & held, "free and cached": free & cached}
    for what, both in overlaps.items():
        if both:
            return f"pages {sorted(both)} are {what} at once"
    if len(free) + len(refs) + len(cached) != pages.total:
        return f"{len(free)} free + {len(refs)} held + {len(cached)} cached pages are not {pages.total}"
    for page, count in enumerate(pages.refs):
        if count != refs[page]:
            return f"page {page} counts {count} holders, but {refs[page]} page tables hold it"
    if any(not 0 <= slots <= pages.page_size for slots in pages.drafted):
        return f"a page has more drafted slots than its {pages.page_size}"
    return None


def _index_fault(state: CacheState, entries: list[Entry], refs: Counter[int]) -> str | None:
    idle = set(state.index.idle_entries)
    if not idle <= set(entries):
        return "an idle page is not in the prefix index"
    indexed = [page for entry in entries for page in (entry.page, *entry.spares)]
    if len(set(indexed)) != len(indexed):
        return "a page is in the prefix index twice"
    for entry in entries:
        if state.pages.written[entry.page] != state.layout.page_size:
            return f"page {entry.page} is in the prefix index, but not fully written"
        if (entry in idle) != (refs[entry.page] == 0):
            return f"page {entry.page} of the prefix index has {refs[entry.page]} holders and idle is {entry in idle}"
        if any(not refs[page] for page in entry.spares):
            return f"a spare of page {entry.page} is held by nobody"
    return None


def _order_fault(state: CacheState, entries: list[Entry]) -> str | None:
    """Children must be evicted before their parents."""
    places = {entry: place for place, entry in enumerate(state.index.idle_entries)}
    for entry in entries:
        place = places.get(entry)
        if place is not None and any(places.get(child, place) >= place for child in entry.children.values()):
            return f"page {entry.page} would be evicted before its continuation"
    return None
