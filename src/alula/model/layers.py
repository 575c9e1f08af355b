"""The tensors a configuration asks for, by their Hugging Face names, and how they become prepared layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from alula.config import AlulaError, ModelConfig
from alula.kernels.blocks import BlockWeight
from alula.kernels.protocol import HeadNorm, Kernels, Linear, RopeTable
from alula.kernels.stack import Layer

Shapes = dict[str, tuple[int, ...]]

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"


class Tensors(Protocol):
    """Where weights are read from, one at a time."""

    def get(self, name: str) -> torch.Tensor:
        """The tensor of that name, on the CPU, in the dtype it is stored in."""
        ...


class Blocks(Protocol):
    """Where weights are read from that are quantised already."""

    def get(self, names: Sequence[str]) -> BlockWeight | None:
        """The tensors of these names, on the same input, as one; None where they are not quantised alike."""
        ...


def expected_shapes(config: ModelConfig) -> Shapes:
    """Every tensor of the model and its shape."""
    shapes: Shapes = {
        EMBEDDING: (config.vocab_size, config.hidden_size),
        FINAL_NORM: (config.hidden_size,),
    }
    if not config.tied_head:
        shapes[LM_HEAD] = (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        shapes.update({f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(config).items()})
    return shapes


def _layer_shapes(config: ModelConfig) -> Shapes:
    hidden, middle = config.hidden_size, config.intermediate_size
    queries, keys = (
        config.num_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
    )
    shapes: Shapes = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if config.sandwich_norms:
        shapes |= {
            "pre_feedforward_layernorm.weight": (hidden,),
            "post_feedforward_layernorm.weight": (hidden,),
        }
    if config.qk_norm:
        shapes |= {
            "self_attn.q_norm.weight": (config.head_dim,),
            "self_attn.k_norm.weight": (config.head_dim,),
        }
    linears = {
        "self_attn.q_proj": (queries, hidden, config.qkv_bias),
        "self_attn.k_proj": (keys, hidden, config.qkv_bias),
        "self_attn.v_proj": (keys, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, queries, config.output_bias),
        "mlp.gate_proj": (middle, hidden, config.mlp_bias),
        "mlp.up_proj": (middle, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, middle, config.mlp_bias),
    }
    for name, (outs, ins, biased) in linears.items():
        shapes[f"{name}.weight"] = (outs, ins)
        if biased:
            shapes[f"{name}.bias"] = (outs,)
    return shapes


class LayerBuilder:
    """Reads, converts and packs tensors, holding no more than one fused weight at a time."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Tensors,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        blocks: Blocks | None,
    ) -> None:
        self._config, self._tensors, self._kernels = config, tensors, kernels
        self._dtype, self._device, self._blocks = dtype, device, blocks

    def tensor(self, name: str) -> torch.Tensor:
        """A copy in the model dtype; the file it came from may be closed."""
        return self._read(name).to(self._device, self._dtype, copy=True)

    def norm(self, name: str) -> torch.Tensor:
        """A norm weight. Gemma's are stored less 1 and multiply in fp32."""
        if self._config.norm_offset:
            return self._read(name).to(self._device, torch.float32, copy=True) + 1.0
        return self.tensor(name)

    def linear(self, names: Sequence[str], biased: bool) -> Linear:
        """Linears on the same input, fused into one."""
        bias_O = torch.cat([self.tensor(f"{name}.bias") for name in names]) if biased else None
        tensors = [f"{name}.weight" for name in names]
        blocks = self._quantised(tensors)
        if blocks is not None:
            return self._kernels.prepare_blocks(blocks, bias_O, out_dtype=self._dtype)
        weights = [self._read(name) for name in tensors]
        weight_OI = torch.cat(weights).to(self._device, self._dtype, copy=len(weights) == 1)
        return self._kernels.prepare_linear(weight_OI, bias_O)

    def head(self, embedding_VD: torch.Tensor) -> Linear:
        """The LM head, with fp32 results. A tied one shares the embedding's memory if the kernels keep it."""
        tied = self._config.tied_head
        blocks = self._quantised([EMBEDDING if tied else LM_HEAD])
        if blocks is not None:
            return self._kernels.prepare_blocks(blocks, out_dtype=torch.float32)
        return self._kernels.prepare_linear(embedding_VD if tied else self.tensor(LM_HEAD), out_dtype=torch.float32)

    def layer(self, index: int, rope: RopeTable) -> Layer:
        config, prefix = self._config, f"model.layers.{index}"
        sandwich = config.sandwich_norms
        mlp_norm = "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
        return Layer(
            input_norm_D=self.norm(f"{prefix}.input_layernorm.weight"),
            qkv=self.linear([f"{prefix}.self_attn.{name}_proj" for name in "qkv"], config.qkv_bias),
            head_norm=self._head_norm(prefix) if config.qk_norm else None,
            rope=rope,
            window=config.window(index),
            output=self.linear([f"{prefix}.self_attn.o_proj"], config.output_bias),
            output_norm_D=self.norm(f"{prefix}.post_attention_layernorm.weight") if sandwich else None,
            mlp_norm_D=self.norm(f"{prefix}.{mlp_norm}.weight"),
            gate_up=self.linear(
                [f"{prefix}.mlp.{name}_proj" for name in ("gate", "up")],
                config.mlp_bias,
            ),
            down=self.linear([f"{prefix}.mlp.down_proj"], config.mlp_bias),
            mlp_output_norm_D=self.norm(f"{prefix}.post_feedforward_layernorm.weight") if sandwich else None,
        )

    def _quantised(self, names: Sequence[str]) -> BlockWeight | None:
        return None if self._blocks is None else self._blocks.get(names)

    def _read(self, name: str) -> torch.Tensor:
        """A tensor as stored. Raises AlulaError for one with NaN or infinity, of which kernels promise nothing.

        The sum of all values is finite exactly where they are, short of absurd ones, and costs one pass.
        """
        tensor = self._tensors.get(name)
        if not tensor.sum(dtype=torch.float32).isfinite() and not tensor.isfinite().all():
            raise AlulaError(f"tensor {name!r} holds NaN or infinity: download or convert the checkpoint again")
        return tensor

    def _head_norm(self, prefix: str) -> HeadNorm:
        return HeadNorm(
            query_K=self.norm(f"{prefix}.self_attn.q_norm.weight"),
            key_K=self.norm(f"{prefix}.self_attn.k_norm.weight"),
            eps=self._config.norm_eps,
            round_last=self._config.norm_offset,
        )
