"""Faults that users of other engines reported, as far as the cache can cause them."""

from __future__ import annotations

import torch

from alula.cache import OutOfPages
from tests.cache.harness import Harness, Work

SHARED = [token % 7 for token in range(670)]


def test_e2_prefix_hits_see_drafter_rows_that_were_written() -> None:
    """A cold, then others after the same long prefix: whatever the drafter may see was filled for these tokens."""
    harness = Harness(pages=400)
    for layer in harness.cache.drafter_layers:
        assert not torch.isnan(layer.keys).any() and not torch.isnan(layer.values).any()
        layer.keys.fill_(torch.nan)
        layer.values.fill_(torch.nan)
    harness.add(0, [*SHARED, 1])
    harness.step({0: Work(300)})
    harness.step({0: Work(370, (), drafted=301)})
    for seq_id, suffix in enumerate(([8, 8, 8], [9, 9], [8, 8, 8]), start=1):
        assert harness.add(seq_id, [*SHARED, *suffix]) == 668
        assert harness.cache.draft_first(seq_id) == 668
        harness.verify()
    harness.step({0: Work(0, (), drafted=672), 1: Work(0)})
    for seq_id in (1, 2, 3):
        assert harness.cache.draft_first(seq_id) == 1
        harness.draft(seq_id)
    harness.verify()


def test_e6_reserving_evicts_no_more_than_it_needs() -> None:
    """Many turns through a pool that is nearly full: each evicts exactly what the free list lacks, and the
    conversation's own prefix is always found."""
    harness = Harness(pages=30)
    tree = ((0, 1), (0, 2), (1, 3), (1, 4), (2, 5), (3, 6), (3, 7))
    harness.add(99, [6] * 41)
    harness.draft(99)
    harness.release(99)
    tokens = [1, 2, 3]
    for turn in range(8):
        hit = harness.add(turn, tokens)
        committed = max(len(tokens) - 3, 0)
        assert hit >= committed // 4 * 4 - 4
        harness.draft(turn)
        for _ in range(2):
            before, free = harness.cache.cached_pages, harness.cache._state.pages.free
            work = Work(0, tree, accepted=7, bonus=4, drafted=len(harness.models[turn].tokens))
            needed = harness.cache.pages_needed({turn: work.need})
            harness.step({turn: work})
            assert before - harness.cache.cached_pages == max(0, needed - free)
        tokens = [*harness.models[turn].tokens, 5, 5]
        harness.release(turn)
        harness.verify()


def test_e8_a_tiny_pool_refuses_before_the_step_and_goes_on_after_a_preemption() -> None:
    harness = Harness(pages=6)
    works = {}
    for seq_id in (0, 1):
        harness.add(seq_id, [seq_id] * 9)
        harness.prefill(seq_id)
        works[seq_id] = Work(0, ((0, 1), (0, 2), (1, 3), (1, 4)), accepted=3)
    harness.step({0: works[0]})
    for _ in range(3):
        needs = {seq_id: work.need for seq_id, work in works.items()}
        assert not harness.cache.can_begin(needs)
        try:
            harness.cache.begin(needs)
        except OutOfPages:
            harness.verify()
        else:
            raise AssertionError("reserved more pages than there are")
    tokens = harness.models[1].tokens
    harness.release(1)
    harness.step({0: works[0]})
    harness.release(0)
    harness.add(1, tokens)
    harness.draft(1)
    harness.step({1: works[1]})
    harness.verify()


def test_e12_true_features_overwrite_guesses_of_accepted_nodes() -> None:
    """Rows the drafter wrote while guessing never count: only what it filled from true features does, and that is
    what a fresh drafter prefill would hold."""
    harness = Harness()
    harness.add(0, [1, 2, 3])
    harness.prefill(0)
    nodes = ((0, 5), (0, 6), (2, 7), (3, 8))
    for _ in range(4):
        root = len(harness.models[0].tokens) - 1
        harness.step({0: Work(0, nodes, accepted=4, bonus=2, drafted=root + 1)})
        assert harness.cache.draft_length(0) == root + 1 == harness.cache.length(0) - 3
        harness.verify()
    harness.draft(0)
    fresh = Harness()
    fresh.add(0, harness.models[0].tokens[:-1])
    fresh.draft(0)
    ours, theirs = harness.slots(0)[1:], fresh.slots(0)[1:]
    for (keys, values), (fresh_keys, fresh_values) in zip(harness.drafter, fresh.drafter, strict=True):
        assert (keys[ours] == fresh_keys[theirs]).all() and (values[ours] == fresh_values[theirs]).all()


def test_e14_trees_of_a_batch_commit_like_chains() -> None:
    """Four sequences with bushy trees, all accepted paths of another length and place, over many steps: target rows
    equal those of a run that accepts one token at a time."""
    bushy = tuple((parent, 1 + child) for parent in (0, 0, 1, 1, 2, 2, 5, 6) for child in range(1))
    for size in (1, 2, 3, 4):
        harness = Harness(pages=200)
        for seq_id in range(size):
            harness.add(seq_id, [seq_id, 1])
            harness.prefill(seq_id)
        for step in range(20):
            works = {
                seq_id: Work(0, bushy, accepted=(3 * step + 2 * seq_id) % (len(bushy) + 1), bonus=step % 5)
                for seq_id in range(size)
            }
            harness.step(works)
        harness.verify()
        chain = Harness(pages=200)
        for seq_id in range(size):
            tokens = harness.models[seq_id].tokens
            chain.add(seq_id, tokens[:2])
            chain.prefill(seq_id)
            for token in tokens[2:]:
                chain.step({seq_id: Work(0, (), bonus=token)})
            ours, theirs = harness.slots(seq_id), chain.slots(seq_id)
            for (keys, values), (chain_keys, chain_values) in zip(harness.target, chain.target, strict=True):
                assert (keys[ours] == chain_keys[theirs]).all() and (values[ours] == chain_values[theirs]).all()


def test_e16_positions_past_sixteen_bits_disturb_nobody() -> None:
    """One sequence crosses 2**15; a short one beside it, and one after it, hold their own rows."""
    harness = Harness(pages=10_100)
    harness.add(0, [1, 2, 3, 4, 5, 6, 7])
    harness.draft(0)
    long = [token % 11 for token in range(2**15 + 40)]
    harness.cache.add(1, long)
    with harness.cache.begin({1: len(long)}) as txn:
        txn.commit(1, long, len(long) - 1, [], None)
    harness.step({0: Work(0, ((0, 1), (0, 2), (2, 3)), accepted=3)})
    harness.cache.release(1)
    harness.add(2, [1, 2, 3, 4, 5, 6, 7])
    harness.draft(2)
    harness.verify()
