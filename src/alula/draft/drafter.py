"""What a drafter is, and the one that never drafts."""

from __future__ import annotations

from typing import Protocol

from alula.cache import KVShape, Transaction
from alula.sequence import PlanItem, StepPlan
from alula.tree import DraftTree, TreeShape


class Drafter(Protocol):
    """Proposes trees. It only guesses: what is emitted does not depend on it."""

    @property
    def name(self) -> str: ...

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """Layers it keeps in the page table, () for none."""

    @property
    def kv_first(self) -> int:
        """The first slot of a sequence that holds an entry: 1 for heads on features, 0 for models on tokens."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Target features it wants, () for none."""

    def scratch(self, shape: TreeShape) -> int:
        """Logical slots wanted beyond the root's for drafting a tree of this shape."""

    def draft(self, plan: StepPlan, txn: Transaction) -> list[DraftTree | None]:
        """One tree per plan item; None where the chunk does not reach the root yet.

        Also consumes the features that wait in the sequences' queues (of those still in prefill too) and stages how
        far its own entries reach with `txn.fill_draft`.
        """


def grows(item: PlanItem) -> bool:
    """Whether this item's tree may have more than its root: the target must have reached the root."""
    return item.shape is not None and not item.shape.is_root_only and not len(item.chunk)


def root_only_trees(plan: StepPlan) -> list[DraftTree | None]:
    return [None if item.shape is None else DraftTree.root_only(item.sequence.tokens[-1]) for item in plan.items]


class NoDrafter:
    """Plain decoding: every tree is its root."""

    name = "none"
    kv_shapes: tuple[KVShape, ...] = ()
    kv_first = 0
    taps: tuple[int, ...] = ()

    def scratch(self, shape: TreeShape) -> int:
        return 0

    def draft(self, plan: StepPlan, txn: Transaction) -> list[DraftTree | None]:
        return root_only_trees(plan)
