"""Reserve, commit, roll back: what one transaction does to sequences, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from alula.cache import OutOfPages, Transaction
from alula.config import AlulaError
from tests.cache.harness import FEATURES, Harness, Work

TREE = ((0, 5), (0, 6), (1, 7), (2, 8), (2, 9), (5, 4))
"""Nodes 1 to 6; 6 lies on the path 2, 5, 6."""


def ready(length: int = 6, *, pages: int = 16, **options: bool) -> Harness:
    """Sequence 0 with all but its root committed."""
    harness = Harness(pages=pages, **options)
    harness.add(0, list(range(length + 1)))
    harness.prefill(0)
    return harness


@pytest.mark.parametrize(("accepted", "path"), [(0, []), (1, [1]), (3, [1, 3]), (2, [2]), (4, [2, 4]), (6, [2, 5, 6])])
def test_accepted_path_moves_into_place(accepted: int, path: list[int]) -> None:
    harness, work = ready(), Work(0, TREE, accepted=accepted, bonus=3)
    assert work.path(accepted) == path
    harness.step({0: work})
    assert harness.models[0].length == 7 + len(path)
    harness.verify()


def test_nothing_is_copied_where_rows_lie_already(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = ready()
    moved: list[np.ndarray] = []
    monkeypatch.setattr(harness.cache._state.pool, "move_rows", moved.append)
    harness.step({0: Work(0, ((0, 5), (1, 6), (2, 7)), accepted=3)})
    harness.step({0: Work(0, ((0, 5), (0, 6), (1, 7)), accepted=3)})
    assert [moves.shape for moves in moved] == [(2, 1)]


def test_drafter_rows_stay() -> None:
    harness = ready()
    before = [layer.keys.clone() for layer in harness.cache.drafter_layers]
    with harness.cache.begin({0: 7}) as txn:
        txn.commit(0, [*range(7), 6, 9, 4, 1], 0, [2, 5, 6], torch.zeros(4, FEATURES))
    for layer, keys in zip(harness.cache.drafter_layers, before, strict=True):
        assert torch.equal(layer.keys, keys)


def test_catch_up_rows_and_tree_in_one_commit() -> None:
    harness = Harness()
    harness.add(0, list(range(11)))
    harness.step({0: Work(3)})
    harness.step({0: Work(7, TREE, accepted=6, drafted=4)})
    assert harness.models[0].length == 14
    harness.verify()


def test_several_sequences_move_at_once() -> None:
    harness = ready()
    for seq_id in (1, 2):
        harness.add(seq_id, [seq_id, 2, 3, 4, 5, 6])
        harness.prefill(seq_id)
    harness.step({0: Work(0, TREE, 6), 1: Work(0, TREE, 4), 2: Work(0, TREE, 1)})
    assert [harness.models[seq_id].length for seq_id in range(3)] == [10, 8, 7]
    harness.verify()


def test_leaving_without_commit_rolls_back() -> None:
    harness = ready()
    free = harness.cache.free_pages
    harness.step({0: Work(0, TREE, 6, drafted=7, commits=False)})
    assert (harness.cache.length(0), harness.cache.draft_length(0)) == (6, 1)
    assert harness.cache.free_pages == free
    harness.verify()


def test_an_error_spares_what_was_committed_before_it() -> None:
    harness = ready()
    harness.add(1, [1, 2, 3, 4, 5, 6])
    harness.step({0: Work(0, TREE, 6, drafted=7), 1: Work(3, commits=False)}, mishap=True)
    assert (harness.cache.length(0), harness.cache.draft_length(0), harness.cache.length(1)) == (10, 7, 0)
    harness.verify()


def test_an_error_of_the_device_leaves_all_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = ready()

    def fail(_: np.ndarray) -> None:
        raise RuntimeError("device lost")

    with monkeypatch.context() as patched:
        patched.setattr(harness.cache._state.pool, "move_rows", fail)
        with pytest.raises(RuntimeError, match="device lost"):
            harness.step({0: Work(0, TREE, 6, drafted=7)})
    harness.models[0].drafts.clear()
    assert (harness.cache.length(0), harness.cache.draft_length(0)) == (6, 1)
    harness.verify()


def test_commits_take_effect_when_the_block_ends_or_at_flush() -> None:
    harness = ready()
    harness.add(1, [1, 2, 3])
    with harness.cache.begin({0: 1, 1: 2}) as txn:
        txn.commit(0, list(range(8)), 0, [], None)
        assert harness.cache.length(0) == txn.length(0) == 6
        txn.flush()
        assert harness.cache.length(0) == 7
        with pytest.raises(AlulaError, match="not in this transaction"):
            txn.length(0)
        txn.commit(1, [1, 2, 3], 2, None, None)
    assert harness.cache.length(1) == 2
    harness.cache.check_integrity()


def test_release_inside_a_transaction() -> None:
    """A finished sequence leaves its pages for reuse; one that is not committed is rolled back first."""
    harness = ready(length=7)
    harness.add(1, [9] * 9)
    harness.step({0: Work(0, (), bonus=1), 1: Work(8, commits=False)}, release=[0, 1])
    harness.verify()
    assert harness.cache.cached_pages == 2
    assert harness.cache.peek([*range(8), 1, 2]) == 8 and harness.cache.peek([9] * 9) == 0


def test_page_tables_are_padded_int32() -> None:
    harness = ready(length=9)
    harness.add(1, [5, 5])
    with harness.cache.begin({0: 0, 1: 1}) as txn:
        table = txn.page_table([1, 0])
        assert table.dtype == torch.int32 and table.shape == (2, 3) and table[0, 1:].tolist() == [0, 0]
        slots = txn.slots(0, np.arange(9))
        assert slots.dtype == np.int64 and (slots // 4 == table[1].numpy()[np.arange(9) // 4]).all()
        assert txn.page_table([]).shape == (0, 1)


def test_long_sequences_have_distinct_slots() -> None:
    """Page tables grow past their first size, and pool slots past 16 bits."""
    harness = Harness(pages=10_500)
    harness.cache.add(0, [1] * 40_001)
    with harness.cache.begin({0: 40_001}) as txn:
        slots = txn.slots(0, np.arange(40_001))
        assert len(np.unique(slots)) == 40_001
        txn.commit(0, [1] * 40_001, 40_000, [], None)
    assert harness.cache.length(0) == 40_001
    harness.cache.check_integrity()


def test_fill_is_seen_inside_and_staged_outside() -> None:
    harness = ready()
    with harness.cache.begin({0: 1}) as txn:
        txn.fill_draft(0, 7, first=5)
        assert (txn.draft_length(0), txn.draft_first(0)) == (7, 5)
        assert (harness.cache.draft_length(0), harness.cache.draft_first(0)) == (1, 1)
        txn.commit(0, list(range(8)), 0, [], None)
    assert (harness.cache.draft_length(0), harness.cache.draft_first(0)) == (7, 5)


def _commit_twice(txn: Transaction) -> None:
    for _ in range(2):
        txn.commit(0, [0] * 9, 0, [], None)


def _fill_past_the_commit(txn: Transaction) -> None:
    txn.fill_draft(0, 8)
    txn.commit(0, [0] * 20, 0, [], None)


FAULTS: dict[str, tuple[str, Callable[[Transaction], object]]] = {
    "commits twice": ("committed already", _commit_twice),
    "node beyond the reservation": ("not among", lambda t: t.commit(0, [0] * 20, 0, [1, 12], None)),
    "chunk beyond the reservation": ("not among", lambda t: t.commit(0, [0] * 20, 7, None, None)),
    "negative chunk": ("not among", lambda t: t.commit(0, [0] * 20, -1, None, None)),
    "child before parent": ("rise", lambda t: t.commit(0, [0] * 20, 0, [2, 1], None)),
    "root on the path": ("rise", lambda t: t.commit(0, [0] * 20, 0, [0], None)),
    "too few tokens": ("tokens", lambda t: t.commit(0, [0] * 7, 0, [1], None)),
    "features of too few rows": ("features", lambda t: t.commit(0, [0] * 20, 0, [1], torch.zeros(1, FEATURES))),
    "features of another width": ("features", lambda t: t.commit(0, [0] * 20, 0, [], torch.zeros(1, 2))),
    "drafter past the commit": ("drafter", _fill_past_the_commit),
    "drafter past the reservation": ("length", lambda t: t.fill_draft(0, 13)),
    "drafter going back": ("length", lambda t: t.fill_draft(0, 0)),
    "drafter skipping past its end": ("length", lambda t: t.fill_draft(0, 7, first=8)),
    "slot past the reservation": ("reserved", lambda t: t.slots(0, np.array([0, 12]))),
    "slot before the first": ("reserved", lambda t: t.slots(0, np.array([-1]))),
    "stranger": ("not in this transaction", lambda t: t.slots(5, np.array([0]))),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_fit_is_refused_and_rolled_back(fault: str) -> None:
    message, act = FAULTS[fault]
    harness = ready()
    with pytest.raises(ValueError, match=message), harness.cache.begin({0: 6}) as txn:
        act(txn)
    assert harness.cache.length(0) == (7 if fault == "commits twice" else 6)
    harness.cache.check_integrity()


def test_a_second_transaction_must_wait() -> None:
    harness = ready()
    with harness.cache.begin({0: 1}), pytest.raises(AlulaError, match="open already"):
        harness.cache.begin({})
    with harness.cache.begin({0: 1}):
        pass


def test_sequences_are_added_once_and_known_by_name() -> None:
    harness = ready()
    acts: list[Callable[[], object]] = [
        lambda: harness.cache.add(0, [1]),
        lambda: harness.cache.add(1, []),
        lambda: harness.cache.release(7),
        lambda: harness.cache.length(7),
        lambda: harness.cache.begin({7: 1}),
        lambda: harness.cache.begin({0: -1}),
    ]
    for act in acts:
        with pytest.raises(AlulaError, match=r"seq_id|tokens|need"):
            act()
    harness.verify()


def test_out_of_pages_says_how_many() -> None:
    harness = ready(pages=4)
    harness.add(1, [3, 3, 3])
    with pytest.raises(OutOfPages) as caught:
        harness.cache.begin({0: 3, 1: 8})
    assert (caught.value.needed, caught.value.available, caught.value.total) == (3, 2, 4)
    assert isinstance(caught.value, AlulaError)
    harness.verify()


def test_the_last_page_can_be_had() -> None:
    harness = ready(pages=4)
    assert harness.cache.can_begin({0: 10}) and not harness.cache.can_begin({0: 11})
    harness.step({0: Work(0, ((0, 1),) * 9)})
    harness.verify()
