"""Weights as the native products read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from alula.kernels import _native

Format = Literal["fp32", "bf16", "int8"]
"""int8: whole numbers with a bf16 scale for every 32 inputs; see csrc/quantised.h."""


@dataclass(frozen=True)
class NativeLinear:
    """A packed weight; `panels` and `bias_O` (fp32) hold the memory that `packed` points at."""

    packed: _native.PackedLinear
    panels: torch.Tensor
    bias_O: torch.Tensor | None
    in_features: int
    out_features: int
    out_dtype: torch.dtype


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
    weight_OI = weight_OI.contiguous()
    panels = torch.empty(_native.packed_bytes(format, ins, outs), dtype=torch.uint8)
    at, threads = panels.data_ptr(), torch.get_num_threads()
    _native.advise_large_pages(at, panels.nbytes)
    level.pack(weight_OI.data_ptr(), bf16, format, at, ins, outs, threads)
    bias = None if bias_O is None else bias_O.float().contiguous()
    bias_at = 0 if bias is None else bias.data_ptr()
    packed = _native.PackedLinear(level, at, format, bias_at, ins, outs, out_dtype == torch.bfloat16)
    return NativeLinear(packed, panels, bias, ins, outs, out_dtype)
