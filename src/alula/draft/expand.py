"""Growing the draft trees of several sequences level by level.

A growth holds the candidates; the drafter asks for its frontier, runs the model over those rows of all sequences at
once, and hands the best children back. Suffixes: B sequences (lanes), F frontier rows of all lanes, K children per row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from alula.draft.static import RankPath, StaticTree
from alula.kernels.protocol import Candidates
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
        """Children of each frontier row, best first, and their log scores; -inf marks one that is missing."""

    def trees(self) -> list[DraftTree]: ...


class DynamicGrowth:
    """EAGLE-2 (arXiv 2406.16858, section 4): the best `branch` candidates of a level are expanded, and in the end the
    best nodes - 1 of all candidates are kept. The candidates are in plain lists: a few dozen are too few for arrays.

    A path below the shape's floor is no candidate; a tree with none left at a level has no row in later frontiers.
    """

    def __init__(self, roots_B: IntArray, shapes: Sequence[TreeShape]) -> None:
        self._lanes = [_Candidates(int(root), shape) for root, shape in zip(roots_B, shapes, strict=True)]
        self._set_frontier()

    @property
    def frontier(self) -> Frontier:
        return self._frontier

    def grow(self, tokens_FK: IntArray, logs_FK: FloatArray) -> None:
        tokens, logs, start = tokens_FK.tolist(), logs_FK.tolist(), 0
        for lane in self._lanes:
            stop = start + len(lane.frontier)
            if stop > start:
                lane.grow(start, tokens[start:stop], logs[start:stop])
            start = stop
        self._set_frontier()

    def trees(self) -> list[DraftTree]:
        return [lane.tree() for lane in self._lanes]

    def _set_frontier(self) -> None:
        lanes = [(number, lane) for number, lane in enumerate(self._lanes) if lane.frontier]
        self._frontier = Frontier(
            lane_F=np.array([number for number, lane in lanes for _ in lane.frontier], np.int64),
            origin_F=np.array([lane.rows[node] for _, lane in lanes for node in lane.frontier], np.int64),
            tokens_F=np.array([lane.tokens[node] for _, lane in lanes for node in lane.frontier], np.int64),
            children=max((lane.shape.branch for _, lane in lanes), default=0),
        )


class _Candidates:
    """The candidates of one tree, numbered as they come: (depth, parent's rank, rank). Number 0 is the root.

    A child never scores above its parent and is numbered after it, so sorting by (score descending, number) puts
    parents first: the kept set is ancestor-closed. A candidate that is not among the best nodes - 1 so far can never
    come back, nor can its descendants, so it is not even noted; that changes no tree.

    rows: the frontier row each candidate came from. best: (-score, number) of the kept ones, best first.
    """

    def __init__(self, root: int, shape: TreeShape) -> None:
        self.shape, self._floor = shape, shape.log_floor
        self.tokens, self.rows = [root], [-1]
        self.frontier = [] if shape.is_root_only else [0]
        self._parents, self._scores = [-1], [0.0]
        self._best: list[tuple[float, int]] = []
        self._depth = 0

    def grow(self, row: int, tokens: list[list[int]], logs: list[list[float]]) -> None:
        """Children of the frontier, whose first row is `row`, best first."""
        first = len(self.tokens)
        for number, parent in enumerate(self.frontier):
            self._add_children(parent, row + number, tokens[number], logs[number])
        fresh = [(-self._scores[node], node) for node in range(first, len(self.tokens))]
        self._best = sorted([*self._best, *fresh])[: self.shape.nodes - 1]
        self._depth += 1
        kept = [node for _, node in self._best if node >= first]
        self.frontier = kept[: self.shape.branch] if self._depth < self.shape.depth else []

    def tree(self) -> DraftTree:
        nodes = [0, *sorted(node for _, node in self._best)]
        places = {node: place for place, node in enumerate(nodes)}
        return DraftTree(
            np.array([self.tokens[node] for node in nodes], np.int64),
            np.array([-1, *(places[self._parents[node]] for node in nodes[1:])], np.int64),
            np.array([self._scores[node] for node in nodes], np.float32),
        )

    def _add_children(self, parent: int, row: int, tokens: list[int], logs: list[float]) -> None:
        full = len(self._best) == self.shape.nodes - 1
        worst = -self._best[-1][0] if full else -math.inf
        for token, log in zip(tokens[: self.shape.branch], logs, strict=False):
            score = self._scores[parent] + min(log, 0.0)
            if not (score > worst and score >= self._floor):  # ties lose to what came before; NaN is no score either
                break
            self.tokens.append(token)
            self.rows.append(row)
            self._parents.append(parent)
            self._scores.append(score)


class KernelGrowth:
    """The trees of `DynamicGrowth`, whose candidates a kernel set keeps."""

    def __init__(self, candidates: Candidates, lanes: int) -> None:
        self._candidates, self._lanes = candidates, lanes
        self._set_frontier()

    @property
    def frontier(self) -> Frontier:
        return self._frontier

    def grow(self, tokens_FK: IntArray, logs_FK: FloatArray) -> None:
        self._candidates.grow(tokens_FK, logs_FK)
        self._set_frontier()

    def trees(self) -> list[DraftTree]:
        return [DraftTree(*self._candidates.tree(lane)) for lane in range(self._lanes)]

    def _set_frontier(self) -> None:
        lane_F, origin_F, tokens_F = self._candidates.frontier()
        self._frontier = Frontier(lane_F, origin_F, tokens_F, self._candidates.children)


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
