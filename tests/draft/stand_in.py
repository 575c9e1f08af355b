"""A stand-in target whose features are made up, and sequences that are prefilled, drafted for and committed with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from alula.draft.drafter import Drafter
from alula.tree import DraftTree, TreeShape
from tests.draft.harness import Bench
from tests.draft.heads import TARGET_HIDDEN

SHAPE = TreeShape(nodes=12, depth=4, branch=3)


def features(drafter: Drafter, tokens: list[int], start: int = 0) -> torch.Tensor:
    """f_start .. of a stand-in target: each a function of the tokens up to its position."""
    width, rows = len(drafter.taps) * TARGET_HIDDEN, []
    for stop in range(start + 1, len(tokens) + 1):
        generator = torch.Generator().manual_seed(hash(tuple(tokens[:stop])) % 2**31)
        rows.append(torch.randn(width, generator=generator))
    return torch.stack(rows)


def bench_for(drafter: Drafter, **sizes: Any) -> Bench:
    return Bench(drafter, feature_size=len(drafter.taps) * TARGET_HIDDEN, **sizes)


def ready(drafter: Drafter, tokens: list[int], *, chunk: int = 0, **sizes: Any) -> Bench:
    """A bench with one sequence whose prompt is prefilled, in chunks where a size is given."""
    bench = bench_for(drafter, **sizes)
    fill(bench, tokens, chunk=chunk)
    return bench


def fill(bench: Bench, tokens: list[int], *, id: int = 0, chunk: int = 0, **params: Any) -> int:
    hit = bench.add(tokens, id=id, **params)
    known = features(bench.drafter, tokens)
    for stop in range(hit + chunk, len(tokens) - 1, chunk) if chunk else ():
        bench.prefill({id: known}, stop=stop)
    bench.prefill({id: known})
    return hit


def commit(bench: Bench, path: list[int], correction: int, *, id: int = 0, shape: TreeShape = SHAPE) -> DraftTree:
    """One step that accepts these nodes."""
    held = bench.sequences[id]
    tree = bench.draft({id: shape})[id]
    tokens = [*held.tokens, *(int(tree.tokens_N[node]) for node in path)]
    rows = features(bench.drafter, tokens, start=len(held.tokens) - 1)
    return bench.step({id: shape}, {id: (path, correction)}, rows)[id]


def same(a: DraftTree, b: DraftTree) -> bool:
    pairs = ((a.tokens_N, b.tokens_N), (a.parents_N, b.parents_N), (a.scores_N, b.scores_N))
    return all(np.array_equal(left, right) for left, right in pairs)


def deepest(tree: DraftTree) -> list[int]:
    return tree.path(int(tree.depths_N.argmax()))


def sibling(tree: DraftTree) -> list[int]:
    """A path whose nodes are not the first children."""
    return tree.path(max(range(1, len(tree)), key=lambda node: (tree.depths_N[node] == 2, node)))
