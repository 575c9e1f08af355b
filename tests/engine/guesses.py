"""Drafters that know what a plain run wrote, so that tests can force any acceptance they like."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from alula.cache import Transaction
from alula.draft.drafter import Drafter, NoDrafter, grows
from alula.engine.request import RequestOutput
from alula.sequence import PlanItem, StepPlan
from alula.tree import DraftTree, TreeShape

Script = Callable[[list[int], PlanItem], list[int]]
"""(true continuation, plan item) -> chain of draft tokens."""


def truly(truth: list[int], item: PlanItem) -> list[int]:
    return truth


def spoiled_at(depth: int) -> Script:
    """Right before `depth`, wrong there (depths count from 1)."""

    def script(truth: list[int], item: PlanItem) -> list[int]:
        return [(t + 1) % 256 if d == depth else t for d, t in enumerate(truth, start=1)]

    return script


def spoiled_by_turns(truth: list[int], item: PlanItem) -> list[int]:
    """Wrong at another depth each time, by request and position: rows of a batch accept different counts."""
    return spoiled_at(1 + (item.sequence.id + len(item.sequence.tokens)) % 5)(truth, item)


class Guesser:
    """Proposes a chain that `script` makes of what a plain run wrote for the same prompt and sample.

    siblings: wrong tokens tried before each token of the chain.
    """

    name = "guesser"
    kv_shapes = ()
    kv_first = 1
    taps = ()

    def __init__(self, plain: Sequence[RequestOutput], script: Script = truly, siblings: int = 0) -> None:
        self._script = script
        self._siblings = siblings
        self._truths = {
            (tuple(output.prompt_token_ids), sample.index): [*output.prompt_token_ids, *sample.token_ids]
            for output in plain
            for sample in output.outputs
        }

    def scratch(self, shape: TreeShape) -> int:
        return 0

    def draft(self, plan: StepPlan, txn: Transaction) -> list[DraftTree | None]:
        trees = NoDrafter().draft(plan, txn)
        return [self._tree(item) if grows(item) else tree for item, tree in zip(plan.items, trees, strict=True)]

    def _tree(self, item: PlanItem) -> DraftTree:
        sequence, shape = item.sequence, item.shape
        assert shape is not None
        truth = self._truths[tuple(sequence.tokens[: sequence.prompt_len]), sequence.sample]
        assert truth[: len(sequence.tokens)] == sequence.tokens[: len(truth)]
        depth = min((shape.nodes - 1) // (1 + self._siblings), shape.depth)
        guess = self._script(truth[len(sequence.tokens) :], item)[:depth]
        return ladder([sequence.tokens[-1], *guess], self._siblings)


def ladder(chain: list[int], siblings: int = 0) -> DraftTree:
    """A chain whose every token but the root comes after `siblings` other children of its parent."""
    tokens, parents, last = chain[:1], [-1], 0
    for token in chain[1:]:
        tokens += [(token + 1 + s) % 256 for s in range(siblings)] + [token]
        parents += [last] * (1 + siblings)
        last = len(tokens) - 1
    return DraftTree(np.array(tokens), np.array(parents), -np.arange(len(tokens), dtype=np.float32))


class Recorder:
    """Any drafter, with what it proposed per sequence: (root position, tokens, parents, scores)."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.name, self.kv_shapes, self.kv_first = drafter.name, drafter.kv_shapes, drafter.kv_first
        self.taps = drafter.taps
        self.proposed: dict[int, list[tuple[int, list[int], list[int], list[float]]]] = {}
        self.rows: list[int] = []

    def scratch(self, shape: TreeShape) -> int:
        return self._drafter.scratch(shape)

    def draft(self, plan: StepPlan, txn: Transaction) -> list[DraftTree | None]:
        trees = self._drafter.draft(plan, txn)
        self.rows.append(sum(len(item.chunk) + len(tree or ()) for item, tree in zip(plan.items, trees, strict=True)))
        for item, tree in zip(plan.items, trees, strict=True):
            if tree is not None and len(tree) > 1:
                entry = (item.sequence.root_position, tree.tokens_N.tolist(), tree.parents_N.tolist())
                self.proposed.setdefault(item.sequence.id, []).append((*entry, tree.scores_N.tolist()))
        return trees
