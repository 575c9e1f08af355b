"""Argument checks shared by the kernel sets. Each raises ValueError with one sentence: the field and the mend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

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
    if x.stride(1) != 1:
        raise ValueError(f"{name} is strided in its last dimension: make it contiguous")


def check_weight(weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> None:
    if weight_OI.ndim != 2 or weight_OI.dtype not in FLOATS:
        raise ValueError(
            f"weight has shape {tuple(weight_OI.shape)} and dtype {weight_OI.dtype}: "
            "give [out, in] in float32 or bfloat16"
        )
    if bias_O is not None and tuple(bias_O.shape) != (weight_OI.shape[0],):
        raise ValueError(f"bias has shape {tuple(bias_O.shape)}: give one value per output, [{weight_OI.shape[0]}]")


def check_linear(x_TI: torch.Tensor, in_features: int) -> None:
    check_rows("x", x_TI, in_features)


def check_activation(gate_up: torch.Tensor, activation: str) -> None:
    if activation not in ("silu", "gelu_tanh"):
        raise ValueError(f"activation is {activation!r}: give 'silu' or 'gelu_tanh'")
    if gate_up.ndim != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"gate_up has shape {tuple(gate_up.shape)}: give rows of an even width, gates first")
    check_rows("gate_up", gate_up, gate_up.shape[1])


def check_rope(qkv_TF: torch.Tensor, layer: KVLayer, rope: RopeTable, heads: int) -> None:
    _, groups, head_dim = layer.keys.shape
    check_rows("qkv", qkv_TF, (heads + 2 * groups) * head_dim)
    if head_dim % 2 or rope.cos_MK.shape[1] != head_dim // 2:
        raise ValueError(f"rope table has width {rope.cos_MK.shape[1]}: give half the (even) head size {head_dim}")


def check_attention(q_THK: torch.Tensor, layer: KVLayer, where: AttentionInput, window: int, softcap: float) -> None:
    _, groups, head_dim = layer.keys.shape
    if q_THK.ndim != 3 or q_THK.shape[2] != head_dim or q_THK.shape[1] % groups:
        raise ValueError(f"q has shape {tuple(q_THK.shape)}: give [rows, a multiple of {groups} heads, {head_dim}]")
    if len(q_THK) != len(where.prefix_T):
        raise ValueError(f"q has {len(q_THK)} rows but the attention input {len(where.prefix_T)}: give one per row")
    if window < 0 or softcap < 0:
        raise ValueError(f"window is {window} and softcap {softcap}: give values of at least 0 (0 is off)")
