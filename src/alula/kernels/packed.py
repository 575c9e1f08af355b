"""Weights as the native products read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from alula.kernels.blocks import BlockWeight
from alula.kernels.extension import _native

Format = Literal["fp32", "bf16", "int8", "q8", "q4"]
"""int8: whole numbers with a bf16 scale for every 32 inputs; see csrc/quantised.h. q8, q4: `BlockWeight`s."""


@dataclass(frozen=True)
class NativeLinear:
    """A packed weight; `panels` and `bias_O` (fp32) hold the memory that `packed` points at."""

    packed: _native.PackedLinear
    panels: torch.Tensor
    bias_O: torch.Tensor | None
    format: Format
    in_features: int
    out_features: int
    out_dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.panels.nbytes


def pack(
    level: _native.Level,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    out_dtype: torch.dtype,
    *,
    quantised: bool,
) -> NativeLinear:
    """The weight, fp32 or bf16, packed as it is or rounded to int8."""
    (outs, ins), bf16 = weight_OI.shape, weight_OI.dtype == torch.bfloat16
    format: Format = "int8" if quantised else "bf16" if bf16 else "fp32"
    weight_OI, panels = weight_OI.contiguous(), _panels(format, ins, outs)
    at, threads = panels.data_ptr(), torch.get_num_threads()
    level.pack(weight_OI.data_ptr(), bf16, format, at, ins, outs, threads)
    return _prepared(level, format, panels, bias_O, (outs, ins), out_dtype)


def pack_blocks(
    level: _native.Level, weight: BlockWeight, bias_O: torch.Tensor | None, out_dtype: torch.dtype
) -> NativeLinear:
    """The weight as it is, in the order of the product."""
    outs, ins = weight.shape
    panels = _panels(weight.format, ins, outs)
    numbers, scales = weight.numbers_OI.contiguous(), weight.scales_OG.contiguous()
    least = None if weight.least_OG is None else weight.least_OG.contiguous()
    least_at, threads = 0 if least is None else least.data_ptr(), torch.get_num_threads()
    addresses = (numbers.data_ptr(), scales.data_ptr(), least_at)
    level.pack_blocks(*addresses, weight.format, panels.data_ptr(), ins, outs, threads)
    return _prepared(level, weight.format, panels, bias_O, weight.shape, out_dtype)


def _panels(format: Format, ins: int, outs: int) -> torch.Tensor:
    panels = torch.empty(_native.packed_bytes(format, ins, outs), dtype=torch.uint8)
    _native.advise_large_pages(panels.data_ptr(), panels.nbytes)
    return panels


def _prepared(
    level: _native.Level,
    format: Format,
    panels: torch.Tensor,
    bias_O: torch.Tensor | None,
    shape: tuple[int, int],
    out_dtype: torch.dtype,
) -> NativeLinear:
    outs, ins = shape
    bias = None if bias_O is None else bias_O.float().contiguous()
    bias_at = 0 if bias is None else bias.data_ptr()
    bf16 = out_dtype == torch.bfloat16
    packed = _native.PackedLinear(level, panels.data_ptr(), format, bias_at, ins, outs, bf16)
    return NativeLinear(packed, panels, bias, format, ins, outs, out_dtype)
