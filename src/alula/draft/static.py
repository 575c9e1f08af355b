"""Static trees: rank paths fixed beforehand (EAGLE-1, arXiv 2401.15077, section 3 and its public choices).

A rank path names a node by the ranks of the children on the way to it: (0, 2) is the third child of the first child
of the root. Ranks start at 0 and have no gaps, since the r-th child is only tried after those before it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from alula.config import AlulaError
from alula.tree import TreeShape

RankPath = tuple[int, ...]

_DEFAULT_CHILDREN: dict[RankPath, int] = {
    (): 4,
    (0,): 3,
    (1,): 2,
    (2,): 2,
    (3,): 1,
    (0, 0): 3,
    (0, 1): 2,
    (0, 2): 2,
    (1, 0): 1,
    (0, 0, 0): 3,
    (0, 0, 0, 0): 2,
}


@dataclass(frozen=True)
class StaticTree:
    """Rank paths, shallow ones first. Raises AlulaError for a path whose parent or elder sibling is missing."""

    paths: tuple[RankPath, ...]

    def __post_init__(self) -> None:
        known = set(self.paths)
        if not self.paths or len(known) != len(self.paths):
            raise AlulaError("the static tree has no path, or the same one twice: list each node once")
        if list(self.paths) != sorted(self.paths, key=_order):
            raise AlulaError("the static tree is not in order: list shallow paths first, then by rank")
        for path in self.paths:
            elder = (*path[:-1], path[-1] - 1)
            if (len(path) > 1 and path[:-1] not in known) or (path[-1] > 0 and elder not in known) or path[-1] < 0:
                raise AlulaError(f"the static tree has {list(path)} without its parent or elder sibling: add them")

    @classmethod
    def of(cls, paths: Iterable[Sequence[int]]) -> StaticTree:
        """Paths in any order."""
        return cls(tuple(sorted((tuple(path) for path in paths), key=_order)))

    @classmethod
    def chain(cls, depth: int) -> StaticTree:
        return cls(tuple((0,) * length for length in range(1, depth + 1)))

    @classmethod
    def load(cls, path: Path) -> StaticTree:
        """A JSON list of rank paths."""
        try:
            raw = json.loads(path.read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise AlulaError(f"cannot read the static tree {path} ({error}): give a JSON list of rank paths") from None
        whole = isinstance(raw, list) and all(
            isinstance(ranks, list) and ranks and all(type(rank) is int for rank in ranks) for ranks in raw
        )
        if not whole:
            raise AlulaError(f"{path} is no list of rank paths: give for example [[0], [1], [0, 0]]")
        return cls.of(raw)

    def within(self, shape: TreeShape) -> tuple[RankPath, ...]:
        """The paths that fit the limits. What is cut depends on the limits only, never on the tokens."""
        fitting = [path for path in self.paths if len(path) <= shape.depth and max(path) < shape.branch]
        return tuple(fitting[: shape.nodes - 1])

    @cached_property
    def shape(self) -> TreeShape:
        """The smallest limits that hold the whole tree."""
        return TreeShape(
            nodes=len(self.paths) + 1,
            depth=max(len(path) for path in self.paths),
            branch=max(max(path) for path in self.paths) + 1,
        )


def _order(path: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    return len(path), tuple(path)


def default_static_tree() -> StaticTree:
    """The published tree of EAGLE-1: 25 nodes, depth 5."""
    return StaticTree.of((*parent, rank) for parent, count in _DEFAULT_CHILDREN.items() for rank in range(count))
