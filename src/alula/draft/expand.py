"""Growing the draft trees of several sequences level by level.

A growth holds the candidates; the drafter asks for its frontier, runs the model over those rows of all sequences at
once, and hands the best children back. Suffixes: B sequences (lanes), F frontier rows of all lanes, K children per
row, C candidates of a lane (column 0 is the root).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from alula.draft.static import RankPath, StaticTree
from alula.tree import DraftTree, FloatArray, IntArray, TreeShape


@dataclass(frozen=True)
class Frontier:
    """Rows to be expanded next, grouped by lane in ascending order.

    lane_F: the sequence of each row. origin_F: the row of the previous frontier that is its parent (of the roots: -1).
    tokens_F: the token of each row. children: how many children a row may get at most.
    """

    lane_F: IntArray
    origin_F: IntArray
    tokens_F: IntArray
    children: int

    def __len__(self) -> int:
        return len(self.lane_F)


class Growth(Protocol):
    @property
    def frontier(self) -> Frontier: ...

    def grow(self, tokens_FK: IntArray, logs_FK: FloatArray) -> None:
        """Children of each frontier row in trial order and their log scores; -inf marks one that is missing."""

    def trees(self) -> list[DraftTree]: ...


class DynamicGrowth:
    """EAGLE-2 (arXiv 2406.16858, section 4): the best `branch` candidates of a level are expanded, and in the end the
    best nodes - 1 of all candidates are kept.

    Candidates lie in the order (depth, parent's rank, rank), and a child never scores above its parent, so a stable
    sort by score puts parents first: the kept set is ancestor-closed. A candidate that is not among the best nodes - 1
    so far can never come back, nor can its descendants, so it is not expanded; that changes no tree.
    """

    def __init__(self, roots_B: IntArray, shapes: Sequence[TreeShape]) -> None:
        lanes = len(roots_B)
        self._keep_B = np.array([shape.nodes - 1 for shape in shapes], np.int64)
        self._depth_B = np.array([shape.depth for shape in shapes], np.int64)
        self._branch_B = np.array([shape.branch for shape in shapes], np.int64)
        self._tokens_BC = np.asarray(roots_B, np.int64)[:, None]
        self._parents_BC = np.full((lanes, 1), -1, np.int64)
        self._scores_BC = np.zeros((lanes, 1), np.float32)
        self._depth = 0
        self._node_F = np.zeros(0, np.int64)
        every = np.arange(lanes)
        growing = every[(self._keep_B > 0) & (self._depth_B > 0)]
        self._set_frontier(growing, np.zeros(len(growing), np.int64), np.full(len(growing), -1))

    @property
    def frontier(self) -> Frontier:
        return self._frontier

    def grow(self, tokens_FK: IntArray, logs_FK: FloatArray) -> None:
        lane_F, width, first = self._frontier.lane_F, tokens_FK.shape[1], self._scores_BC.shape[1]
        starts = np.searchsorted(lane_F, lane_F)
        rank_F = np.arange(len(lane_F)) - starts
        logs_FK = np.where(np.arange(width) < self._branch_B[lane_F, None], np.minimum(logs_FK, 0), -np.inf)
        scores_FK = self._scores_BC[lane_F, self._node_F][:, None] + logs_FK
        lanes, block = len(self._keep_B), (int(rank_F.max()) + 1) * width
        columns_FK = rank_F[:, None] * width + np.arange(width)
        tokens, parents = np.zeros((2, lanes, block), np.int64)
        rows = np.zeros((lanes, block), np.int64)
        scores = np.full((lanes, block), -np.inf, np.float32)
        at = (lane_F[:, None], columns_FK)
        tokens[at], scores[at] = tokens_FK, scores_FK
        parents[at], rows[at] = self._node_F[:, None], np.arange(len(lane_F))[:, None]
        self._tokens_BC = np.concatenate([self._tokens_BC, tokens], 1)
        self._parents_BC = np.concatenate([self._parents_BC, parents], 1)
        self._scores_BC = np.concatenate([self._scores_BC, scores], 1)
        self._depth += 1
        self._choose_frontier(first, rows)

    def trees(self) -> list[DraftTree]:
        order_BC, kept_BC = self._best()
        return [self._tree(lane, order_BC[lane][kept_BC[lane]]) for lane in range(len(self._keep_B))]

    def _best(self) -> tuple[IntArray, np.ndarray]:
        """Candidates best first, and which of them are kept."""
        order_BC = np.argsort(-self._scores_BC[:, 1:], axis=1, kind="stable") + 1
        finite_BC = np.isfinite(np.take_along_axis(self._scores_BC, order_BC, 1))
        return order_BC, finite_BC & (np.arange(order_BC.shape[1]) < self._keep_B[:, None])

    def _choose_frontier(self, first: int, rows_BC: IntArray) -> None:
        """The best `branch` kept candidates of the level just added, whose columns start at `first`."""
        order_BC, kept_BC = self._best()
        fresh_BC = kept_BC & (order_BC >= first) & (self._depth < self._depth_B)[:, None]
        fresh_BC &= np.cumsum(fresh_BC, 1) <= self._branch_B[:, None]
        lane_F, place_F = np.nonzero(fresh_BC)
        node_F = order_BC[lane_F, place_F]
        self._set_frontier(lane_F, node_F, rows_BC[lane_F, node_F - first])

    def _set_frontier(self, lane_F: IntArray, node_F: IntArray, origin_F: IntArray) -> None:
        self._node_F = node_F
        children = int(self._branch_B[lane_F].max()) if len(lane_F) else 0
        self._frontier = Frontier(lane_F, origin_F, self._tokens_BC[lane_F, node_F], children)

    def _tree(self, lane: int, kept: IntArray) -> DraftTree:
        nodes = np.concatenate([[0], np.sort(kept)])
        parents = np.searchsorted(nodes, self._parents_BC[lane, nodes])
        parents[0] = -1
        return DraftTree(self._tokens_BC[lane, nodes], parents, self._scores_BC[lane, nodes])


class StaticGrowth:
    """A fixed set of rank paths; which nodes exist depends on the limits and on how many children the proposal has
    to give, never on which tokens were drawn (siblings drawn at random must not be dropped afterwards)."""

    def __init__(self, roots_B: IntArray, shapes: Sequence[TreeShape], tree: StaticTree) -> None:
        self._children = [_children(tree.within(shape)) for shape in shapes]
        self._nodes: list[dict[RankPath, int]] = [{(): 0} for _ in shapes]
        self._tokens = [[int(root)] for root in roots_B]
        self._parents = [[-1] for _ in shapes]
        self._scores = [[0.0] for _ in shapes]
        self._rows: list[tuple[int, RankPath]] = []
        self._set_frontier([(lane, (), -1) for lane in range(len(shapes))])

    @property
    def frontier(self) -> Frontier:
        return self._frontier

    @property
    def nodes_F(self) -> list[int]:
        """Tree node of each frontier row."""
        return [self._nodes[lane][path] for lane, path in self._rows]

    def grow(self, tokens_FK: IntArray, logs_FK: FloatArray) -> None:
        found = []
        for row, (lane, path) in enumerate(self._rows):
            for rank in range(self._children[lane][path]):
                if not (rank < logs_FK.shape[1] and np.isfinite(logs_FK[row, rank])):
                    break
                self._add(lane, (*path, rank), int(tokens_FK[row, rank]), min(float(logs_FK[row, rank]), 0.0))
                found.append((lane, (*path, rank), row))
        self._set_frontier(found)

    def trees(self) -> list[DraftTree]:
        columns = zip(self._tokens, self._parents, self._scores, strict=True)
        return [DraftTree(np.array(t), np.array(p), np.array(s, np.float32)) for t, p, s in columns]

    def _add(self, lane: int, path: RankPath, token: int, log: float) -> None:
        parent = self._nodes[lane][path[:-1]]
        self._nodes[lane][path] = len(self._tokens[lane])
        self._tokens[lane].append(token)
        self._parents[lane].append(parent)
        self._scores[lane].append(self._scores[lane][parent] + log)

    def _set_frontier(self, found: list[tuple[int, RankPath, int]]) -> None:
        found = [(lane, path, row) for lane, path, row in found if path in self._children[lane]]
        self._rows = [(lane, path) for lane, path, _ in found]
        tokens = [self._tokens[lane][self._nodes[lane][path]] for lane, path in self._rows]
        self._frontier = Frontier(
            lane_F=np.array([lane for lane, _, _ in found], np.int64),
            origin_F=np.array([row for _, _, row in found], np.int64),
            tokens_F=np.array(tokens, np.int64),
            children=max((self._children[lane][path] for lane, path in self._rows), default=0),
        )


def _children(paths: tuple[RankPath, ...]) -> dict[RankPath, int]:
    """Number of children of every inner node."""
    counts: dict[RankPath, int] = {}
    for path in paths:
        counts[path[:-1]] = counts.get(path[:-1], 0) + 1
    return counts
