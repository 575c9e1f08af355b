"""Golden vectors of the original EAGLE code: what a published head must compute here too."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from alula.draft.build import TargetParts, build_head
from alula.draft.dialects import read_head
from alula.draft.neural import NeuralDrafter
from alula.draft.policy import TreePolicy
from alula.draft.rows import Lanes
from alula.kernels.protocol import Kernels
from alula.tree import DraftTree, TreeShape
from tests.draft.harness import Bench, paths
from tests.draft.kernel_sets import kernel_set, kernel_sets

GOLDEN = Path(os.environ.get("ALULA_GOLDEN", Path(__file__).parents[3] / "shared" / "golden"))
CASES = ["eagle1_small", "eagle2_default", "eagle3_full", "eagle3_vocab50"]

pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"no golden vectors in {GOLDEN}")


@dataclass(frozen=True)
class Case:
    drafter: NeuralDrafter
    expected: dict[str, torch.Tensor]
    shape: TreeShape

    def bench(self) -> Bench:
        return Bench(self.drafter, feature_size=self.expected["round0.features"].shape[1])

    def round(self, number: int) -> tuple[list[int], torch.Tensor, set[tuple[int, ...]]]:
        """Token ids (the last one is the root), newly known features, and the expected tree."""
        prefix = f"round{number}."
        return (
            self.expected[prefix + "input_ids"].tolist(),
            self.expected[prefix + "features"],
            _original_paths(self.expected, prefix),
        )


def _original_paths(expected: dict[str, torch.Tensor], prefix: str) -> set[tuple[int, ...]]:
    """Each node's token path from the tree mask: a row sees the root, its ancestors and itself."""
    tokens, depths = expected[prefix + "draft_tokens"], expected[prefix + "tree_position_ids"]
    found = set()
    for row in expected[prefix + "tree_mask"].bool()[1:]:
        seen = row.nonzero()[:, 0]
        order = depths[seen].argsort()
        found.add(tuple(tokens[seen[order]].tolist()[1:]))
    return found


@pytest.fixture(params=[(name, kernels) for name in CASES for kernels in kernel_sets()], ids="-".join)
def case(request: pytest.FixtureRequest) -> Case:
    name, kernels = request.param
    return _case(GOLDEN / name, kernel_set(kernels))


def _case(folder: Path, kernels: Kernels) -> Case:
    settings: dict[str, Any] = json.loads((folder / "case.json").read_text())
    expected = load_file(folder / "expected.safetensors")
    head = read_head(folder)
    embedding_VD = head.weights["embed_tokens.weight"]
    weight_VD = expected.get("target_lm_head.weight", embedding_VD)
    lm_head = kernels.prepare_linear(weight_VD.clone(), out_dtype=torch.float32)
    target = TargetParts(embedding_VD, lambda x_RD: kernels.linear(x_RD, lm_head), 12, 128, kernels)
    return Case(
        drafter=build_head(head, target, TreePolicy()),
        expected=expected,
        # The original drafts total - 1 nodes beside the root and expands one level more than its argument.
        shape=TreeShape(
            nodes=settings["total_tokens_argument"], depth=settings["depth_argument"] + 1, branch=settings["top_k"]
        ),
    )


def _prefilled(case: Case) -> Bench:
    tokens, features, _ = case.round(0)
    bench = case.bench()
    bench.add(tokens)
    bench.prefill({0: features}, stop=4)
    bench.prefill({0: features})
    return bench


def test_forward_equals_the_original(case: Case) -> None:
    """One causal pass over the prompt's pairs: hidden states and draft logits."""
    tokens, features, _ = case.round(0)
    bench, count = case.bench(), len(features)
    bench.add(tokens)
    model = case.drafter.model
    with bench.cache.begin({0: len(tokens)}) as txn:
        lanes = Lanes(txn.page_table([0]), np.array([1]), bench.page_size)
        slots = np.arange(1, count + 1)
        where = lanes.committed(np.zeros(count, np.int64), slots, txn.slots(0, slots), 1)
        hidden = model.step(torch.tensor(tokens[1:]), model.fuse(features), where, txn.drafter_layers)
    torch.testing.assert_close(hidden, case.expected["forward.hidden"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.logits(hidden), case.expected["forward.logits"], rtol=1e-4, atol=1e-4)


def test_first_tree_equals_the_original(case: Case) -> None:
    bench = _prefilled(case)
    tree = bench.draft({0: case.shape})[0]
    assert len(tree) == case.shape.nodes
    assert paths(tree) == case.round(0)[2]


def test_second_tree_on_reused_entries_equals_the_original(case: Case) -> None:
    bench = _prefilled(case)
    before, _, _ = case.round(0)
    after, features, expected = case.round(1)
    *accepted, correction = after[len(before) :]
    tree = bench.draft({0: case.shape})[0]
    bench.step({0: case.shape}, {0: (_nodes(tree, accepted), correction)}, features)
    assert bench.sequences[0].tokens == after
    assert bench.cache.draft_length(0) == int(case.expected["round0.draft_kv_len"]) + 1
    assert paths(bench.draft({0: case.shape})[0]) == expected


def _nodes(tree: DraftTree, tokens: list[int]) -> list[int]:
    """Nodes of a token path from the root."""
    path, node = [], 0
    for token in tokens:
        node = next(child for child in tree.children[node] if tree.tokens_N[child] == token)
        path.append(node)
    return path
