"""Matrix products of the native set: which way each goes, and how its weight is prepared for it."""

from __future__ import annotations

from collections import Counter
from typing import Literal, get_args

import torch

from alula.kernels.blocks import BlockWeight
from alula.kernels.checks import check_blocks, check_weight
from alula.kernels.extension import _native
from alula.kernels.packed import NativeLinear, pack, pack_blocks
from alula.kernels.padded import PaddedLinear, RowProbe, aligned
from alula.kernels.protocol import Linear, WeightFormat

LinearPath = Literal["auto", "native", "torch", "int8", "file"]
_FORMATS: dict[LinearPath, WeightFormat] = {"int8": "int8", "file": "file"}


class Products:
    """Prepares weights and multiplies with them.

    linear: which product bf16 results use: `native`, `torch` (probed row padding), or `auto`: torch's where it reports
        native bf16 support. Products with fp32 results, LM heads among them, are native in any case, since torch
        would round them to bf16. `int8`: all are native ones of whole numbers (csrc/quantised.h), with weights and
        rows rounded in groups of 32 inputs. `file`: as int8, and weights that come as `BlockWeight` stay what they
        are (csrc/nibbles.h). ValueError for any other.
    """

    def __init__(self, level: _native.Level, linear: LinearPath) -> None:
        if linear not in get_args(LinearPath):
            raise ValueError(f"linear is {linear!r}: give {', '.join(map(repr, get_args(LinearPath)))}")
        self.weight_format = _FORMATS.get(linear)
        self.probe = RowProbe()
        self._level = level
        self._torch = linear == "torch" or (linear == "auto" and _torch_multiplies_bf16())
        self._prepared: Counter[str] = Counter()

    def describe(self) -> str:
        """The way, and for `file` how many weights of each format there are."""
        if self.weight_format == "int8":
            return f"int8/{_native.GROUP}"
        if self.weight_format == "file":
            counts = ", ".join(f"{count} {format}" for format, count in sorted(self._prepared.items()))
            return f"file ({counts})"
        return f"torch ({self.probe.report()})" if self._torch else "native"

    def prepare(
        self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, out_dtype: torch.dtype
    ) -> NativeLinear | PaddedLinear:
        """See `Kernels.prepare_linear`."""
        check_weight(weight_OI, bias_O)
        if self._torch and weight_OI.dtype == out_dtype == torch.bfloat16:
            return PaddedLinear(aligned(weight_OI), None if bias_O is None else bias_O.bfloat16(), out_dtype)
        quantised = self.weight_format is not None
        return self._counted(pack(self._level, weight_OI, bias_O, out_dtype, quantised=quantised))

    def prepare_blocks(self, weight: BlockWeight, bias_O: torch.Tensor | None, out_dtype: torch.dtype) -> NativeLinear:
        """See `Kernels.prepare_blocks`."""
        check_blocks(weight, bias_O)
        if self.weight_format != "file":
            raise ValueError("the weight is quantised already, and linear is not 'file': give its values instead")
        return self._counted(pack_blocks(self._level, weight, bias_O, out_dtype))

    def multiply(self, x_TI: torch.Tensor, linear: Linear) -> torch.Tensor:
        """See `Kernels.linear`."""
        if isinstance(linear, PaddedLinear):
            return self.probe.linear(x_TI.to(linear.weight_OI.dtype), linear).to(linear.out_dtype)
        if not isinstance(linear, NativeLinear):
            raise ValueError("linear was prepared by another kernel set: prepare it with this one")
        rows, threads = x_TI.shape[0], torch.get_num_threads()
        y_TO = torch.empty((rows, linear.out_features), dtype=linear.out_dtype)
        if rows:
            x = (x_TI.data_ptr(), x_TI.stride(0), x_TI.dtype == torch.bfloat16)
            linear.packed.multiply(*x, rows, y_TO.data_ptr(), threads)
        return y_TO

    def _counted(self, linear: NativeLinear) -> NativeLinear:
        self._prepared[linear.format] += 1
        return linear


def _torch_multiplies_bf16() -> bool:
    """Whether this CPU multiplies bf16 natively under torch, which then beats widening to fp32."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return bool(supported and supported())
