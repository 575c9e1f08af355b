"""Kernel sets by name, and rows of attention placed in a cache in any way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from alula.cache.pool import KVLayer
from alula.kernels.extension import _native
from alula.kernels.native import NativeKernels
from alula.kernels.protocol import Kernels
from alula.kernels.torch_reference import TorchKernels
from alula.tree import AttentionInput

LEVELS = tuple(_native.levels())
PRODUCTS = ("torch", *LEVELS, *(f"int8 {level}" for level in LEVELS))
DTYPES = (torch.float32, torch.bfloat16)


@cache
def kernel_set(name: str) -> Kernels:
    """`torch`, a level, or `int8` and a level."""
    if name == "torch":
        return TorchKernels()
    return NativeKernels(name.removeprefix("int8 "), linear="int8" if name.startswith("int8") else "native")


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit: NaN equals NaN, and 0 differs from -0."""
    words = {4: torch.int32, 2: torch.int16, 8: torch.int64}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(words), b.contiguous().view(words))


@dataclass(frozen=True)
class Row:
    """One row's logical inputs. keys, values: [n, G, K]; query [H, K]; `shared` first keys belong to a sequence."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    first: int
    sequence: int
    shared: int


def draw_rows(seed: int, heads: int, groups: int, size: int, dtype: torch.dtype) -> list[Row]:
    """Rows of a few sequences: tree nodes with their own tails, and rows of a prompt."""
    rng = np.random.default_rng(seed)
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    rows = []
    for sequence in range(int(rng.integers(1, 4))):
        length = int(rng.choice([1, 15, 16, 17, 63, 64, 65, int(rng.integers(1, 150))]))
        keys, values = normal(length, groups, size), normal(length, groups, size)
        first = int(rng.integers(0, 2))
        for _ in range(int(rng.integers(1, 6))):
            prompt = rng.random() < 0.3
            shared = int(rng.integers(1, length + 1)) if prompt else length
            tail = 0 if prompt else int(rng.integers(1, 6))
            own_keys = torch.cat((keys[:shared], normal(tail, groups, size)))
            own_values = torch.cat((values[:shared], normal(tail, groups, size)))
            rows.append(Row(normal(heads, size), own_keys, own_values, first, sequence, shared))
    return rows


def _put(layer: KVLayer, slots: Sequence[int] | np.ndarray, keys: torch.Tensor, values: torch.Tensor) -> None:
    """keys, values: one entry per slot, [slots, heads, size]."""
    layer.keys[:, slots], layer.values[:, slots] = keys.transpose(0, 1), values.transpose(0, 1)


def place(rows: list[Row], seed: int, page_size: int) -> tuple[torch.Tensor, KVLayer, AttentionInput]:
    """Queries, cache and addresses: pages and tail slots anywhere, and NaN in every slot nobody owns.

    The prefix a row finds through its page table is drawn anew, up to what its sequence shares; the rest is its tail.
    """
    rng = np.random.default_rng(seed)
    _, groups, size = rows[0].keys.shape
    lines = sorted({row.sequence for row in rows})
    pages = max(-(-row.shared // page_size) for row in rows)
    tail_slots = sum(len(row.keys) for row in rows)
    page_count = len(lines) * pages + -(-tail_slots // page_size) + 2
    order = rng.permutation(page_count)
    table = order[: len(lines) * pages].reshape(len(lines), pages).astype(np.int32)
    free = rng.permutation(np.concatenate([np.arange(p * page_size, (p + 1) * page_size) for p in order[table.size :]]))
    dtype = rows[0].keys.dtype
    layer = KVLayer(*(torch.full((groups, page_count * page_size, size), torch.nan, dtype=dtype) for _ in range(2)))
    prefix, tails, used = [], [], 0
    for row in rows:
        line = table[lines.index(row.sequence)]
        split = int(rng.integers(0, row.shared + 1)) if rng.random() < 0.3 else row.shared
        slots = [int(line[j // page_size]) * page_size + j % page_size for j in range(row.shared)]
        _put(layer, slots, row.keys[: row.shared], row.values[: row.shared])
        own = free[used : used + len(row.keys) - row.shared]
        used += len(own)
        _put(layer, own, row.keys[row.shared :], row.values[row.shared :])
        prefix.append(split)
        tails.append([*slots[split:], *own])
    width = max(len(tail) for tail in tails)

    def index(values: object) -> torch.Tensor:
        return torch.tensor(np.asarray(values), dtype=torch.int32)

    where = AttentionInput(
        positions_T=torch.zeros(len(rows), dtype=torch.int64),
        slots_T=torch.zeros(len(rows), dtype=torch.int64),
        sequence_T=index([lines.index(row.sequence) for row in rows]),
        page_table_BP=index(table),
        prefix_T=index(prefix),
        tail_TE=index([[*tail, *[0] * (width - len(tail))] for tail in tails]).reshape(len(rows), width),
        tail_len_T=index([len(tail) for tail in tails]),
        first_T=index([row.first for row in rows]),
        page_size=page_size,
    )
    return torch.stack([row.query for row in rows]), layer, where


def dense(row: Row, scale: float, window: int, softcap: float) -> torch.Tensor:
    """The same attention in double precision over the row's plain list of keys, with a mask."""
    groups = row.keys.shape[1]
    repeat = len(row.query) // groups
    keys = row.keys.double().repeat_interleave(repeat, 1)
    values = row.values.double().repeat_interleave(repeat, 1)
    scores = torch.einsum("hk,nhk->hn", row.query.double(), keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    key = torch.arange(len(row.keys))
    seen = (key >= row.first) & ((key >= len(row.keys) - window) if window else True)
    if not seen.any():
        return torch.zeros_like(row.query, dtype=torch.float64)
    return torch.einsum("hn,nhk->hk", scores.masked_fill(~seen, -torch.inf).softmax(-1), values)
