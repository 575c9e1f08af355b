"""What the drafter has filled: recorded per page, masked where it is missing, in view once it is there."""

from __future__ import annotations

import pytest
import torch

from alula.config import AlulaError
from tests.cache.harness import Harness, Work, feature

PROMPT = list(range(20, 33))


def test_a_fresh_sequence_starts_at_the_drafters_first_slot() -> None:
    for lm in (False, True):
        harness = Harness(lm=lm)
        harness.add(0, PROMPT)
        assert harness.cache.draft_length(0) == harness.cache.draft_first(0) == (0 if lm else 1)


def test_a_filled_prefix_is_in_view() -> None:
    for lm in (False, True):
        harness = Harness(lm=lm)
        harness.add(0, PROMPT)
        harness.draft(0)
        assert harness.add(1, PROMPT) == 12
        assert (harness.cache.draft_length(1), harness.cache.draft_first(1)) == (12, harness.first)
        harness.verify()


def test_an_unfilled_prefix_is_masked_for_good_when_its_owner_has_gone() -> None:
    harness = Harness()
    harness.add(0, PROMPT)
    harness.prefill(0)
    harness.release(0)
    assert harness.add(1, PROMPT) == 12
    assert (harness.cache.draft_length(1), harness.cache.draft_first(1)) == (12, 12)
    harness.draft(1)
    assert (harness.cache.draft_length(1), harness.cache.draft_first(1)) == (13, 12)
    harness.verify()


def test_a_prefix_comes_into_view_when_its_owner_has_filled_it() -> None:
    """A request that arrives in the step after its prefix was computed must not stay blind."""
    harness = Harness()
    harness.add(0, PROMPT)
    harness.prefill(0)
    harness.add(1, PROMPT)
    harness.draft(1)
    harness.step({0: Work(0, (), drafted=12)})
    assert harness.cache.draft_first(1) == 1
    harness.verify()


def test_a_prefix_filled_in_part_stays_masked() -> None:
    harness = Harness()
    harness.add(0, PROMPT)
    harness.prefill(0)
    harness.add(1, PROMPT)
    harness.step({0: Work(0, (), drafted=11)})
    assert harness.cache.draft_first(1) == 12
    harness.verify()


def test_a_language_model_stays_with_what_it_has_seen() -> None:
    """Its later entries were computed without the prefix, so the prefix must not appear afterwards, nor may pages
    filled that way pass for complete ones."""
    harness = Harness(lm=True)
    harness.add(0, PROMPT)
    harness.prefill(0)
    harness.add(1, [*PROMPT, *range(8)])
    harness.draft(1)
    harness.step({0: Work(0, (), drafted=12)})
    assert harness.cache.draft_first(1) == 12
    harness.add(2, [*PROMPT, *range(8)])
    assert harness.cache.draft_first(2) in (0, harness.cache.length(2))
    harness.verify()
    assert harness.cache.peek([*PROMPT, *range(8)]) == 12


def test_a_short_undrafted_tail_is_computed_again() -> None:
    """The drafter lags behind when a sequence ends; its next turn gives up one page, not the view of all the others."""
    harness = Harness()
    harness.add(0, PROMPT)
    harness.draft(0)
    harness.step({0: Work(0, ((0, 1), (1, 2), (2, 3)), accepted=3, drafted=14)})
    tokens = harness.models[0].tokens
    assert harness.cache.length(0) == 17
    assert harness.cache.peek([*tokens, 1, 2]) == 16
    harness.release(0)
    assert harness.add(1, [*tokens, 1, 2]) == 12
    assert harness.cache.draft_first(1) == 1
    harness.draft(1)
    assert harness.cache.peek([*tokens, 1, 2]) == 16
    harness.release(1)
    harness.add(2, [*tokens, 1, 2])
    assert (harness.cache.length(2), harness.cache.draft_first(2)) == (16, 1)
    harness.verify()


def test_a_long_undrafted_tail_is_kept() -> None:
    harness = Harness(pages=64)
    harness.add(0, [1] * 100)
    harness.step({0: Work(40)})
    harness.step({0: Work(0, None, drafted=24)})
    harness.step({0: Work(59)})
    harness.release(0)
    assert harness.cache.peek([1] * 100) == 96


