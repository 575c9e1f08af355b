"""Faults seen in public engines, one test each."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from alula.cache.pool import KVLayer
from alula.kernels.protocol import Kernels
from alula.tree import AttentionInput, DraftTree


@pytest.mark.parametrize("parents", [[-1], [-1, 0, 1, 2], [-1, 0, 0, 0], [-1, 0, 0, 1, 1, 2, 3, 5, 5, 0]])
@pytest.mark.parametrize("prefix", [0, 13, 64, 100])
def test_a13_tree_mask_equals_a_dense_mask(kernels: Kernels, parents: list[int], prefix: int) -> None:
    """A13: a tree mask that a new kernel path gets wrong. Each node sees the prefix, its ancestors and itself."""
    tree = DraftTree(np.arange(len(parents)), np.array(parents), np.zeros(len(parents), np.float32))
    nodes, heads, groups, size, page = len(parents), 6, 2, 32, 16
    random = torch.Generator().manual_seed(nodes + prefix)
    pages = (prefix + nodes) // page + 1
    layer = KVLayer(*(torch.randn(groups, pages * page, size, generator=random) for _ in range(2)))
    q = torch.randn(nodes, heads, size, generator=random)
    tails = tree.tails_NE
    where = AttentionInput(
        positions_T=torch.tensor(prefix + tree.depths_N),
        slots_T=torch.arange(prefix, prefix + nodes),
        sequence_T=torch.zeros(nodes, dtype=torch.int32),
        page_table_BP=torch.arange(pages, dtype=torch.int32)[None],
        prefix_T=torch.full((nodes,), prefix, dtype=torch.int32),
        tail_TE=torch.tensor(np.where(tails >= 0, tails + prefix, 0), dtype=torch.int32),
        tail_len_T=torch.tensor(tree.depths_N + 1, dtype=torch.int32),
        first_T=torch.zeros(nodes, dtype=torch.int32),
        page_size=page,
    )
    mask = torch.cat((torch.ones(nodes, prefix, dtype=torch.bool), torch.tensor(tree.mask_NN())), 1)
    keys, values = (x[:, : prefix + nodes].repeat_interleave(heads // groups, 0) for x in vars(layer).values())
    dense = F.scaled_dot_product_attention(q.transpose(0, 1), keys, values, attn_mask=mask).transpose(0, 1)
    result = kernels.attention(q, layer, where, scale=size**-0.5)
    assert torch.allclose(result, dense, rtol=1e-5, atol=1e-5)
