"""Argument checks shared by the kernel sets. Each raises ValueError with one sentence: the field and the mend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from alula.kernels.blocks import BLOCK, BlockWeight
from alula.kernels.protocol import RopeTable

if TYPE_CHECKING:
    from alula.cache.pool import KVLayer
    from alula.tree import AttentionInput

FLOATS = (torch.float32, torch.bfloat16)


def check_rows(name: str, x: torch.Tensor, width: int) -> None:
    """x is [rows, width], fp32 or bf16, contiguous in its last dimension."""
    if x.dtype not in FLOATS:
        raise ValueError(f"{name} has dtype {x.dtype}: give float32 or bfloat16")
    if x.ndim != 2 or x.shape[1] != width:
        raise ValueError(f"{name} has shape {tuple(x.shape)}: give rows of width {width}")
    if x.stride(1) != 1 and width > 1:
        raise ValueError(f"{name} is strided in its last dimension: make it contiguous")


def check_residual(x_TD: torch.Tensor, residual_TD: torch.Tensor) -> None:
    check_rows("residual", residual_TD, x_TD.shape[1])
    if residual_TD.dtype != x_TD.dtype or len(residual_TD) != len(x_TD):
        raise ValueError(f"residual is {residual_TD.dtype} {tuple(residual_TD.shape)}: give it like x")


def check_weight(weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> None:
    if weight_OI.ndim != 2 or weight_OI.dtype not in FLOATS:
        raise ValueError(
            f"weight has shape {tuple(weight_OI.shape)} and dtype {weight_OI.dtype}: "
            "give [out, in] in float32 or bfloat16"
        )
    if bias_O is not None and tuple(bias_O.shape) != (weight_OI.shape[0],):
        raise ValueError(f"bias has shape {tuple(bias_O.shape)}: give one value per output, [{weight_OI.shape[0]}]")


def check_blocks(weight: BlockWeight, bias_O: torch.Tensor | None) -> None:
    (outs, ins), q4 = weight.shape, weight.format == "q4"
    numbers = torch.uint8 if q4 else torch.int8
    if ins % BLOCK or weight.numbers_OI.dtype != numbers:
        raise ValueError(
            f"weight has {weight.numbers_OI.dtype} numbers of shape {(outs, ins)}: give {numbers} ones, with inputs a "
            f"multiple of {BLOCK}"
        )
    if q4 != (weight.least_OG is not None):
        raise ValueError(f"weight is {weight.format}: give least values for q4, and none for q8")
    for halves in (weight.scales_OG, weight.least_OG):
        if halves is not None and (halves.dtype != torch.float16 or tuple(halves.shape) != (outs, ins // BLOCK)):
            raise ValueError(
                f"weight has {halves.dtype} scales or least values of shape {tuple(halves.shape)}: give float16, one "
                f"per group, {(outs, ins // BLOCK)}"
            )
    if bias_O is not None and tuple(bias_O.shape) != (outs,):
        raise ValueError(f"bias has shape {tuple(bias_O.shape)}: give one value per output, [{outs}]")


def check_activation(gate_up: torch.Tensor, activation: str) -> None:
    if activation not in ("silu", "gelu_tanh"):
        raise ValueError(f"activation is {activation!r}: give 'silu' or 'gelu_tanh'")
    if gate_up.ndim != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"gate_up has shape {tuple(gate_up.shape)}: give rows of an even width, gates first")
    check_rows("gate_up", gate_up, gate_up.shape[1])


def check_layer(layer: KVLayer) -> None:
    keys, values = layer.keys, layer.values
    if keys.ndim != 3 or keys.shape != values.shape or keys.dtype != values.dtype or keys.dtype not in FLOATS:
        raise ValueError("layer holds keys and values that differ: give both [heads, slots, size] in one dtype")
    if not (keys.is_contiguous() and values.is_contiguous()):
        raise ValueError("layer holds strided keys or values: make them contiguous")


def check_slots(highest: int, slots: int) -> None:
    """The highest slot that is read or written lies in the cache."""
    if highest >= slots:
        raise ValueError(f"slot {highest} is outside the cache of {slots}: widen the cache")


def check_attention_width(layer: KVLayer, groups: int, head_dim: int) -> None:
    """The cache is as wide as the layer's keys."""
    held = (layer.keys.shape[0], layer.keys.shape[2])
    if held != (groups, head_dim):
        raise ValueError(f"layer holds keys of {held[0]} heads of {held[1]}: give {groups} of {head_dim}")