def test_a_drafted_page_replaces_an_undrafted_one_of_equal_contents() -> None:
    harness = Harness()
    for seq_id in (0, 1):
        harness.add(seq_id, PROMPT)
    harness.prefill(0)
    harness.draft(1)
    harness.add(2, PROMPT)
    assert harness.cache.draft_first(2) == 1
    assert harness.slots(2).tolist() == harness.slots(1)[:12].tolist()
    harness.verify()


def test_skipped_slots_are_masked_and_their_pages_incomplete() -> None:
    harness = Harness()
    harness.add(0, list(range(22)))
    harness.prefill(0)
    harness.step({0: Work(0, (), drafted=22, skip=6)})
    assert harness.cache.draft_first(0) == 6
    pages, table = harness.cache._state.pages, harness.cache._state.tables[0].pages.tolist()
    assert [pages.is_drafted(page, "head") for page in table] == [False, False, True, True, True, False]
    harness.add(1, list(range(22)))
    assert harness.cache.draft_first(1) == harness.cache.length(1) == 20
    harness.verify()


def test_a_skip_hides_a_prefix_that_is_filled_later() -> None:
    """Between the shared prefix and the sequence's own entries lie slots that nobody fills."""
    harness = Harness()
    harness.add(0, PROMPT)
    harness.prefill(0)
    harness.add(1, [*PROMPT, *range(8)])
    harness.prefill(1)
    harness.step({0: Work(0, (), drafted=12), 1: Work(0, (), drafted=20, skip=15)})
    assert harness.cache.draft_first(1) == 15
    harness.verify()


def test_pages_a_language_model_filled_after_a_skip_are_never_complete() -> None:
    harness = Harness(lm=True)
    harness.add(0, list(range(22)))
    harness.prefill(0)
    harness.step({0: Work(0, (), drafted=22, skip=6)})
    pages, table = harness.cache._state.pages, harness.cache._state.tables[0].pages.tolist()
    assert not any(pages.is_drafted(page, "head") for page in table)
    harness.verify()


def test_the_feature_before_the_boundary_is_kept_until_it_is_used() -> None:
    harness = Harness()
    harness.add(0, PROMPT)
    harness.draft(0)
    harness.add(1, PROMPT)
    with harness.cache.begin({0: 0, 1: 1}) as txn:
        kept = txn.boundary_feature(1)
        assert kept is not None and torch.equal(kept, feature(PROMPT[:12]))
        assert txn.boundary_feature(0) is None
        txn.fill_draft(1, 13)
        assert txn.boundary_feature(1) is None
    harness.verify()


def test_features_of_all_pages_of_a_chunk_are_kept() -> None:
    harness = Harness()
    harness.add(0, PROMPT)
    harness.step({0: Work(2)})
    harness.step({0: Work(10, drafted=3)})
    for hit in (4, 8, 12):
        harness.add(hit, [*PROMPT[:hit], 1])
        harness.verify()


def test_another_drafter_does_not_see_the_entries_of_the_first() -> None:
    harness = Harness()
    harness.add(0, PROMPT)
    harness.draft(0)
    with pytest.raises(AlulaError, match="release"):
        harness.cache.use_drafter("other")
    harness.release(0)
    harness.cache.use_drafter("other")
    assert harness.add(1, PROMPT) == 12 and harness.cache.draft_first(1) == 12
    harness.verify()
    harness.release(1)
    harness.cache.use_drafter("head")
    harness.add(2, PROMPT)
    assert harness.cache.draft_first(2) == 1
    harness.verify()


def test_a_page_used_again_starts_blank() -> None:
    """What was known of a page's former contents must not pass for the new."""
    harness = Harness(pages=3)
    harness.add(0, PROMPT)
    harness.step({0: Work(12, drafted=12)})
    pages = harness.cache._state.pages
    assert all(pages.is_drafted(page, "head") and pages.has_feature[page] for page in range(3))
    harness.release(0)
    harness.add(1, [7] * 13)
    with harness.cache.begin({1: 12}):
        assert pages.written == pages.drafted == [0, 0, 0] and not any(pages.has_feature)
    harness.step({1: Work(12, features=False)})
    assert harness.cache.peek([7] * 13) == 0
    harness.release(1)
    harness.add(2, [8] * 13)
    harness.prefill(2)
    harness.add(3, [8] * 13)
    assert harness.cache.draft_first(3) == harness.cache.length(3) == 12
