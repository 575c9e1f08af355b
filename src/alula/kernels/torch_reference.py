"""The reference set: plain torch on any device, clear, and slow where it must be.

Row-invariant by construction: everything but the matrix product is made of `exact` steps, and the product
runs at probed row counts (`padded`).
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from alula.kernels import exact
from alula.kernels.blocks import BlockWeight
from alula.kernels.checks import (
    check_activation,
    check_attention,
    check_logits,
    check_residual,
    check_rope,
    check_rows,
    check_weight,
)
from alula.kernels.padded import PaddedLinear, RowProbe, aligned
from alula.kernels.pair import PairLayer, PreparedPair, SteppedPair
from alula.kernels.protocol import Activation, Candidates, HeadNorm, Linear, Numerics, RopeTable, Sampler, WeightFormat
from alula.kernels.stack import PreparedStack, Stack, SteppedStack

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from alula.cache.pool import KVLayer
    from alula.tree import AttentionInput, IntArray

KEY_BLOCK = 64
_ROW_BLOCK = 8
_GELU_SCALE = math.sqrt(2 / math.pi)
_GELU_CUBE = 0.044715


class TorchKernels:
    """Implements `protocol.Kernels`."""

    name = "torch"
    row_invariant = True
    weight_format: WeightFormat | None = None
    sampler: Sampler | None = None

    def __init__(self) -> None:
        self.probe = RowProbe()

    def describe(self) -> Numerics:
        return {"set": self.name, "threads": torch.get_num_threads(), "linear": self.probe.report()}

    def release_threads(self) -> None:
        with suppress(ImportError):  # without the extension they stay: nothing else can end them
            from alula.kernels.extension import _native

            _native.release_threads()

    def candidates(self, roots_B: IntArray, limits_B3: IntArray, floors_B: NDArray[np.float64]) -> Candidates | None:
        return None

    def prepare_linear(
        self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> PaddedLinear:
        check_weight(weight_OI, bias_O)
        out = out_dtype or weight_OI.dtype
        # torch rounds a bf16 product to bf16; fp32 results need fp32 operands.
        dtype = torch.float32 if out == torch.float32 else weight_OI.dtype
        bias_O = None if bias_O is None else bias_O.to(dtype)
        return PaddedLinear(aligned(weight_OI.to(dtype)), bias_O, out)

    def prepare_blocks(
        self, weight: BlockWeight, bias_O: torch.Tensor | None = None, *, out_dtype: torch.dtype
    ) -> PaddedLinear:
        raise ValueError("the torch kernels multiply floats only: give the weight's values")

    def prepare_stack(self, stack: Stack) -> PreparedStack:
        return SteppedStack(self, stack)

    def prepare_pair(self, pair: PairLayer) -> PreparedPair:
        return SteppedPair(self, pair)

    def linear(self, x_TI: torch.Tensor, linear: Linear) -> torch.Tensor:
        if not isinstance(linear, PaddedLinear):
            raise ValueError("linear was prepared by another kernel set: prepare it with this one")
        check_rows("x", x_TI, linear.in_features)
        y_TO = self.probe.linear(x_TI.to(linear.weight_OI.dtype), linear)
        return y_TO.to(linear.out_dtype)

    def rms_norm(
        self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, *, round_last: bool = False
    ) -> torch.Tensor:
        check_rows("x", x_TD, weight_D.shape[0])
        x = x_TD.float()
        normed = x / torch.sqrt(exact.tree_sum(x * x) / x.shape[-1] + eps)[..., None]
        if round_last:
            return (normed * weight_D.float()).to(x_TD.dtype)
        return (normed.to(x_TD.dtype).float() * weight_D.float()).to(x_TD.dtype)

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
        total = x_TD + residual_TD
        return self.rms_norm(total, weight_D, eps, round_last=round_last), total

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
        groups, _, head_dim = layer.keys.shape
        packed = qkv_TF.view(len(qkv_TF), -1, head_dim)
        q_THK, k_TGK, v_TGK = torch.split(packed, [heads, groups, groups], dim=1)
        if norm is not None:
            q_THK = self._head_norm(q_THK, norm.query_K, norm)
            k_TGK = self._head_norm(k_TGK, norm.key_K, norm)
        cos, sin = rope.cos_MK[where.positions_T], rope.sin_MK[where.positions_T]
        layer.keys[:, where.slots_T] = _rotate(k_TGK, cos, sin).to(layer.keys.dtype).transpose(0, 1)
        layer.values[:, where.slots_T] = v_TGK.to(layer.values.dtype).transpose(0, 1)
        return _rotate(q_THK, cos, sin).to(qkv_TF.dtype)

    def _head_norm(self, x_THK: torch.Tensor, weight_K: torch.Tensor, norm: HeadNorm) -> torch.Tensor:
        flat = x_THK.reshape(-1, x_THK.shape[-1])
        return self.rms_norm(flat, weight_K, norm.eps, round_last=norm.round_last).view(x_THK.shape)

    def gated(self, gate_up_TI: torch.Tensor, activation: Activation) -> torch.Tensor:
        check_activation(gate_up_TI, activation)
        gate, up = gate_up_TI.chunk(2, dim=-1)
        x = gate.float()
        if activation == "silu":
            active = x / (1 + exact.exp(-x))
        else:
            active = 0.5 * x * (1 + exact.tanh(_GELU_SCALE * (x + _GELU_CUBE * (x * x * x))))
        return active.to(gate.dtype) * up

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
        out_THK = torch.empty_like(q_THK)
        for start in range(0, len(q_THK), _ROW_BLOCK):
            rows = slice(start, start + _ROW_BLOCK)
            out_THK[rows] = _attend(q_THK[rows].float(), layer, where, rows, scale, window, softcap)
        return out_THK

    def softcap(self, x_RV: torch.Tensor, cap: float) -> torch.Tensor:
        return _capped(x_RV.float(), cap).to(x_RV.dtype)

    def argmax(self, x_RV: torch.Tensor) -> torch.Tensor:
        return self.topk(x_RV, 1)[1][:, 0]

    def topk(self, x_RV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        check_logits(x_RV, k)
        # NaN sorts first in torch; it must never win.
        ordered = torch.where(x_RV.isnan(), -math.inf, x_RV).sort(dim=-1, descending=True, stable=True)
        return ordered.values[:, :k].contiguous(), ordered.indices[:, :k].contiguous()

    def logsumexp(self, x_RV: torch.Tensor) -> torch.Tensor:
        top_R, powers_RV = _powers(x_RV)
        return top_R + exact.log(exact.tree_sum(powers_RV))

    def softmax(self, x_RV: torch.Tensor) -> torch.Tensor:
        _, powers_RV = _powers(x_RV)
        total = exact.tree_sum(powers_RV)[:, None]
        return torch.where(total > 0, powers_RV / total, 0.0)

    def log_softmax(self, x_RV: torch.Tensor) -> torch.Tensor:
        top_R, powers_RV = _powers(x_RV)
        total_R = exact.tree_sum(powers_RV)
        log_R = exact.log(torch.where(total_R > 0, total_R, 1.0))
        return (x_RV - top_R[:, None]) - log_R[:, None]


def _powers(x_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest value of each row (0 for a row of nothing but -inf), and exp of the distance to it."""
    top_R = x_RV.amax(dim=-1)
    top_R = torch.where(top_R == -math.inf, 0.0, top_R)
    return top_R, exact.exp(x_RV - top_R[:, None])


