"""Dynamic and static trees as pure bookkeeping, against a plain statement of EAGLE-2's rule."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alula.config import AlulaError
from alula.draft.expand import DynamicGrowth, Growth, KernelGrowth, StaticGrowth
from alula.draft.policy import TreePolicy
from alula.draft.static import StaticTree, default_static_tree
from alula.kernels.select import load_kernels
from alula.tree import DraftTree, FloatArray, IntArray, TreeShape
from tests.draft.kernel_sets import kernel_sets

Logs = Callable[[int, tuple[int, ...]], FloatArray]
"""Log scores of a node's children in trial order, by lane and token path."""

floors = st.sampled_from([0.0, 0.05, math.exp(-1.0), math.exp(-0.5), 0.7])
"""None, some between the scores that paths of `grids` have, and some exactly at them."""
shapes = st.builds(TreeShape, nodes=st.integers(1, 24), depth=st.integers(0, 5), branch=st.integers(1, 4), floor=floors)
grids = st.lists(st.sampled_from([0.0, -0.25, -0.5, -1.0, -2.0, -np.inf]), min_size=4, max_size=4)


def run(growth: Growth, logs: Logs) -> list[DraftTree]:
    """Grows to the end; the token of a child is its rank."""
    paths: list[tuple[int, ...]] = []
    while len(frontier := growth.frontier):
        origins = frontier.origin_F.tolist()
        paths = [
            (*paths[origin], token) if origin >= 0 else ()
            for origin, token in zip(origins, frontier.tokens_F.tolist(), strict=True)
        ]
        width = frontier.children
        rows = [logs(lane, path)[:width] for lane, path in zip(frontier.lane_F.tolist(), paths, strict=True)]
        tokens: IntArray = np.broadcast_to(np.arange(width), (len(paths), width))
        growth.grow(tokens, np.array(rows, np.float32))
    return growth.trees()


def grown_by(kernels: str, roots_B: IntArray, limits: list[TreeShape]) -> Growth:
    """A dynamic growth: `torch` keeps its candidates in lists, `native` in native code."""
    return TreePolicy().growth(roots_B, limits, load_kernels(kernels))


by_each_set = pytest.mark.parametrize("kernels", kernel_sets())


def brute(shape: TreeShape, logs: Logs, lane: int) -> dict[tuple[int, ...], float]:
    """Every candidate of EAGLE-2 without pruning, then the best of all by (score, depth, order of creation).

    Scores are whole quarters, so the probability of a path is told from another's with room to spare.
    """
    scores: dict[tuple[int, ...], float] = {}
    frontier: list[tuple[int, ...]] = [()] if shape.nodes > 1 else []
    for _ in range(shape.depth):
        level = {
            (*path, rank): scores.get(path, 0.0) + float(log)
            for path in frontier
            for rank, log in enumerate(logs(lane, path)[: shape.branch])
            if np.isfinite(log) and math.exp(scores.get(path, 0.0) + float(log)) > shape.floor - 1e-6
        }
        scores |= level
        frontier = sorted(level, key=lambda path: -level[path])[: shape.branch]
    kept = sorted(scores, key=lambda path: -scores[path])[: shape.nodes - 1]
    return {path: scores[path] for path in kept}


def table(values: list[list[float]]) -> Logs:
    """Children's scores in descending order, picked from a few rows by the path, so that ties abound."""

    def logs(lane: int, path: tuple[int, ...]) -> FloatArray:
        row = values[(lane * 7 + sum((token + 1) * 3**d for d, token in enumerate(path))) % len(values)]
        return np.array(sorted(row, reverse=True), np.float32)

    return logs


def as_paths(tree: DraftTree) -> dict[tuple[int, ...], float]:
    return {
        tuple(int(tree.tokens_N[n]) for n in tree.path(node)): float(tree.scores_N[node])
        for node in range(1, len(tree))
    }


