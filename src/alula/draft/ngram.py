"""Prompt lookup: the drafts are continuations of earlier occurrences of the last few tokens (Saxena, 2023).

It costs no model and pays where the output repeats the prompt or itself.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from alula.cache import KVShape, Transaction
from alula.config import AlulaError
from alula.draft.drafter import grows
from alula.sampling.processors import is_allowed
from alula.sequence import Sequence, StepPlan
from alula.tree import DraftTree, TreeShape

_REMEMBERED = 64
"""Indexes kept at least; a sequence whose index was dropped gets a fresh one at its next draft."""


class NgramDrafter:
    """Looks up the longest suffix of `longest` down to `shortest` tokens; the most recent occurrences come first."""

    name = "ngram"
    kv_shapes: tuple[KVShape, ...] = ()
    kv_first = 0
    taps: tuple[int, ...] = ()

    def __init__(self, longest: int = 4, shortest: int = 1) -> None:
        if not 1 <= shortest <= longest:
            raise AlulaError(f"shortest is {shortest}: give a number from 1 to longest ({longest})")
        self._lengths = range(longest, shortest - 1, -1)
        self._indexes: OrderedDict[int, _Index] = OrderedDict()

    def scratch(self, shape: TreeShape) -> int:
        return 0

    def draft(self, plan: StepPlan, txn: Transaction) -> list[DraftTree | None]:
        trees: list[DraftTree | None] = []
        for item in plan.items:
            tokens = item.sequence.tokens
            if item.shape is None:
                trees.append(None)
            elif not grows(item):
                trees.append(DraftTree.root_only(tokens[-1]))
            else:
                index = self._index(item.sequence.id, tokens)
                trees.append(_tree(item.sequence, index.matches(tokens), item.shape))
        while len(self._indexes) > max(_REMEMBERED, 2 * len(plan.items)):
            self._indexes.popitem(last=False)
        return trees

    def _index(self, sequence_id: int, tokens: list[int]) -> _Index:
        index = self._indexes.get(sequence_id)
        if index is None or index.tokens is not tokens:
            index = self._indexes[sequence_id] = _Index(tokens, self._lengths)
        self._indexes.move_to_end(sequence_id)
        index.extend()
        return index


@dataclass
class _Index:
    """Where the continuation of every n-gram of one sequence starts, oldest first."""

    tokens: list[int]
    lengths: range
    indexed: int = 0
    starts: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def extend(self) -> None:
        """Take in the tokens committed since. An n-gram is entered once the token after it is known."""
        for stop in range(max(self.indexed, 1), len(self.tokens)):
            for length in self.lengths:
                if length <= stop:
                    self.starts.setdefault(tuple(self.tokens[stop - length : stop]), []).append(stop)
        self.indexed = len(self.tokens)

    def matches(self, tokens: list[int]) -> Iterator[tuple[int, int]]:
        """(length of the match, start of its continuation), best first."""
        for length in self.lengths:
            if length <= len(tokens):
                for start in reversed(self.starts.get(tuple(tokens[-length:]), ())):
                    yield length, start


def _tree(sequence: Sequence, matches: Iterator[tuple[int, int]], shape: TreeShape) -> DraftTree:
    """The continuations merged into one tree, first come first served; each ends before what the grammar forbids."""
    tokens, grammar = sequence.tokens, sequence.grammar
    found: list[int] = [tokens[-1]]
    parents, scores = [-1], [0.0]
    paths: list[tuple[int, ...]] = [()]
    children: list[dict[int, int]] = [{}]
    for tries, (length, start) in enumerate(matches):
        if len(found) >= shape.nodes or tries >= shape.nodes * shape.branch:
            break
        node = 0
        for depth, token in enumerate(tokens[start : start + shape.depth]):
            if token not in children[node]:
                if len(found) >= shape.nodes or len(children[node]) >= shape.branch:
                    break
                if grammar is not None and not is_allowed(grammar.mask(paths[node]), token):
                    break
                paths.append((*paths[node], token))
                scores.append(scores[node] + _log_confidence(length + depth, len(children[node])))
                children[node][token] = len(found)
                children.append({})
                parents.append(node)
                found.append(token)
            node = children[node][token]
    return DraftTree(np.array(found), np.array(parents), np.array(scores, np.float32))


def _log_confidence(match: int, rank: int) -> float:
    """A rough guess: a match of m tokens is right m times in m + 1, and each later sibling takes that share of the
    rest."""
    return math.log(match / (match + 1)) - rank * math.log(match + 1)
