"""The prefix index: what is found, what is shared, and what is evicted first."""

from __future__ import annotations

import pytest

from tests.cache.harness import Harness, Work


def finish(harness: Harness, seq_id: int, tokens: list[int]) -> None:
    """Run a sequence of these tokens up to its root, drafter included, and release it."""
    harness.add(seq_id, tokens)
    harness.draft(seq_id)
    harness.release(seq_id)


@pytest.mark.parametrize(("length", "hit"), [(4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 8), (30, 8)])
def test_whole_pages_short_of_the_last_token(length: int, hit: int) -> None:
    harness = Harness()
    finish(harness, 0, list(range(12)))
    assert harness.add(1, list(range(length)) if length <= 12 else [*range(10), *[50] * (length - 10)]) == hit
    harness.verify()


def test_equal_pages_after_other_tokens_are_no_hit() -> None:
    harness = Harness()
    finish(harness, 0, [1, 1, 1, 1, 2, 2, 2, 2, 3])
    assert harness.cache.peek([2, 2, 2, 2, 1, 1, 1, 1, 3]) == 0
    assert harness.cache.peek([1, 1, 1, 1, 1, 1, 1, 1, 3]) == 4


def test_tokens_of_other_sizes_are_told_apart() -> None:
    """Token ids that agree in their low bits are different tokens."""
    harness = Harness()
    finish(harness, 0, [1, 2, 3, 4, 5])
    assert harness.cache.peek([1, 2, 3, 4 + 2**32, 5]) == 0
    assert harness.cache.peek([1, 2, 3, 4, 5]) == 4


def test_a_running_sequence_shares_its_pages() -> None:
    harness = Harness()
    harness.add(0, list(range(11)))
    harness.draft(0)
    assert harness.add(1, [*range(9), 40, 41, 42]) == 8
    assert harness.slots(1).tolist() == harness.slots(0)[:8].tolist()
    harness.draft(1)
    harness.release(0)
    harness.verify()


def test_what_is_not_committed_is_not_found() -> None:
    harness = Harness()
    harness.add(0, list(range(10)))
    harness.step({0: Work(9, (), commits=False)})
    assert harness.cache.peek(list(range(10))) == 0
    harness.step({0: Work(7)})
    assert harness.cache.peek(list(range(10))) == 4


def test_rejected_nodes_are_not_found() -> None:
    harness = Harness()
    harness.add(0, [1, 2])
    harness.prefill(0)
    harness.step({0: Work(0, ((0, 3), (0, 5), (2, 6)), accepted=3, bonus=7)})
    assert harness.cache.peek([1, 2, 3, 6, 7]) == 0
    assert harness.cache.peek([1, 2, 5, 6, 7]) == 4


def test_without_use_prefix_nothing_is_shared() -> None:
    harness = Harness()
    finish(harness, 0, list(range(9)))
    assert harness.add(1, list(range(9)), use_prefix=False) == 0
    harness.verify()


def test_without_prefix_caching_pages_are_free_at_once() -> None:
    harness = Harness(prefix_caching=False)
    finish(harness, 0, list(range(9)))
    assert harness.cache.cached_pages == 0 and harness.cache.peek(list(range(9))) == 0


def test_least_recently_used_goes_first_and_children_before_parents() -> None:
    harness = Harness(pages=6)
    finish(harness, 0, [1] * 8)
    finish(harness, 1, [2] * 8)
    finish(harness, 2, [1] * 8)
    finish(harness, 3, [3] * 8)
    expectations = [(8, 8, 8), (8, 4, 8), (8, 0, 8), (4, 0, 8), (0, 0, 8), (0, 0, 4), (0, 0, 0)]
    harness.add(9, [9] * 25)
    for expected in expectations:
        assert tuple(harness.cache.peek([token] * 9) for token in (1, 2, 3)) == expected
        harness.verify()
        if expected != (0, 0, 0):
            harness.step({9: Work(4)})


def test_free_pages_are_used_before_any_is_evicted() -> None:
    harness = Harness(pages=6)
    finish(harness, 0, [1] * 8)
    harness.add(1, [2] * 17)
    harness.step({1: Work(16)})
    assert harness.cache.peek([1] * 9) == 8
    harness.verify()


def test_the_first_page_of_equal_contents_stays_shared() -> None:
    harness = Harness()
    for seq_id in (0, 1):
        harness.add(seq_id, list(range(9)))
    harness.draft(0)
    harness.draft(1)
    first, second = harness.slots(0)[:8].tolist(), harness.slots(1)[:8].tolist()
    assert not set(first) & set(second)
    harness.add(2, list(range(9)))
    assert harness.slots(2).tolist() == first
    harness.verify()


def test_a_released_duplicate_is_free_at_once() -> None:
    harness = Harness()
    for seq_id in (0, 1):
        harness.add(seq_id, list(range(9)), use_prefix=False)
        harness.draft(seq_id)
    harness.release(1)
    assert harness.cache.cached_pages == 0
    harness.verify()
    harness.release(0)
    harness.verify()


def test_a_page_of_equal_contents_takes_over_from_a_released_one() -> None:
    harness = Harness()
    for seq_id in (0, 1):
        harness.add(seq_id, list(range(9)))
    harness.draft(0)
    harness.draft(1)
    second = harness.slots(1)[:8].tolist()
    harness.release(0)
    assert harness.cache.cached_pages == 0
    harness.add(2, list(range(9)))
    assert harness.slots(2).tolist() == second
    harness.verify()


def test_a_page_computed_again_replaces_one_that_nobody_holds() -> None:
    """Else a sequence could hold the continuation of a page that may be evicted."""
    harness = Harness(pages=6)
    finish(harness, 0, list(range(9)))
    harness.add(1, list(range(13)), use_prefix=False)
    harness.draft(1)
    assert harness.cache.cached_pages == 0
    harness.verify()


def test_a_hit_needs_the_feature_of_its_last_token() -> None:
    harness = Harness()
    harness.add(0, list(range(13)))
    harness.step({0: Work(4)})
    harness.step({0: Work(8, features=False)})
    harness.release(0)
    assert harness.cache.peek(list(range(13))) == 4
    harness.add(1, list(range(13)))
    harness.prefill(1)
    assert harness.cache.peek(list(range(13))) == 12
    harness.verify()


def test_a_page_with_its_feature_replaces_a_shared_one_without() -> None:
    harness = Harness()
    harness.add(0, list(range(9)))
    harness.add(1, list(range(9)))
    harness.prefill(0, features=False)
    assert harness.cache.peek(list(range(9))) == 0
    harness.prefill(1)
    assert harness.cache.peek(list(range(9))) == 8
    harness.release(1)
    harness.verify()


def test_clearing_frees_what_nobody_holds() -> None:
    harness = Harness()
    finish(harness, 0, list(range(20)))
    harness.add(1, list(range(9)))
    harness.cache.clear_prefix()
    assert harness.cache.cached_pages == 0 and harness.cache.peek(list(range(20))) == 8
    harness.verify()