@by_each_set
@settings(max_examples=150, deadline=None)
@given(limits=st.lists(shapes, min_size=1, max_size=3), values=st.lists(grids, min_size=1, max_size=6))
def test_dynamic_trees_are_the_best_of_all_candidates(
    kernels: str, limits: list[TreeShape], values: list[list[float]]
) -> None:
    logs = table(values)
    trees = run(grown_by(kernels, np.arange(len(limits)), limits), logs)
    for lane, (tree, shape) in enumerate(zip(trees, limits, strict=True)):
        assert as_paths(tree) == brute(shape, logs, lane)
        check_tree(tree, shape)


@settings(max_examples=80, deadline=None)
@given(st.lists(shapes, min_size=1, max_size=3), st.lists(grids, min_size=1, max_size=6))
def test_static_trees_keep_the_limits(limits: list[TreeShape], values: list[list[float]]) -> None:
    tree = default_static_tree()
    for grown, shape in zip(
        run(StaticGrowth(np.arange(len(limits)), limits, tree), table(values)), limits, strict=True
    ):
        check_tree(grown, shape)
        assert set(as_paths(grown)) <= set(tree.within(shape))


def check_tree(tree: DraftTree, shape: TreeShape) -> None:
    """Within its limits, parents first, siblings in trial order, scores never above the parent's."""
    assert len(tree) <= shape.nodes
    assert tree.depths_N.max() <= shape.depth
    assert all(len(children) <= shape.branch for children in tree.children)
    assert tree.parents_N[0] == -1
    assert (tree.parents_N[1:] < np.arange(1, len(tree))).all()
    assert (tree.scores_N[1:] <= tree.scores_N[tree.parents_N[1:]]).all()
    for children in tree.children:
        assert [int(tree.tokens_N[child]) for child in children] == list(range(len(children)))


@settings(max_examples=150, deadline=None)
@given(limits=st.lists(shapes, min_size=1, max_size=4), seed=st.integers(0, 2**32), tied=st.booleans())
def test_native_candidates_are_those_in_lists(limits: list[TreeShape], seed: int, tied: bool) -> None:
    """Tokens, parents, order and scores bit for bit, with ties, NaN and logs above 0 too; and every frontier."""
    if "native" not in kernel_sets():
        pytest.skip("the native kernels were not built")
    rng, roots = np.random.default_rng(seed), np.arange(len(limits)) + 100
    lists, native = DynamicGrowth(roots, limits), grown_by("native", roots, limits)
    assert isinstance(native, KernelGrowth)
    while len(expected := lists.frontier):
        for name in ("lane_F", "origin_F", "tokens_F", "children"):
            np.testing.assert_array_equal(getattr(native.frontier, name), getattr(expected, name))
        logs = -np.sort(rng.exponential(size=(len(expected), expected.children)).astype(np.float32))
        logs = np.round(logs * 4) / 4 + np.float32(0.25) if tied else logs
        logs[rng.random(logs.shape) < 0.05] = rng.choice([np.nan, -np.inf])
        tokens = rng.integers(0, 9, logs.shape)
        lists.grow(tokens, logs)
        native.grow(tokens, logs)
    assert len(native.frontier) == 0
    for left, right in zip(lists.trees(), native.trees(), strict=True):
        np.testing.assert_array_equal(left.tokens_N, right.tokens_N)
        np.testing.assert_array_equal(left.parents_N, right.parents_N)
        np.testing.assert_array_equal(left.scores_N, right.scores_N)


@by_each_set
def test_ties_go_to_the_smaller_depth_then_the_lower_index(kernels: str) -> None:
    def logs(lane: int, path: tuple[int, ...]) -> FloatArray:
        return np.zeros(3, np.float32)

    (tree,) = run(grown_by(kernels, np.array([5]), [TreeShape(nodes=6, depth=4, branch=3)]), logs)
    assert set(as_paths(tree)) == {(0,), (1,), (2,), (0, 0), (0, 1)}


@by_each_set
def test_a_level_is_not_expanded_once_it_cannot_be_kept(kernels: str) -> None:
    """Pruning saves forwards: with 3 sure children and room for 3, nothing below them is worth a pass."""
    growth = grown_by(kernels, np.array([0]), [TreeShape(nodes=4, depth=5, branch=3)])
    growth.grow(np.arange(3)[None], np.zeros((1, 3), np.float32))
    assert len(growth.frontier) == 3
    growth.grow(np.tile(np.arange(3), (3, 1)), np.full((3, 3), -1.0, np.float32))
    assert len(growth.frontier) == 0


