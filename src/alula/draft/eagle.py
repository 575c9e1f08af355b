"""EAGLE-1/2 and EAGLE-3 heads over a kernel set and the paged cache.

EAGLE-1 (arXiv 2401.15077, section 3), EAGLE-2 (arXiv 2406.16858) uses the same head, EAGLE-3 (arXiv 2503.01840, section
3), with the flags that EAGLE-3.1 and other trainers added.

A row is a pair (f_j, t_{j+1}): the feature or fed-back state of position j and the token after it. Its output
predicts the token t_{j+2}. Suffixes: T rows, D head hidden, F taps x target hidden, R rows kept, C draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from alula.cache import KVLayer, KVShape
from alula.draft.head_config import HeadConfig
from alula.kernels.pair import DraftLayer, PairLayer
from alula.kernels.protocol import Kernels, Linear, RopeTable
from alula.tree import AttentionInput

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class SharedParts:
    """What a head borrows from its target; nothing is copied.

    embedding_VD: the target's embedding table in the model dtype, or the head's own.
    logits: the target's LM head, [R, D] -> fp32 [R, V] (EAGLE-1/2 only).
    """

    embedding_VD: torch.Tensor
    logits: Callable[[torch.Tensor], torch.Tensor]


class Eagle1Head:
    """The EAGLE-1/2 head: one layer without input norm on fc([embedding; feature]), the target's LM head.

    weights: the official tensors in the model dtype, checked by the loader.
    """

    vocabulary_C: torch.Tensor | None = None

    def __init__(
        self, config: HeadConfig, weights: Weights, shared: SharedParts, kernels: Kernels, rope: RopeTable
    ) -> None:
        self._shared, self._kernels = shared, kernels
        self._fc = _linear(kernels, weights, ["fc"])
        self._layer = _layer(config, weights, "layers.0", kernels, rope)
        self.kv_shapes = (KVShape(config.num_key_value_heads, config.head_dim),)

    def fuse(self, features_TF: torch.Tensor) -> torch.Tensor:
        return features_TF

    def step(
        self,
        tokens_T: torch.Tensor,
        states_TD: torch.Tensor,
        where: AttentionInput,
        layers: Sequence[KVLayer],
        keep: torch.Tensor | None = None,
    ) -> torch.Tensor:
        paired_TI = torch.cat([self._shared.embedding_VD[tokens_T], states_TD], 1)
        hidden_TD = self._kernels.linear(paired_TI, self._fc)
        return self._layer.run(self._kernels, hidden_TD, hidden_TD, where, layers[0], keep)

    def logits(self, states_RD: torch.Tensor) -> torch.Tensor:
        return self._shared.logits(states_RD)


class Eagle3Head:
    """The EAGLE-3 head: fc on the taps, one layer on [normed embedding; normed hidden], own norm and LM head.

    The state is what is fed back: the output before the final norm, or after it with `norm_output`.
    """

    def __init__(
        self, config: HeadConfig, weights: Weights, shared: SharedParts, kernels: Kernels, rope: RopeTable
    ) -> None:
        self._config, self._kernels = config, kernels
        self._norms = {name: weight for name, weight in weights.items() if "norm" in name}
        self._fc = _linear(kernels, weights, ["fc"])
        self._pair = kernels.prepare_pair(
            PairLayer(
                _layer(config, weights, "midlayer", kernels, rope),
                embedding_VD=shared.embedding_VD,
                embedding_norm_D=weights["midlayer.input_layernorm.weight"],
                state_norm_D=weights["midlayer.hidden_norm.weight"],
                output_norm_D=weights["norm.weight"] if config.norm_output else None,
                normed_residual=config.norm_before_residual,
            )
        )
        self._lm_head = kernels.prepare_linear(weights["lm_head.weight"], out_dtype=torch.float32)
        self.kv_shapes = (KVShape(config.num_key_value_heads, config.head_dim),)
        self.vocabulary_C: torch.Tensor | None = None
        if "d2t" in weights:
            offsets_C = weights["d2t"]
            self.vocabulary_C = offsets_C + torch.arange(len(offsets_C), device=offsets_C.device)

    def fuse(self, features_TF: torch.Tensor) -> torch.Tensor:
        """fc on the true features; states of later steps skip it."""
        if self._config.fc_norm:
            taps = torch.split(features_TF, self._config.target_hidden_size, dim=1)
            normed = [self._norm(tap.contiguous(), f"fc_norm.{i}.weight") for i, tap in enumerate(taps)]
            features_TF = torch.cat(normed, 1)
        elif self._config.norm_before_fc:
            features_TF = self._norm(features_TF, "input_norm.weight")
        return self._kernels.linear(features_TF, self._fc)

    def step(
        self,
        tokens_T: torch.Tensor,
        states_TD: torch.Tensor,
        where: AttentionInput,
        layers: Sequence[KVLayer],
        keep: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._pair.run(tokens_T, states_TD, where, layers[0], keep)

    def logits(self, states_RD: torch.Tensor) -> torch.Tensor:
        if not self._config.norm_output:
            states_RD = self._norm(states_RD, "norm.weight")
        return self._kernels.linear(states_RD, self._lm_head)

    def _norm(self, x_TD: torch.Tensor, name: str) -> torch.Tensor:
        return self._kernels.rms_norm(x_TD, self._norms[name], self._config.rms_norm_eps)


def _layer(config: HeadConfig, weights: Weights, prefix: str, kernels: Kernels, rope: RopeTable) -> DraftLayer:
    return DraftLayer(
        qkv=_linear(kernels, weights, [f"{prefix}.self_attn.{name}_proj" for name in "qkv"]),
        rope=rope,
        output=_linear(kernels, weights, [f"{prefix}.self_attn.o_proj"]),
        mlp_norm_D=weights[f"{prefix}.post_attention_layernorm.weight"],
        gate_up=_linear(kernels, weights, [f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"]),
        down=_linear(kernels, weights, [f"{prefix}.mlp.down_proj"]),
        heads=config.num_attention_heads,
        scale=config.head_dim**-0.5,
        activation="silu" if config.hidden_act == "silu" else "gelu_tanh",
        eps=config.rms_norm_eps,
    )


def _linear(kernels: Kernels, weights: Weights, names: Sequence[str]) -> Linear:
    """Linears on the same input, fused into one."""
    weight_OI = torch.cat([weights[f"{name}.weight"] for name in names])
    biases = [weights[f"{name}.bias"] for name in names if f"{name}.bias" in weights]
    return kernels.prepare_linear(weight_OI, torch.cat(biases) if biases else None)
