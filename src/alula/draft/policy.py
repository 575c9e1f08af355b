"""Which trees are grown, and how their children are proposed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from alula.config import AlulaError
from alula.draft.expand import DynamicGrowth, Growth, KernelGrowth, StaticGrowth
from alula.draft.static import StaticTree
from alula.kernels.protocol import Kernels
from alula.tree import IntArray, TreeShape


@dataclass(frozen=True)
class TreePolicy:
    """Raises AlulaError for a pair of rule and tree that would change the output's distribution.

    rule: the verification rule, `coupled` or `rejection`.
    tree: a static tree, or None for dynamic ones.
    sampled: children are drawn at random from q instead of taken as its most likely tokens. Only for rule
        `rejection` with a static tree (a chain is one): a dynamic tree drops nodes for their scores, and a drawn
        sibling must never be dropped for its own value.
    """

    rule: str = "coupled"
    tree: StaticTree | None = None
    sampled: bool = False

    def __post_init__(self) -> None:
        if self.rule not in ("coupled", "rejection"):
            raise AlulaError(f"rule is {self.rule!r}: give 'coupled' or 'rejection'")
        if self.sampled and self.rule == "coupled":
            raise AlulaError("sampled proposals need rule 'rejection': rule 'coupled' takes its own children")
        if self.sampled and self.tree is None:
            raise AlulaError("sampled proposals need a static tree or a chain: a dynamic tree drops drawn siblings")

    def growth(self, roots_B: IntArray, shapes: Sequence[TreeShape], kernels: Kernels | None = None) -> Growth:
        """Trees at these roots; dynamic ones by the kernel set, where it offers that."""
        if self.tree is not None:
            return StaticGrowth(roots_B, shapes, self.tree)
        candidates = None if kernels is None else kernels.candidates(roots_B, *_limits(shapes))
        return DynamicGrowth(roots_B, shapes) if candidates is None else KernelGrowth(candidates, len(shapes))

    def scratch(self, shape: TreeShape) -> int:
        """The most nodes below the root that a tree of this shape expands."""
        if shape.is_root_only:
            return 0
        if self.tree is None:
            return (shape.depth - 1) * min(shape.branch, shape.nodes - 1)
        return len({path[:-1] for path in self.tree.within(shape) if len(path) > 1})


def _limits(shapes: Sequence[TreeShape]) -> tuple[IntArray, NDArray[np.float64]]:
    limits = np.array([(shape.nodes, shape.depth, shape.branch) for shape in shapes], np.int64).reshape(-1, 3)
    return limits, np.array([shape.log_floor for shape in shapes], np.float64)
