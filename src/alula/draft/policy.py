"""Which trees are grown, and how their children are proposed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alula.config import AlulaError
from alula.draft.expand import DynamicGrowth, Growth, StaticGrowth
from alula.draft.static import StaticTree
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

    def growth(self, roots_B: IntArray, shapes: Sequence[TreeShape]) -> Growth:
        if self.tree is None:
            return DynamicGrowth(roots_B, shapes)
        return StaticGrowth(roots_B, shapes, self.tree)

    def scratch(self, shape: TreeShape) -> int:
        """The most nodes below the root that a tree of this shape expands."""
        if shape.is_root_only:
            return 0
        if self.tree is None:
            return (shape.depth - 1) * min(shape.branch, shape.nodes - 1)
        return len({path[:-1] for path in self.tree.within(shape) if len(path) > 1})
