"""Prompt lookup."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alula.config import AlulaError
from alula.draft.drafter import NoDrafter
from alula.draft.ngram import NgramDrafter
from alula.tree import ROOT_ONLY, DraftTree, TreeShape
from tests.draft.harness import Bench, paths


def lookup(tokens: list[int], shape: TreeShape, drafter: NgramDrafter | None = None) -> DraftTree:
    bench = Bench(drafter or NgramDrafter())
    bench.add(tokens)
    bench.prefill({0: None})
    return bench.draft({0: shape})[0]


def test_the_longest_match_comes_first() -> None:
    tokens = [1, 2, 3, 4, 50, 51, 9, 3, 4, 60, 61, 9, 1, 2, 3, 4]
    tree = lookup(tokens, TreeShape(nodes=5, depth=2, branch=2))
    assert [int(tree.tokens_N[node]) for node in tree.children[0]] == [50, 60]
    assert paths(tree) == {(50,), (50, 51), (60,), (60, 61)}


def test_the_most_recent_of_equal_matches_comes_first() -> None:
    tree = lookup([7, 1, 7, 2, 7, 3, 7], TreeShape(nodes=3, depth=1, branch=2))
    assert [int(tree.tokens_N[node]) for node in tree.children[0]] == [3, 2]


def test_continuations_share_their_beginning() -> None:
    tree = lookup([5, 1, 2, 8, 5, 1, 3, 8, 5], TreeShape(nodes=8, depth=2, branch=3))
    assert paths(tree) == {(1,), (1, 3), (1, 2)}


def test_nothing_repeated_is_nothing_drafted() -> None:
    assert len(lookup([1, 2, 3, 4], TreeShape(8, 3, 2))) == 1
    assert len(lookup([1], TreeShape(8, 3, 2))) == 1


def test_the_index_follows_what_is_committed() -> None:
    bench = Bench(NgramDrafter())
    bench.add([1, 2, 3])
    bench.prefill({0: None})
    shape = TreeShape(4, 2, 1)
    assert len(bench.draft({0: shape})[0]) == 1
    for token in (9, 1):
        bench.step({0: shape}, {0: ([], token)}, None)
    assert paths(bench.draft({0: shape})[0]) == {(2,), (2, 3)}


def test_another_sequence_under_the_same_id_gets_its_own_index() -> None:
    drafter = NgramDrafter()
    assert paths(lookup([1, 2, 1], TreeShape(2, 1, 1), drafter)) == {(2,)}
    assert paths(lookup([1, 3, 1], TreeShape(2, 1, 1), drafter)) == {(3,)}


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.builds(TreeShape, nodes=st.integers(1, 12), depth=st.integers(0, 4), branch=st.integers(1, 3)),
)
def test_trees_keep_their_limits_and_only_repeat(tokens: list[int], shape: TreeShape) -> None:
    tree = lookup(tokens, shape)
    assert len(tree) <= shape.nodes and tree.depths_N.max() <= shape.depth
    assert all(len(nodes) <= shape.branch for nodes in tree.children)
    assert (tree.scores_N[1:] <= tree.scores_N[tree.parents_N[1:]]).all()
    text = ",".join(map(str, tokens))
    for path in paths(tree):
        assert ",".join(map(str, (tokens[-1], *path))) in text
    for nodes in tree.children:
        assert len({int(tree.tokens_N[node]) for node in nodes}) == len(nodes)


def test_no_drafter_keeps_to_the_root() -> None:
    bench = Bench(NoDrafter())
    bench.add([4, 5, 4])
    bench.prefill({0: None})
    assert bench.draft({0: TreeShape(8, 3, 2)})[0].tokens_N.tolist() == [4]
    assert NgramDrafter().scratch(ROOT_ONLY) == NoDrafter().scratch(TreeShape()) == 0


def test_wrong_lengths_are_refused() -> None:
    with pytest.raises(AlulaError, match="shortest"):
        NgramDrafter(longest=2, shortest=3)
