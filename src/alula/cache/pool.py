"""The tensors behind the paged cache: keys and values of every layer, and the kept target features.

Shape suffixes: S slots of the whole pool, P pages, T rows, G kv heads, K head dim, F feature width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from alula.config import AlulaError
from alula.tree import IntArray


@dataclass(frozen=True)
class KVShape:
    """Keys (and values) of one layer for one token: `heads` kv heads of `head_dim` numbers."""

    heads: int
    head_dim: int

    def __post_init__(self) -> None:
        for name in ("heads", "head_dim"):
            _check_whole(name, getattr(self, name), least=1)


@dataclass(frozen=True, eq=False)
class KVLayer:
    """One layer's part of the pool: keys and values, each [G, S, K], contiguous, in the cache dtype.

    So the slots of a page lie side by side for each head, and attention reads memory in long stretches.
    """

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def zeros(cls, shape: KVShape, slots: int, dtype: torch.dtype, device: torch.device) -> KVLayer:
        return cls(*torch.zeros(2, shape.heads, slots, shape.head_dim, dtype=dtype, device=device))

    @property
    def slots(self) -> int:
        return self.keys.shape[1]


@dataclass(frozen=True)
class CacheLayout:
    """What one page holds. Sizes are in bytes. Raises AlulaError for sizes that cannot be."""

    page_size: int
    """Slots (tokens) per page."""
    target: tuple[KVShape, ...]
    drafter: tuple[KVShape, ...]
    feature_size: int
    """Width of the target feature kept with each page; 0 keeps none."""
    dtype: torch.dtype

    def __post_init__(self) -> None:
        _check_whole("page_size", self.page_size, least=1)
        _check_whole("feature_size", self.feature_size, least=0)
        if not self.target:
            raise AlulaError("target is empty: give the KV shape of at least one layer")
        if not self.dtype.is_floating_point:
            raise AlulaError(f"dtype is {self.dtype}: give a floating-point type")

    @property
    def target_page_bytes(self) -> int:
        return self._page_bytes(self.target)

    @property
    def extra_page_bytes(self) -> int:
        """What speculation adds: the drafter's layers and the kept feature."""
        return self._page_bytes(self.drafter) + self.feature_size * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        return self.target_page_bytes + self.extra_page_bytes

    def pages_for(self, budget: int) -> int:
        """How many pages fit into `budget` bytes; AlulaError when not even one does."""
        pages = budget // self.page_bytes
        if pages < 1:
            raise AlulaError(
                f"the cache budget is {budget} bytes: give at least {self.page_bytes}, the size of one page"
            )
        return pages

    def _page_bytes(self, shapes: tuple[KVShape, ...]) -> int:
        return sum(2 * shape.heads * shape.head_dim for shape in shapes) * self.page_size * self.dtype.itemsize


class Pool:
    """Tensors for `pages` pages. Layers of equal shape share one block, so that a move is one copy per block."""

    def __init__(self, layout: CacheLayout, pages: int, device: torch.device) -> None:
        slots = pages * layout.page_size
        self._target_blocks, self.target_layers = _allocate_layers(layout.target, slots, layout.dtype, device)
        _, self.drafter_layers = _allocate_layers(layout.drafter, slots, layout.dtype, device)
        self.features_PF = _zeros((pages, layout.feature_size), layout.dtype, device)
        self.device = device
        self._rows = [_as_rows(block) for block in self._target_blocks] if device.type == "cpu" else []

    def move_rows(self, moves_2T: IntArray) -> None:
        """Copy the target layers' rows from slots `moves_2T[0]` to slots `moves_2T[1]`.

        All rows are read before any is written, so the two may overlap.
        """
        if self.device.type == "cpu":
            source, target = moves_2T
            for rows in self._rows:
                rows[:, target] = rows[:, source]
        else:
            for block in self._target_blocks:
                move_by_index(block, self._to_device(moves_2T))

    def store_features(self, pages: IntArray, features_TF: torch.Tensor, rows: IntArray) -> None:
        """Keep `features_TF[rows]` with the given pages."""
        chosen = features_TF[torch.from_numpy(rows).to(features_TF.device)].to(self.features_PF)
        self.features_PF.index_copy_(0, self._to_device(pages), chosen)

    def _to_device(self, array: IntArray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


def _allocate_layers(
    shapes: Sequence[KVShape], slots: int, dtype: torch.dtype, device: torch.device
) -> tuple[list[torch.Tensor], tuple[KVLayer, ...]]:
    """Blocks [2 * layers of one shape, G, S, K] and, in the order of `shapes`, the layers as views of them."""
    blocks = {
        shape: _zeros((2 * shapes.count(shape), shape.heads, slots, shape.head_dim), dtype, device)
        for shape in dict.fromkeys(shapes)
    }
    used = dict.fromkeys(blocks, 0)
    layers = []
    for shape in shapes:
        block, index = blocks[shape], used[shape]
        layers.append(KVLayer(block[index], block[index + 1]))
        used[shape] += 2
    return list(blocks.values()), tuple(layers)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, so that a masked entry is never NaN. On the CPU, memory nobody has touched yet costs nothing:
    numpy asks the system for zero pages, where torch would write them."""
    size = math.prod(shape) * dtype.itemsize
    try:
        if device.type != "cpu" or not size:
            return torch.zeros(shape, dtype=dtype, device=device)
        return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)
    except (MemoryError, ValueError, torch.OutOfMemoryError) as error:
        raise AlulaError(f"the KV cache needs {size} bytes that {device} does not have: give fewer pages") from error


def _as_rows(block: torch.Tensor) -> NDArray[np.void]:
    """The block as a numpy array [layers x G, S] of whole rows. Indexing it takes a quarter of torch's time for the few
    rows of a step, and leaves torch's thread pool alone, which costs milliseconds where cores are busy."""
    row_bytes = block.shape[-1] * block.element_size()
    flat = block.flatten(0, 1).view(torch.uint8).numpy()
    return flat.view(f"V{row_bytes}")[:, :, 0]


def move_by_index(block: torch.Tensor, moves_2T: torch.Tensor) -> None:
    """Rows moves_2T[0] of a block [layers, G, S, K] to rows moves_2T[1], on any device."""
    source, target = moves_2T.unbind()
    block.index_copy_(2, target, block.index_select(2, source))


def _check_whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise AlulaError(f"{name} is {value!r}: give a whole number of at least {least}")