def _rotate(x_THK: torch.Tensor, cos_TK: torch.Tensor, sin_TK: torch.Tensor) -> torch.Tensor:
    low, high = x_THK.float().chunk(2, dim=-1)
    cos, sin = cos_TK[:, None], sin_TK[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def _capped(x: torch.Tensor, cap: float) -> torch.Tensor:
    return cap * exact.tanh(x / cap)


def _key_slots(where: AttentionInput, rows: slice, keys_S: torch.Tensor) -> torch.Tensor:
    """Slot of logical key `keys_S` for each row, [C, S]; any valid slot where the row has no such key."""
    prefix = where.prefix_T[rows, None].long()
    size = where.page_size
    table = where.page_table_BP[where.sequence_T[rows].long()].long()
    page = (keys_S // size).clamp(max=max(table.shape[1] - 1, 0)).expand(len(table), -1)
    in_prefix = table.gather(1, page) * size + keys_S % size if table.shape[1] else torch.zeros_like(page)
    tail = where.tail_TE[rows].long()
    if not tail.shape[1]:
        return in_prefix
    in_tail = tail.gather(1, (keys_S - prefix).clamp(0, tail.shape[1] - 1))
    return torch.where(keys_S < prefix, in_prefix, in_tail)


def _attend(
    q_CHK: torch.Tensor,
    layer: KVLayer,
    where: AttentionInput,
    rows: slice,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """Online softmax (Milakov and Gimelshein, arXiv 1805.02867) over blocks anchored at logical key 0."""
    groups, _, head_dim = layer.keys.shape
    q = q_CHK.view(len(q_CHK), groups, -1, 1, head_dim)
    count = (where.prefix_T + where.tail_len_T)[rows].long()
    first = where.first_T[rows].long()
    if window:
        first = torch.maximum(first, count - window)
    top = torch.full((*q.shape[:3], 1), -math.inf, device=q.device)
    total = torch.zeros_like(top)
    mixed = torch.zeros(*q.shape[:3], head_dim, device=q.device)
    begin = max(int(first.min()), 0) // KEY_BLOCK * KEY_BLOCK
    for start in range(begin, int(count.max()), KEY_BLOCK):
        keys_S = torch.arange(start, start + KEY_BLOCK, device=q.device)
        seen = (keys_S >= first[:, None]) & (keys_S < count[:, None])
        slots = torch.where(seen, _key_slots(where, rows, keys_S), 0)
        k, v = (
            torch.where(seen[:, None, :, None], cache[:, slots].transpose(0, 1).float(), 0.0)[:, :, None]
            for cache in (layer.keys, layer.values)
        )
        scores = exact.tree_sum(q * k) * scale
        scores = _capped(scores, softcap) if softcap else scores
        scores = torch.where(seen[:, None, None], scores, -math.inf)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        safe = torch.where(new_top == -math.inf, 0.0, new_top)
        shrink, weights = exact.exp(top - safe), exact.exp(scores - safe)
        total = total * shrink + exact.tree_sum(weights)[..., None]
        mixed = mixed * shrink + exact.tree_sum(weights[..., None] * v, dim=-2)
        top = new_top
    return torch.where(total > 0, mixed / total, 0.0).view(q_CHK.shape)
