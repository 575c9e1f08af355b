"""Several drafters behind one interface: each sequence may name the one that proposes for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from alula.cache import KVShape, Transaction
from alula.config import AlulaError
from alula.draft.drafter import Drafter, grows
from alula.sequence import PlanItem, StepPlan
from alula.tree import ROOT_ONLY, DraftTree, TreeShape


class DrafterChoice:
    """The main drafter, and others by name that keep nothing in the cache (prompt lookup is one).

    The main one goes on reading what is committed for sequences that another proposes for, as while speculation is
    off. Raises AlulaError for others that want layers or features of their own.
    """

    def __init__(self, main: Drafter, others: Mapping[str, Drafter]) -> None:
        for name, other in others.items():
            if other.kv_shapes or other.taps:
                raise AlulaError(f"drafter {name!r} keeps layers of its own: make it the main one")
        self.main = main
        self._others = dict(others)

    @property
    def names(self) -> tuple[str, ...]:
        """What a sequence may ask for."""
        return tuple(dict.fromkeys((self.main.name, *self._others)))

    @property
    def name(self) -> str:
        return self.main.name

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        return self.main.kv_shapes

    @property
    def kv_first(self) -> int:
        return self.main.kv_first

    @property
    def taps(self) -> tuple[int, ...]:
        return self.main.taps

    @property
    def policy(self) -> object | None:
        """The main drafter's, where it has one; the others make point-mass proposals, which go with every rule."""
        return getattr(self.main, "policy", None)

    def scratch(self, shape: TreeShape) -> int:
        return max(drafter.scratch(shape) for drafter in (self.main, *self._others.values()))

    def draft(self, plan: StepPlan, txn: Transaction) -> list[DraftTree | None]:
        trees = self.main.draft(StepPlan(tuple(self._for_main(item) for item in plan.items)), txn)
        for name, drafter in self._others.items():
            places = [place for place, item in enumerate(plan.items) if grows(item) and self._is_for(item, name)]
            if places:
                found = drafter.draft(StepPlan(tuple(plan.items[place] for place in places)), txn)
                for place, tree in zip(places, found, strict=True):
                    trees[place] = tree
        return trees

    def _for_main(self, item: PlanItem) -> PlanItem:
        other = any(self._is_for(item, name) for name in self._others)
        return replace(item, shape=ROOT_ONLY) if other and item.shape is not None else item

    def _is_for(self, item: PlanItem, name: str) -> bool:
        return item.sequence.drafter == name != self.main.name
