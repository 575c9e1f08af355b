"""torch's matrix product made row-invariant: run it only at row counts that a probe found harmless.

Whether torch's result for a row depends on how many rows are beside it differs by shape, dtype, thread count and
library. So every row count is tried once, on the real weight, in the thread that asks, against tiles of a fixed
number of rows; the first padding that gives the same bits is kept. Operands start at cache lines, because the same
product of the same numbers at another address was seen to differ.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

TILE = 16
_PADDINGS = (1, 2, 4, 8, TILE)
_PROBED_VALUES = 4096  # other paths round only some results differently, so a few would not tell
_MOST_DRAWS = 64
_ALIGNMENT = 64


@dataclass(frozen=True)
class PaddedLinear:
    """A weight as torch multiplies it: [O, I] in the dtype of the product."""

    weight_OI: torch.Tensor
    bias_O: torch.Tensor | None
    out_dtype: torch.dtype

    @property
    def in_features(self) -> int:
        return self.weight_OI.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight_OI.shape[0]

    @property
    def nbytes(self) -> int:
        return self.weight_OI.nbytes


_Shape = tuple[int, int, torch.dtype, str, int, int]


@dataclass
class RowProbe:
    """Row counts already tried. `tiles`: rows per tile by weight shape. `plans`: padded rows, 0 for tiles."""

    tiles: dict[_Shape, int] = field(default_factory=dict)
    plans: dict[tuple[_Shape, int], int] = field(default_factory=dict)

    def linear(self, x_TI: torch.Tensor, linear: PaddedLinear) -> torch.Tensor:
        """x W^T + b in the weight's dtype, each row as if alone in a tile."""
        shape = _shape_of(linear)
        if shape not in self.tiles:
            self.tiles[shape] = _find_tile(linear)
        tile, rows = self.tiles[shape], len(x_TI)
        if (shape, rows) not in self.plans:
            self.plans[shape, rows] = _find_padding(linear, rows, tile)
        padded = self.plans[shape, rows]
        return _product(x_TI, linear, padded) if padded else _tiled(x_TI, linear, tile)

    def report(self) -> str:
        """Readable summary: per weight shape, the tile, and the row counts that need padding or tiles."""
        lines = []
        for shape, tile in self.tiles.items():
            plans = {rows: padded for (key, rows), padded in self.plans.items() if key == shape}
            changed = {rows: padded or f"tiles of {tile}" for rows, padded in plans.items() if padded != rows}
            lines.append(f"{shape[1]}x{shape[0]} {shape[2]} tile {tile} rows {sorted(plans)} padded {changed}")
        return "; ".join(lines)


def _shape_of(linear: PaddedLinear) -> _Shape:
    weight = linear.weight_OI
    where = f"{weight.device}{'' if linear.bias_O is None else ' bias'}"
    outs, ins = weight.shape
    return (outs, ins, weight.dtype, where, torch.get_num_threads(), threading.get_ident())


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x itself, or a copy, contiguous and at the start of a cache line: some products round by the address."""
    return x if x.is_contiguous() and x.data_ptr() % _ALIGNMENT == 0 else x.clone(memory_format=torch.contiguous_format)


def _product(x_TI: torch.Tensor, linear: PaddedLinear, rows: int) -> torch.Tensor:
    count = len(x_TI)
    if rows != count:
        x_TI = F.pad(x_TI, (0, 0, 0, rows - count))
    return F.linear(aligned(x_TI), linear.weight_OI, linear.bias_O)[:count]


def _tiled(x_TI: torch.Tensor, linear: PaddedLinear, tile: int) -> torch.Tensor:
    parts = [_product(x_TI[start : start + tile], linear, tile) for start in range(0, len(x_TI), tile)]
    return torch.cat(parts) if parts else x_TI.new_empty(0, linear.out_features)


def _samples(linear: PaddedLinear, rows: int) -> Iterator[torch.Tensor]:
    """Random rows, in as many draws as it takes to compare enough results."""
    weight = linear.weight_OI
    random = torch.Generator().manual_seed(rows)
    draws = min(-(-_PROBED_VALUES // max(rows * linear.out_features, 1)), _MOST_DRAWS)
    for _ in range(draws):
        yield torch.randn(rows, linear.in_features, generator=random).to(weight.device, weight.dtype)


def _find_tile(linear: PaddedLinear) -> int:
    """TILE if a row's place in a tile does not matter, else 1: single rows are one fixed shape by themselves."""
    for x_TI in _samples(linear, TILE):
        y_TO = _product(x_TI, linear, TILE)
        for shift in range(1, TILE):
            if not torch.equal(_product(x_TI.roll(shift, 0), linear, TILE), y_TO.roll(shift, 0)):
                return 1
    return TILE


def _find_padding(linear: PaddedLinear, rows: int, tile: int) -> int:
    """The least padded row count whose results equal the tiles' bit for bit, or 0."""
    candidates = [n for n in sorted({-(-rows // multiple) * multiple for multiple in _PADDINGS}) if n]
    for x_TI in _samples(linear, rows):
        expected = _tiled(x_TI, linear, tile)
        candidates = [n for n in candidates if torch.equal(_product(x_TI, linear, n), expected)]
    return min(candidates, default=0)
