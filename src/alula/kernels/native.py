"""The native CPU set: C++ kernels (csrc/) with run-time dispatch over the levels of docs/architecture.md.

All levels give the same bits, whatever the thread count. Row-invariant by construction: no sum is split, and its order
depends on the row's own values only. This module checks arguments and hands addresses over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from alula.kernels.blocks import BlockWeight
from alula.kernels.checks import (
    FLOATS,
    check_activation,
    check_attention,
    check_logits,
    check_residual,
    check_rope,
    check_rows,
    check_slots,
    check_where,
)
from alula.kernels.extension import _native
from alula.kernels.fused import FusedStack
from alula.kernels.fused_pair import FusedPair
from alula.kernels.packed import NativeLinear
from alula.kernels.padded import PaddedLinear
from alula.kernels.pair import PairLayer, PreparedPair, SteppedPair
from alula.kernels.products import LinearPath, Products
from alula.kernels.protocol import Activation, HeadNorm, Linear, Numerics, RopeTable
from alula.kernels.sampler import NativeSampler
from alula.kernels.stack import PreparedStack, Stack, SteppedStack
from alula.kernels.trees import NativeCandidates

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from alula.cache.pool import KVLayer
    from alula.tree import AttentionInput, IntArray

BF16 = torch.bfloat16


class NativeKernels:
    """Implements `protocol.Kernels` for CPU tensors.

    level: `avx512vnni`, `avx512`, `avxvnni`, `avx2`, `dotprod` or `portable`, or None for the first of them that this
    CPU has. linear: see `Products`.
    """

    name = "native"
    row_invariant = True

    def __init__(self, level: str | None = None, linear: LinearPath = "auto") -> None:
        levels = _native.levels()
        self.level_name = level or levels[0]
        if self.level_name not in levels:
            raise ValueError(f"level is {level!r}: this CPU has {', '.join(levels)}")
        self.level = _native.Level(self.level_name)
        self.products = Products(self.level, linear)
        self.weight_format = self.products.weight_format
        self.sampler = NativeSampler(self.level)
        self._where: tuple[AttentionInput, torch.Tensor | None, _native.Where] | None = None

    def describe(self) -> Numerics:
        threads = torch.get_num_threads()
        return {"set": self.name, "level": self.level_name, "linear": self.products.describe(), "threads": threads}

    def release_threads(self) -> None:
        _native.release_threads()

    def candidates(self, roots_B: IntArray, limits_B3: IntArray, floors_B: NDArray[np.float64]) -> NativeCandidates:
        return NativeCandidates(roots_B, limits_B3, floors_B)

    def prepare_linear(
        self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> NativeLinear | PaddedLinear:
        return self.products.prepare(weight_OI, bias_O, out_dtype or weight_OI.dtype)

    def prepare_blocks(
        self, weight: BlockWeight, bias_O: torch.Tensor | None = None, *, out_dtype: torch.dtype
    ) -> NativeLinear:
        return self.products.prepare_blocks(weight, bias_O, out_dtype)

    def prepare_stack(self, stack: Stack) -> PreparedStack:
        linears = [_native_linears(layer.linears) for layer in stack.layers]
        fused = [found for found in linears if found is not None]
        if len(fused) == len(linears):
            return FusedStack(self.level, stack, fused, self._resolved)
        return SteppedStack(self, stack)

    def prepare_pair(self, pair: PairLayer) -> PreparedPair:
        linears = _native_linears(pair.layer.linears)
        return SteppedPair(self, pair) if linears is None else FusedPair(self.level, pair, linears, self._resolved)

    def linear(self, x_TI: torch.Tensor, linear: Linear) -> torch.Tensor:
        check_rows("x", x_TI, linear.in_features)
        return self.products.multiply(x_TI, linear)

    def rms_norm(
        self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, *, round_last: bool = False
    ) -> torch.Tensor:
        check_rows("x", x_TD, weight_D.shape[0])
        y_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
        self._norm(x_TD, None, weight_D, eps, round_last, y_TD, None)
        return y_TD

    def add_rms_norm(
        self,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor,
        weight_D: torch.Tensor,
        eps: float,
        *,
        round_last: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        check_rows("x", x_TD, weight_D.shape[0])
        check_residual(x_TD, residual_TD)
        y_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
        sum_TD = torch.empty_like(y_TD)
        self._norm(x_TD, residual_TD, weight_D, eps, round_last, y_TD, sum_TD)
        return y_TD, sum_TD

    def _norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        round_last: bool,
        y: torch.Tensor,
        total: torch.Tensor | None,
    ) -> None:
        weight = weight if weight.is_contiguous() else weight.contiguous()
        residual_at, residual_stride = (0, 0) if residual is None else (residual.data_ptr(), residual.stride(0))
        self.level.norm(
            x.data_ptr(),
            x.stride(0),
            x.dtype == BF16,
            residual_at,
            residual_stride,
            weight.data_ptr(),
            _is_bf16(weight),
            y.data_ptr(),
            0 if total is None else total.data_ptr(),
            x.shape[0],
            x.shape[1],
            eps,
            round_last,
            torch.get_num_threads(),
        )

    def rope_write(
        self,
        qkv_TF: torch.Tensor,
        layer: KVLayer,
        where: AttentionInput,
        rope: RopeTable,
        *,
        heads: int,
        norm: HeadNorm | None = None,
    ) -> torch.Tensor:
        check_rope(qkv_TF, layer, where, rope, heads)
        resolved = self._resolved(where)
        check_slots(resolved.highest_slot, layer.slots)
        if resolved.highest_position >= len(rope.cos_MK):
            raise ValueError(f"position {resolved.highest_position} is past the rope table: build it longer")
        rows, (groups, slots, head_dim) = len(qkv_TF), layer.keys.shape
        q_THK = torch.empty((rows, heads, head_dim), dtype=qkv_TF.dtype)
        norm_at = (0, 0, False, 0.0, False)
        if norm is not None:
            query, key = norm.query_K, norm.key_K
            norm_at = (query.data_ptr(), key.data_ptr(), _is_bf16(query), norm.eps, norm.round_last)
        self.level.rope(
            qkv_TF.data_ptr(),
            qkv_TF.stride(0),
            qkv_TF.dtype == BF16,
            q_THK.data_ptr(),
            layer.keys.data_ptr(),
            layer.values.data_ptr(),
            _is_bf16(layer.keys),
            slots,
            rope.cos_MK.data_ptr(),
            rope.sin_MK.data_ptr(),
            where.positions_T.data_ptr(),
            where.slots_T.data_ptr(),
            *norm_at,
            rows,
            heads,
            groups,
            head_dim,
            torch.get_num_threads(),
        )
        return q_THK

    def gated(self, gate_up_TI: torch.Tensor, activation: Activation) -> torch.Tensor:
        check_activation(gate_up_TI, activation)
        rows, width = len(gate_up_TI), gate_up_TI.shape[1] // 2
        y_TI = torch.empty((rows, width), dtype=gate_up_TI.dtype)
        gelu = activation == "gelu_tanh"
        self.level.gated(
            gate_up_TI.data_ptr(),
            gate_up_TI.stride(0),
            gate_up_TI.dtype == BF16,
            y_TI.data_ptr(),
            rows,
            width,
            gelu,
            torch.get_num_threads(),
        )
        return y_TI

    def attention(
        self,
        q_THK: torch.Tensor,
        layer: KVLayer,
        where: AttentionInput,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        check_attention(q_THK, layer, where, window, softcap)
        q_THK = q_THK.contiguous()
        resolved = self._resolved(where)
        check_slots(resolved.highest_slot, layer.slots)
        y_THK = torch.empty_like(q_THK)
        self.level.attention(
            resolved,
            q_THK.data_ptr(),
            y_THK.data_ptr(),
            q_THK.dtype == BF16,
            layer.keys.data_ptr(),
            layer.values.data_ptr(),
            _is_bf16(layer.keys),
            layer.slots,
            q_THK.shape[1],
            layer.keys.shape[0],
            layer.keys.shape[2],
            window,
            scale,
            softcap,
            torch.get_num_threads(),
        )
        return y_THK

    def _resolved(self, where: AttentionInput, keep: torch.Tensor | None = None) -> _native.Where:
        """`where`, or some rows of it, with every key's slot looked up; kept for the layers of the same forward."""
        known = self._where
        if known is not None and known[0] is where and known[1] is keep:
            return known[2]
        check_where(where)
        sequences, pages = where.page_table_BP.shape
        resolved = _native.Where(
            where.sequence_T.data_ptr(),
            where.page_table_BP.data_ptr(),
            where.prefix_T.data_ptr(),
            where.tail_TE.data_ptr(),
            where.tail_len_T.data_ptr(),
            where.first_T.data_ptr(),
            where.positions_T.data_ptr(),
            where.slots_T.data_ptr(),
            where.prefix_T.shape[0],
            sequences,
            pages,
            where.tail_TE.shape[1],
            where.page_size,
            0 if keep is None else keep.data_ptr(),
            -1 if keep is None else keep.shape[0],
        )
        self._where = (where, keep, resolved)
        return resolved

    def softcap(self, x_RV: torch.Tensor, cap: float) -> torch.Tensor:
        check_rows("x", x_RV, x_RV.shape[-1])
        y_RV = torch.empty_like(x_RV, memory_format=torch.contiguous_format)
        x, threads = (x_RV.data_ptr(), x_RV.stride(0), x_RV.dtype == BF16), torch.get_num_threads()
        self.level.softcap(*x, y_RV.data_ptr(), len(x_RV), x_RV.shape[1], cap, threads)
        return y_RV

    def argmax(self, x_RV: torch.Tensor) -> torch.Tensor:
        check_logits(x_RV)
        index_R = torch.empty(x_RV.shape[0], dtype=torch.int64)
        self.level.argmax(*_rows_of(x_RV), index_R.data_ptr(), torch.get_num_threads())
        return index_R

    def topk(self, x_RV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        check_logits(x_RV, k)
        values_Rk = torch.empty((x_RV.shape[0], k))
        index_Rk = torch.empty((x_RV.shape[0], k), dtype=torch.int64)
        threads = torch.get_num_threads()
        self.level.topk(*_rows_of(x_RV), k, values_Rk.data_ptr(), index_Rk.data_ptr(), threads)
        return values_Rk, index_Rk

    def logsumexp(self, x_RV: torch.Tensor) -> torch.Tensor:
        check_logits(x_RV)
        y_R = torch.empty(x_RV.shape[0])
        self.level.logsumexp(*_rows_of(x_RV), y_R.data_ptr(), torch.get_num_threads())
        return y_R

    def softmax(self, x_RV: torch.Tensor) -> torch.Tensor:
        return self._softmax(x_RV, logarithm=False)

    def log_softmax(self, x_RV: torch.Tensor) -> torch.Tensor:
        return self._softmax(x_RV, logarithm=True)

    def _softmax(self, x_RV: torch.Tensor, logarithm: bool) -> torch.Tensor:
        check_logits(x_RV)
        y_RV = torch.empty(tuple(x_RV.shape))
        self.level.softmax(*_rows_of(x_RV), y_RV.data_ptr(), logarithm, torch.get_num_threads())
        return y_RV


def _native_linears(linears: Sequence[Linear]) -> list[NativeLinear] | None:
    """Products that can be fused; None if torch does one of them."""
    found = [linear for linear in linears if isinstance(linear, NativeLinear)]
    return found if len(found) == len(linears) else None


def _rows_of(x: torch.Tensor) -> tuple[int, int, int, int]:
    """Address, stride, rows, width."""
    return x.data_ptr(), x.stride(0), x.shape[0], x.shape[1]


def _is_bf16(x: torch.Tensor) -> bool:
    if x.dtype not in FLOATS:
        raise ValueError(f"dtype is {x.dtype}: give float32 or bfloat16")
    return x.dtype == BF16
