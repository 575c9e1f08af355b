"""Runs a drafter on a paged cache without a target model: the test hands over the features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from alula.cache import KVShape, PagedCache
from alula.draft.drafter import Drafter
from alula.features import FeatureQueue
from alula.sequence import PlanItem, SamplingParams, StepPlan
from alula.sequence import Sequence as TokenSequence
from alula.tree import DraftTree, TreeShape


def sequence(tokens: Sequence[int], *, id: int = 0, seed: int = 0, start: int = 0, **params: Any) -> TokenSequence:
    made = TokenSequence(id, len(tokens), list(tokens), SamplingParams(**params), seed=seed)
    made.features = FeatureQueue(start)
    return made


@dataclass
class Bench:
    """A drafter and its cache, with a stand-in target of one small layer."""

    drafter: Drafter
    feature_size: int = 0
    dtype: torch.dtype = torch.float32
    pages: int = 64
    page_size: int = 4
    sequences: dict[int, TokenSequence] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cache = PagedCache(
            pages=self.pages,
            page_size=self.page_size,
            target=[KVShape(1, 2)],
            drafter=self.drafter.kv_shapes,
            feature_size=self.feature_size,
            dtype=self.dtype,
            drafter_first=self.drafter.kv_first,
            drafter_name=self.drafter.name,
        )

    def add(self, tokens: Sequence[int], *, id: int = 0, **params: Any) -> int:
        """Take in a sequence; returns the length of its prefix hit."""
        hit = self.cache.add(id, tokens)
        self.sequences[id] = sequence(tokens, id=id, start=hit, **params)
        return hit

    def prefill(self, features: Mapping[int, torch.Tensor | None], stop: int | None = None) -> None:
        """One prefill step: chunks from where each sequence is to `stop` (its root by default).

        features: per sequence f_0, f_1, ...; those of the chunk are used.
        """
        chunks = {}
        for id in features:
            root = self.sequences[id].root_position
            chunks[id] = range(self.cache.length(id), root if stop is None else min(stop, root))
        items = [PlanItem(self.sequences[id], chunk, None) for id, chunk in chunks.items() if len(chunk)]
        if not items:
            return
        with self.cache.begin({item.sequence.id: len(item.chunk) for item in items}) as txn:
            assert self.drafter.draft(StepPlan(tuple(items)), txn) == [None] * len(items)
            for item in items:
                known = features[item.sequence.id]
                rows = None if known is None else known[item.chunk.start : item.chunk.stop]
                if rows is not None:
                    item.sequence.features.append(rows)
                txn.commit(item.sequence.id, item.sequence.tokens, len(item.chunk), None, rows)
                item.sequence.features.drop_before(txn.draft_length(item.sequence.id) - 1)

    def draft(self, shapes: Mapping[int, TreeShape]) -> dict[int, DraftTree]:
        """Trees of a step that is then rolled back."""
        return self._draft(shapes, {})

    def step(
        self,
        shapes: Mapping[int, TreeShape],
        accept: Mapping[int, tuple[Sequence[int], int]],
        features: torch.Tensor | None,
    ) -> dict[int, DraftTree]:
        """Draft, then commit the path (nodes) and the next token of `accept`. features: f of root and path."""
        return self._draft(shapes, accept, features)

    def _draft(
        self,
        shapes: Mapping[int, TreeShape],
        accept: Mapping[int, tuple[Sequence[int], int]],
        features: torch.Tensor | None = None,
    ) -> dict[int, DraftTree]:
        items = []
        for id, shape in shapes.items():
            root = self.sequences[id].root_position
            items.append(PlanItem(self.sequences[id], range(root, root), shape))
        needs = {id: max(shape.nodes, 1 + self.drafter.scratch(shape)) for id, shape in shapes.items()}
        trees: dict[int, DraftTree] = {}
        with self.cache.begin(needs) as txn:
            for item, tree in zip(items, self.drafter.draft(StepPlan(tuple(items)), txn), strict=True):
                assert tree is not None
                trees[item.sequence.id] = tree
            for id, (path, token) in accept.items():
                held = self.sequences[id]
                held.tokens.extend([*(int(trees[id].tokens_N[node]) for node in path), token])
                if self.feature_size:
                    assert features is not None
                    held.features.append(features)
                txn.commit(id, held.tokens, 0, path, features if self.feature_size else None)
                held.features.drop_before(txn.draft_length(id) - 1)
        self.cache.check_integrity()
        return trees


def entries(bench: Bench, id: int, start: int, stop: int) -> list[torch.Tensor]:
    """The drafter's keys and values in logical slots start .. stop - 1 of a sequence."""
    with bench.cache.begin({id: 0}) as txn:
        slots = torch.from_numpy(txn.slots(id, np.arange(start, stop)))
    return [side[:, slots].clone() for layer in bench.cache.drafter_layers for side in (layer.keys, layer.values)]


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    """The nodes as token paths from the root: the tree up to the numbering of its nodes."""
    return {tuple(int(tree.tokens_N[n]) for n in tree.path(node)) for node in range(1, len(tree))}
