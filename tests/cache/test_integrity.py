"""Every contradiction in the bookkeeping is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from alula.cache import CacheCorrupted
from alula.cache.prefix import Entry
from alula.cache.state import CacheState
from tests.cache.harness import Harness


def history() -> Harness:
    """Sequence 0 runs, 1 shares its first pages, 2 computed them itself, 3 was released."""
    harness = Harness()
    for seq_id, tokens, use_prefix in ((0, range(11), True), (1, range(9), True), (2, range(9), False)):
        harness.add(seq_id, list(tokens), use_prefix=use_prefix)
        harness.draft(seq_id)
    harness.add(3, [7] * 9)
    harness.draft(3)
    harness.release(3)
    harness.verify()
    return harness


def _entry(state: CacheState, number: int) -> Entry:
    return state.tables[0].entries[number]


def _swap_idle(state: CacheState) -> None:
    state.index._idle.move_to_end(next(iter(state.index._idle)))


def _duplicate(state: CacheState) -> None:
    state.tables[0]._buffer[1] = state.tables[0]._buffer[0]


def _lose_entry(state: CacheState) -> None:
    entry = _entry(state, 1)
    assert entry.parent is not None
    del entry.parent.children[entry.key]
    state.index._idle[entry] = None


FAULTS: dict[str, tuple[str, Callable[[CacheState], object]]] = {
    "page lost": ("free", lambda s: s.pages._free.pop()),
    "page freed twice": ("free list", lambda s: s.pages.give_back(s.pages._free[0])),
    "held page freed": ("free and held", lambda s: s.pages.give_back(int(s.tables[0].pages[0]))),
    "idle page freed": ("free and cached", lambda s: s.pages.give_back(s.index.idle_entries[0].page)),
    "held page idle": ("cached and held", lambda s: s.index._idle.setdefault(_entry(s, 0))),
    "reference lost": ("holders", lambda s: s.pages.refs.__setitem__(int(s.tables[0].pages[0]), 1)),
    "reference invented": ("holders", lambda s: s.pages.refs.__setitem__(s.pages._free[0], 1)),
    "page twice in a table": ("twice in its table", _duplicate),
    "page kept too long": ("pages for", lambda s: s.tables[0].extend([s.pages.take()])),
    "page cut too early": ("pages for", lambda s: s.tables[0].cut(8)),
    "length without pages": ("pages for", lambda s: setattr(s.tables[2], "length", 40)),
    "hit past the length": ("prefix hit", lambda s: setattr(s.tables[1], "hit", 40)),
    "drafter ahead": ("drafted", lambda s: setattr(s.tables[1], "draft_length", 40)),
    "entry missing": ("prefix entries", lambda s: s.tables[0].entries.pop()),
    "entry of another page": ("does not know", lambda s: setattr(_entry(s, 1), "page", s.pages._free[0])),
    "entry after a stranger": ("follow", lambda s: setattr(_entry(s, 1), "parent", s.index.idle_entries[0])),
    "slot not written": ("not written", lambda s: s.pages.written.__setitem__(int(s.tables[1].pages[2]), 0)),
    "idle page not written": ("fully written", lambda s: s.pages.written.__setitem__(s.index.idle_entries[0].page, 3)),
    "drafted past the page": ("drafted slots", lambda s: s.pages.drafted.__setitem__(0, 9)),
    "eviction order": ("evicted before", _swap_idle),
    "idle, not indexed": ("not in the prefix index|at once", _lose_entry),
    "indexed twice": ("index twice", lambda s: _entry(s, 0).spares.append(_entry(s, 1).page)),
    "spare not held": ("spare", lambda s: _entry(s, 0).spares.append(s.pages._free[0])),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str) -> None:
    message, break_it = FAULTS[fault]
    harness = history()
    break_it(harness.cache._state)
    with pytest.raises(CacheCorrupted, match=message):
        harness.cache.check_integrity()


def test_an_open_transaction_is_no_fault() -> None:
    harness = history()
    with harness.cache.begin({0: 20}):
        harness.cache.check_integrity()
    harness.cache.check_integrity()


def test_corruption_is_an_assertion() -> None:
    assert issubclass(CacheCorrupted, AssertionError)