def check_same(name: str, tensors: Sequence[torch.Tensor]) -> None:
    """All are contiguous and of one dtype, fp32 or bf16."""
    if len({tensor.dtype for tensor in tensors}) != 1 or tensors[0].dtype not in FLOATS:
        raise ValueError(f"{name} have several dtypes: give all in float32 or all in bfloat16")
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError(f"{name} are strided: make them contiguous")


def check_rope(qkv_TF: torch.Tensor, layer: KVLayer, where: AttentionInput, rope: RopeTable, heads: int) -> None:
    check_layer(layer)
    groups, _, head_dim = layer.keys.shape
    check_rows("qkv", qkv_TF, (heads + 2 * groups) * head_dim)
    cos, sin = rope.cos_MK, rope.sin_MK
    if head_dim % 2 or cos.shape[1] != head_dim // 2 or cos.shape != sin.shape:
        raise ValueError(f"rope table has width {cos.shape[1]}: give half the (even) head size {head_dim}")
    if cos.dtype != torch.float32 or sin.dtype != torch.float32 or not (cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError("rope table is strided or not float32: make it contiguous float32")
    if len(where.positions_T) != len(qkv_TF):
        raise ValueError(f"positions_T has {len(where.positions_T)} entries: give one per row, {len(qkv_TF)}")


def check_attention(q_THK: torch.Tensor, layer: KVLayer, where: AttentionInput, window: int, softcap: float) -> None:
    check_layer(layer)
    groups, _, head_dim = layer.keys.shape
    if q_THK.ndim != 3 or q_THK.shape[2] != head_dim or q_THK.shape[1] % groups or q_THK.dtype not in FLOATS:
        raise ValueError(f"q has shape {tuple(q_THK.shape)}: give [rows, a multiple of {groups} heads, {head_dim}]")
    if len(q_THK) != len(where.prefix_T):
        raise ValueError(f"q has {len(q_THK)} rows but the attention input {len(where.prefix_T)}: give one per row")
    if window < 0 or softcap < 0:
        raise ValueError(f"window is {window} and softcap {softcap}: give values of at least 0 (0 is off)")


def check_where(where: AttentionInput) -> None:
    """Index tensors are contiguous, of the documented dtypes and of matching lengths."""
    rows = where.prefix_T.shape[0]
    wide = ("positions_T", "slots_T")
    for name in (*wide, "sequence_T", "prefix_T", "tail_TE", "tail_len_T", "first_T", "page_table_BP"):
        index = getattr(where, name)
        dtype = torch.int64 if name in wide else torch.int32
        if index.dtype != dtype or not index.is_contiguous():
            raise ValueError(f"{name} is {index.dtype} or strided: give contiguous {dtype}")
        if name != "page_table_BP" and index.shape[0] != rows:
            raise ValueError(f"{name} has {index.shape[0]} rows: give {rows}, like prefix_T")


def check_logits(x_RV: torch.Tensor, k: int = 1) -> None:
    if x_RV.dtype != torch.float32:
        raise ValueError(f"logits have dtype {x_RV.dtype}: give float32")
    check_rows("logits", x_RV, x_RV.shape[-1])
    if not 1 <= k <= x_RV.shape[1]:
        raise ValueError(f"k is {k}: give a number from 1 to the row width {x_RV.shape[1]}")
