"""EAGLE heads and EAGLE-2 trees in plain torch: no cache, no kernels, everything recomputed for every node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from alula.draft.head_config import HeadConfig
from alula.model.rope import inverse_frequencies
from alula.tree import TreeShape


@dataclass(frozen=True)
class DenseHead:
    """weights: by official name, fp32. embedding_VD and lm_head_VD: the target's."""

    config: HeadConfig
    weights: dict[str, torch.Tensor]
    embedding_VD: torch.Tensor
    lm_head_VD: torch.Tensor

    def fuse(self, features_TF: torch.Tensor) -> torch.Tensor:
        """What stands in for the state where true features are known."""
        config = self.config
        if config.kind == "eagle1":
            return features_TF
        if config.fc_norm:
            taps = features_TF.chunk(features_TF.shape[1] // config.target_hidden_size, 1)
            features_TF = torch.cat([self._norm(tap, f"fc_norm.{i}.weight") for i, tap in enumerate(taps)], 1)
        if config.norm_before_fc:
            features_TF = self._norm(features_TF, "input_norm.weight")
        return self._linear(features_TF, "fc")

    def outputs(self, tokens_T: torch.Tensor, states_TD: torch.Tensor) -> torch.Tensor:
        """Fed-back states of a causal run over all rows; row t has position t."""
        embedded = F.embedding(tokens_T, self.weights.get("embed_tokens.weight", self.embedding_VD))
        if self.config.kind == "eagle1":
            fused = self._linear(torch.cat([embedded, states_TD], 1), "fc")
            return self._layer("layers.0", fused, fused)
        normed = self._norm(states_TD, "midlayer.hidden_norm.weight")
        entered = torch.cat([self._norm(embedded, "midlayer.input_layernorm.weight"), normed], 1)
        output = self._layer("midlayer", entered, normed if self.config.norm_before_residual else states_TD)
        return self._norm(output, "norm.weight") if self.config.norm_output else output

    def log_q(self, state_D: torch.Tensor) -> torch.Tensor:
        """Over the target vocabulary, [V]."""
        if self.config.kind == "eagle1":
            return (self.lm_head_VD @ state_D).log_softmax(0)
        if not self.config.norm_output:
            state_D = self._norm(state_D[None], "norm.weight")[0]
        log_q_C = (self.weights["lm_head.weight"] @ state_D).log_softmax(0)
        spread = torch.full((self.config.vocab_size,), -torch.inf)
        offsets = self.weights.get("d2t", torch.zeros(len(log_q_C), dtype=torch.int64))
        spread[torch.arange(len(log_q_C)) + offsets] = log_q_C
        return spread

    def after(self, tokens: Sequence[int], features_TF: torch.Tensor, path: Sequence[int]) -> torch.Tensor:
        """log q of the token after tokens and path. features: f_0 .. f_{len(tokens) - 2}."""
        advanced = torch.tensor(tokens[1:])
        states = self.fuse(features_TF)
        for token in path:
            states = torch.cat([states, self.outputs(advanced, states)[-1:]])
            advanced = torch.cat([advanced, torch.tensor([token])])
        return self.log_q(self.outputs(advanced, states)[-1])

    def tree(self, tokens: Sequence[int], features_TF: torch.Tensor, shape: TreeShape) -> dict[tuple[int, ...], float]:
        """EAGLE-2: token paths of the kept nodes with their scores."""
        scores: dict[tuple[int, ...], float] = {}
        frontier: list[tuple[int, ...]] = [()]
        for _ in range(shape.depth):
            level: dict[tuple[int, ...], float] = {}
            for path in frontier:
                best = self.after(tokens, features_TF, path).topk(shape.branch)
                for token, log in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                    level[(*path, token)] = scores.get(path, 0.0) + log
            scores |= level
            frontier = sorted(level, key=lambda path: -level[path])[: shape.branch]
        kept = sorted(scores, key=lambda path: (-scores[path], len(path)))[: shape.nodes - 1]
        return {path: scores[path] for path in kept}

    def _layer(self, prefix: str, entered_TI: torch.Tensor, residual_TD: torch.Tensor) -> torch.Tensor:
        config = self.config
        queries, keys, values = (
            self._linear(entered_TI, f"{prefix}.self_attn.{name}_proj").view(len(entered_TI), -1, config.head_dim)
            for name in "qkv"
        )
        repeats = config.num_attention_heads // config.num_key_value_heads
        mixed = F.scaled_dot_product_attention(
            self._rotate(queries).transpose(0, 1),
            self._rotate(keys).repeat_interleave(repeats, 1).transpose(0, 1),
            values.repeat_interleave(repeats, 1).transpose(0, 1),
            is_causal=True,
        )
        hidden = residual_TD + self._linear(mixed.transpose(0, 1).flatten(1), f"{prefix}.self_attn.o_proj")
        normed = self._norm(hidden, f"{prefix}.post_attention_layernorm.weight")
        gate = self._linear(normed, f"{prefix}.mlp.gate_proj")
        gate = F.silu(gate) if config.hidden_act == "silu" else F.gelu(gate, approximate="tanh")
        return hidden + self._linear(gate * self._linear(normed, f"{prefix}.mlp.up_proj"), f"{prefix}.mlp.down_proj")

    def _rotate(self, x_THK: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(len(x_THK))[:, None, None] * inverse_frequencies(self.config.rope, self.config.head_dim)
        first, second = x_THK.chunk(2, -1)
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1
        )

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[name], self.config.rms_norm_eps)
