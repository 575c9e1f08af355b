"""Tensors of the pool: shapes, sizes in bytes, moving rows, and sizes that cannot be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from alula.cache import CacheLayout, KVShape, PagedCache
from alula.cache.pool import Pool, move_by_index
from alula.config import AlulaError

TARGET = (KVShape(2, 4), KVShape(1, 8), KVShape(2, 4))
LAYOUT = CacheLayout(page_size=4, target=TARGET, drafter=(KVShape(1, 2),), feature_size=6, dtype=torch.bfloat16)


def cache(**changes: Any) -> PagedCache:
    sizes: dict[str, Any] = {"pages": 4, "page_size": 4, "target": TARGET, "dtype": torch.float32} | changes
    return PagedCache(**sizes)


def test_layers_have_their_own_memory() -> None:
    made = cache(drafter=(KVShape(1, 2),))
    layers = [*made.target_layers, *made.drafter_layers]
    assert [tuple(layer.keys.shape) for layer in layers] == [(2, 16, 4), (1, 16, 8), (2, 16, 4), (1, 16, 2)]
    tensors = [tensor for layer in layers for tensor in (layer.keys, layer.values)]
    for number, tensor in enumerate(tensors):
        assert tensor.is_contiguous() and not tensor.any()
        tensor.fill_(number + 1)
    assert [float(tensor.min()) for tensor in tensors] == [float(tensor.max()) for tensor in tensors]
    assert [float(tensor.max()) for tensor in tensors] == [*range(1, 9)]


def test_bytes_are_counted() -> None:
    made = Pool(LAYOUT, 3, torch.device("cpu"))
    target = sum(layer.keys.nbytes + layer.values.nbytes for layer in made.target_layers)
    drafter = sum(layer.keys.nbytes + layer.values.nbytes for layer in made.drafter_layers)
    assert 3 * LAYOUT.target_page_bytes == target
    assert 3 * LAYOUT.extra_page_bytes == drafter + made.features_PF.nbytes
    assert 3 * LAYOUT.page_bytes == target + drafter + made.features_PF.nbytes
    assert LAYOUT.pages_for(3 * LAYOUT.page_bytes) == LAYOUT.pages_for(4 * LAYOUT.page_bytes - 1) == 3


def test_extra_bytes_are_those_of_speculation() -> None:
    assert cache().extra_kv_bytes == 0
    made = cache(drafter=(KVShape(1, 2),), feature_size=6)
    assert made.extra_kv_bytes == 4 * (4 * 2 * 2 * 4 + 6 * 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads", [1, 3])
def test_overlapping_rows_are_read_before_written(dtype: torch.dtype, heads: int) -> None:
    layout = CacheLayout(4, (KVShape(heads, 3),) * 2, (KVShape(1, 3),), 0, dtype)
    pool = Pool(layout, 4, torch.device("cpu"))
    layers = [*pool.target_layers, *pool.drafter_layers]
    for layer in layers:
        layer.keys.copy_(torch.arange(16)[None, :, None])
        layer.values.copy_(100 + torch.arange(16)[None, :, None])
    pool.move_rows(np.array([[3, 5, 9, 4], [4, 3, 5, 6]]))
    moved = [0, 1, 2, 5, 3, 9, 4, 7, 8, 9, 10, 11, 12, 13, 14, 15]
    for layer, expected in zip(layers, (moved, moved, list(range(16))), strict=True):
        assert layer.keys[0, :, 0].tolist() == expected and layer.keys[-1, :, -1].tolist() == expected
        assert layer.values[-1, :, 1].tolist() == [100 + slot for slot in expected]


def test_moving_by_index_agrees_with_the_cpu_path() -> None:
    moves = np.array([[3, 5, 9], [4, 3, 5]])
    pool = Pool(CacheLayout(4, (KVShape(2, 3),) * 2, (), 0, torch.bfloat16), 4, torch.device("cpu"))
    block = torch.randn(4, 2, 16, 3).bfloat16()
    for layer, keys, values in zip(pool.target_layers, block[0::2], block[1::2], strict=True):
        layer.keys.copy_(keys)
        layer.values.copy_(values)
    move_by_index(block, torch.from_numpy(moves))
    pool.move_rows(moves)
    for layer, keys, values in zip(pool.target_layers, block[0::2], block[1::2], strict=True):
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"pages": 0}, "pages"),
        ({"pages": 2.5}, "pages"),
        ({"pages": 2**31}, "pages"),
        ({"page_size": 0}, "page_size"),
        ({"target": ()}, "target"),
        ({"feature_size": -1}, "feature_size"),
        ({"drafter_first": 2}, "drafter_first"),
        ({"dtype": torch.int64}, "dtype"),
        ({"pages": 2**31 - 1, "target": (KVShape(2**20, 2**20),)}, "fewer pages"),
    ],
)
def test_impossible_sizes_name_the_field(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(AlulaError, match=named):
        cache(**changes)


@pytest.mark.parametrize("sizes", [(0, 4), (2, -1), (True, 4)])
def test_impossible_shapes_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(AlulaError, match=r"heads|head_dim"):
        KVShape(*sizes)


def test_a_budget_below_one_page_is_refused() -> None:
    with pytest.raises(AlulaError, match=str(LAYOUT.page_bytes)):
        LAYOUT.pages_for(LAYOUT.page_bytes - 1)