def test_children_must_be_those_of_the_frontier() -> None:
    if "native" not in kernel_sets():
        pytest.skip("the native kernels were not built")
    growth = grown_by("native", np.array([0]), [TreeShape(nodes=4, depth=2, branch=3)])
    with pytest.raises(ValueError, match="one each"):
        growth.grow(np.zeros((2, 3), np.int64), np.zeros((2, 3), np.float32))
    with pytest.raises(ValueError, match="one log per token"):
        growth.grow(np.zeros((1, 3), np.int64), np.zeros((1, 2), np.float32))


@by_each_set
def test_nan_scores_are_dropped(kernels: str) -> None:
    growth = grown_by(kernels, np.array([0]), [TreeShape(nodes=4, depth=1, branch=3)])
    growth.grow(np.arange(3)[None], np.array([[-1.0, np.nan, -np.inf]], np.float32))
    assert len(growth.trees()[0]) == 2


FLOOR = math.exp(-1.0)


def level(*logs: float) -> FloatArray:
    return np.array([logs], np.float32)


@by_each_set
def test_a_path_at_the_floor_is_kept_and_one_below_it_is_not(kernels: str) -> None:
    below = np.nextafter(np.float32(-1.0), np.float32(-2.0))
    for logs, kept in (((-0.9, -1.0, below), 2), ((-1.0, np.nan, -1.0), 1), ((below, below, below), 0)):
        growth = grown_by(kernels, np.array([0]), [TreeShape(nodes=9, depth=3, branch=3, floor=FLOOR)])
        growth.grow(np.arange(3)[None], level(*logs))
        assert len(growth.trees()[0]) == 1 + kept and len(growth.frontier) == kept


@by_each_set
@pytest.mark.parametrize("probability", [0.5, 0.25, 0.1, 0.3, 0.9, 1e-30])
def test_a_token_of_just_the_floors_probability_is_kept(kernels: str, probability: float) -> None:
    """Scores have been rounded to fp32, some of them downwards."""
    growth = grown_by(kernels, np.array([0]), [TreeShape(nodes=9, depth=1, branch=3, floor=probability)])
    growth.grow(np.arange(1)[None], level(math.log(probability)))
    assert len(growth.trees()[0]) == 2


@by_each_set
def test_the_floor_is_of_the_whole_path(kernels: str) -> None:
    """Each token of the chain is likely enough for itself."""
    growth = grown_by(kernels, np.array([0]), [TreeShape(nodes=9, depth=5, branch=3, floor=FLOOR)])
    for left in (1, 1, 0):
        growth.grow(np.arange(1)[None], level(-0.45))
        assert len(growth.frontier) == left
    assert growth.trees()[0].depths_N.tolist() == [0, 1, 2]


@by_each_set
def test_a_lane_below_its_floor_takes_no_rows_of_deeper_levels(kernels: str) -> None:
    free = TreeShape(nodes=9, depth=3, branch=2)
    limits = [replace(free, branch=4, floor=FLOOR), free, replace(free, floor=0.9), free]
    growth = grown_by(kernels, np.arange(4), limits)
    growth.grow(np.tile(np.arange(4), (4, 1)), np.tile(level(-1.1, -1.2, -1.3, -1.4), (4, 1)))
    assert growth.frontier.lane_F.tolist() == [1, 1, 3, 3]
    assert growth.frontier.children == 2, "a lane that is done asks for no children either"
    assert [len(tree) for tree in growth.trees()] == [1, 3, 1, 3]


def test_static_trees_have_no_floor() -> None:
    """A drawn sibling must never be dropped for its own value."""
    tree, logs = default_static_tree(), table([[-0.5, -0.5, -1.0, -2.0]])
    (grown,) = run(TreePolicy(tree=tree).growth(np.array([0]), [replace(tree.shape, floor=0.9)]), logs)
    assert set(as_paths(grown)) == set(tree.paths)


