"""Heads over the paged cache against the dense reference, with every flag."""

from __future__ import annotations

import pytest
import torch

from alula.config import Rope
from alula.draft.build import build_head
from alula.draft.dialects import HeadFiles
from alula.draft.head_config import HeadConfig
from alula.draft.policy import TreePolicy
from alula.tree import TreeShape
from tests.draft.dense import DenseHead
from tests.draft.harness import Bench
from tests.draft.heads import head_config, lm_head_weight, random_features, random_tokens, random_weights, target_parts

LLAMA3 = Rope(5000.0, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=16)
CONFIGS = {
    "eagle1": (head_config("eagle1"), False),
    "eagle1_fc_bias": (head_config("eagle1"), True),
    "eagle1_qkv_bias": (head_config("eagle1", attention_bias=True), False),
    "eagle3": (head_config(), False),
    "eagle3_fc_bias": (head_config(), True),
    "eagle3_whole_vocabulary": (head_config(draft_vocab_size=61), False),
    "fc_norm": (head_config(fc_norm=True), False),
    "norm_before_fc": (head_config(norm_before_fc=True), False),
    "norm_output": (head_config(norm_output=True), False),
    "norm_before_residual": (head_config(norm_before_residual=True), False),
    "eagle31": (head_config(fc_norm=True, norm_output=True), False),
    "two_taps": (head_config(taps=(1, 5)), False),
    "five_taps_normed": (head_config(taps=(1, 2, 3, 4, 12), fc_norm=True), False),
    "own_hidden_size": (head_config(hidden_size=24, intermediate_size=40, head_dim=6), False),
    "llama3_rope": (head_config(rope=LLAMA3), False),
    "gelu": (head_config(hidden_act="gelu_pytorch_tanh"), False),
}
SHAPE = TreeShape(nodes=14, depth=4, branch=3)


@pytest.mark.parametrize("name", CONFIGS)
def test_trees_equal_the_dense_reference(name: str) -> None:
    """Scores compare the whole computation: taps, fusion, feedback, attention over prefix and ancestors, and head."""
    config, fc_bias = CONFIGS[name]
    weights = random_weights(config, fc_bias=fc_bias)
    parts = target_parts()
    drafter = build_head(HeadFiles(config, {k: v for k, v in weights.items() if k != "t2d"}, None), parts, TreePolicy())
    tokens, features = random_tokens(19), random_features(config, 18)
    bench = Bench(drafter, feature_size=features.shape[1])
    bench.add(tokens)
    bench.prefill({0: features}, stop=7)
    bench.prefill({0: features})
    tree = bench.draft({0: SHAPE})[0]
    expected = DenseHead(config, weights, parts.embedding_VD, lm_head_weight()).tree(tokens, features, SHAPE)
    found = {
        tuple(int(tree.tokens_N[n]) for n in tree.path(node)): float(tree.scores_N[node])
        for node in range(1, len(tree))
    }
    assert found.keys() == expected.keys()
    torch.testing.assert_close(
        torch.tensor([found[path] for path in expected]), torch.tensor(list(expected.values())), rtol=1e-4, atol=1e-4
    )


def test_flags_change_the_result() -> None:
    """No flag of the cases above is silently ignored."""
    found = []
    for name in ("eagle3", "norm_output", "norm_before_residual"):
        config: HeadConfig = CONFIGS[name][0]
        dense = DenseHead(config, random_weights(config), target_parts().embedding_VD, lm_head_weight())
        found.append(dense.after(random_tokens(9), random_features(config, 8), [3, 4]))
    assert not any(torch.allclose(a, b) for i, a in enumerate(found) for b in found[:i])