def test_native_limits_are_one_per_root() -> None:
    if "native" not in kernel_sets():
        pytest.skip("the native kernels were not built")
    candidates = load_kernels("native").candidates
    with pytest.raises(ValueError, match="floors have shape"):
        candidates(np.zeros(2, np.int64), np.ones((2, 3), np.int64), np.zeros(1))


@pytest.mark.parametrize("floor", [-0.1, 1, 1.0, math.nan, math.inf, True, "0.1", None])
def test_a_floor_is_a_probability_below_one(floor: object) -> None:
    with pytest.raises(AlulaError, match=r"^floor is .*: give a number of at least 0 and below 1$"):
        TreeShape(floor=floor)  # type: ignore[arg-type]


def test_reports_of_shapes_without_a_floor_are_as_before_there_was_one() -> None:
    assert TreeShape(4, 2, 3).report() == {"nodes": 4, "depth": 2, "branch": 3}
    assert TreeShape(4, 2, 3, 0.25).report() == {"nodes": 4, "depth": 2, "branch": 3, "floor": 0.25}


def test_published_static_tree() -> None:
    tree = default_static_tree()
    assert tree.shape == TreeShape(nodes=26, depth=5, branch=4)
    assert [sum(len(path) == depth for path in tree.paths) for depth in range(1, 6)] == [4, 8, 8, 3, 2]
    (grown,) = run(StaticGrowth(np.array([0]), [tree.shape], tree), table([[-0.5, -0.5, -1.0, -2.0]]))
    assert set(as_paths(grown)) == set(tree.paths)


def test_chain_and_cutting() -> None:
    chain = StaticTree.chain(4)
    assert chain.within(TreeShape(nodes=3, depth=8, branch=1)) == ((0,), (0, 0))
    assert chain.within(TreeShape(nodes=9, depth=1, branch=1)) == ((0,),)
    assert default_static_tree().within(TreeShape(nodes=9, depth=1, branch=2)) == ((0,), (1,))


@pytest.mark.parametrize("paths", [[], [(0,), (0,)], [(0, 0)], [(1,)], [(0,), (0, 1)], [(-1,)]])
def test_broken_static_trees_are_refused(paths: list[tuple[int, ...]]) -> None:
    with pytest.raises(AlulaError, match="static tree"):
        StaticTree.of(paths)


def test_static_trees_load_from_json(tmp_path: Path) -> None:
    (tmp_path / "tree.json").write_text("[[0], [0, 0], [1]]")
    assert StaticTree.load(tmp_path / "tree.json").paths == ((0,), (1,), (0, 0))
    for text in ("{}", "[[]]", "[0]", "[[0.5]]", "nonsense"):
        (tmp_path / "tree.json").write_text(text)
        with pytest.raises(AlulaError, match="rank paths"):
            StaticTree.load(tmp_path / "tree.json")


@pytest.mark.parametrize(
    ("settings_", "words"),
    [
        ({"rule": "other"}, "rule"),
        ({"rule": "coupled", "tree": StaticTree.chain(2), "sampled": True}, "rejection"),
        ({"rule": "rejection", "sampled": True}, "static tree"),
    ],
)
def test_illegal_policies_are_refused(settings_: dict[str, object], words: str) -> None:
    with pytest.raises(AlulaError, match=words):
        TreePolicy(**settings_)  # type: ignore[arg-type]


@settings(max_examples=80, deadline=None)
@given(shapes, st.sampled_from([None, default_static_tree()]), st.lists(grids, min_size=1, max_size=6))
def test_scratch_bounds_what_is_expanded(shape: TreeShape, tree: StaticTree | None, values: list[list[float]]) -> None:
    policy = TreePolicy(tree=tree)
    growth = policy.growth(np.array([0]), [shape])
    expanded, logs = 0, table(values)
    while len(frontier := growth.frontier):
        expanded += len(frontier)
        rows = [logs(0, (row,))[: frontier.children] for row in range(len(frontier))]
        growth.grow(np.tile(np.arange(frontier.children), (len(rows), 1)), np.array(rows, np.float32))
    assert max(expanded - 1, 0) <= policy.scratch(shape)
