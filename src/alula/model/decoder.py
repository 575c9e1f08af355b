"""One decoder by flags, over a kernel set and the paged cache.

Shape suffixes: T packed rows, R rows of them, D hidden, F tapped features, V vocabulary, H heads, K head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from alula.cache import KVLayer, KVShape
from alula.config import AlulaError, ModelConfig
from alula.kernels.protocol import Activation, Kernels, RopeTable
from alula.model.layers import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    Layer,
    LayerBuilder,
    Tensors,
)
from alula.model.rope import build_rope
from alula.tree import AttentionInput

FINAL = -1
"""The tap after the final norm: the input of the LM head."""

DRAFT_MARGIN = 64
"""Positions past the limit that RoPE tables cover, since drafts may look past the end of a sequence."""


@dataclass(frozen=True)
class Hidden:
    """What one forward leaves: LM-head inputs, and the tapped features side by side in the order asked for."""

    final_TD: torch.Tensor
    features_TF: torch.Tensor | None


class Decoder:
    """A decoder-only transformer: Llama, Mistral, Qwen 2 and 3, Gemma 3 (text).

    tensors: weights by Hugging Face name, already checked against `expected_shapes`; each is read once and
    may be dropped afterwards. max_positions: longest sequence in tokens, None for the model's own limit.
    Raises AlulaError for a limit the model does not have.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Tensors,
        kernels: Kernels,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        max_positions: int | None = None,
    ) -> None:
        limit = config.max_position_embeddings
        self.config, self.kernels, self.dtype, self.device = (
            config,
            kernels,
            dtype,
            torch.device(device),
        )
        self.max_positions = limit if max_positions is None else max_positions
        if not 1 <= self.max_positions <= limit:
            raise AlulaError(f"max_model_len is {max_positions}: give 1 to {limit}, the model's context limit")
        self.kv_shapes = (KVShape(config.num_kv_heads, config.head_dim),) * config.num_layers
        build = LayerBuilder(config, tensors, kernels, dtype, self.device)
        self.embedding_VD = build.tensor(EMBEDDING)
        self.lm_head = kernels.prepare_linear(
            self.embedding_VD if config.tied_head else build.tensor(LM_HEAD),
            out_dtype=torch.float32,
        )
        ropes = {
            rope: build_rope(rope, config.head_dim, self.max_positions + DRAFT_MARGIN, self.device)
            for rope in {config.layer_rope(index) for index in range(config.num_layers)}
        }
        self._layers = [build.layer(index, ropes[config.layer_rope(index)]) for index in range(config.num_layers)]
        # The norm that follows each layer: the next one's input norm, at the end the final one.
        following = [layer.input_norm_D for layer in self._layers[1:]]
        self._norms_after = [*following, build.norm(FINAL_NORM)]
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype, device=self.device)
        self._activation = cast("Activation", config.activation)

    @property
    def rope(self) -> RopeTable:
        """The table of the first layer with full attention, or of the first layer."""
        return next(
            (layer.rope for layer in self._layers if not layer.window),
            self._layers[0].rope,
        )

    def check_taps(self, taps: Sequence[int]) -> None:
        """Taps are inputs of layers 0 .. n - 1, n for the output of the last layer, FINAL; AlulaError for others."""
        for tap in taps:
            if tap != FINAL and not 0 <= tap <= len(self._layers):
                raise AlulaError(
                    f"tap {tap} is no layer of the target: give 0 to {len(self._layers)}, or -1 for past the final norm"
                )

    def embed(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """Embedded tokens [T, D], scaled where the family does so."""
        embedded_TD = self.embedding_VD[tokens_T]
        return embedded_TD if self.config.embedding_scale == 1.0 else embedded_TD * self._embedding_scale

    def forward(
        self,
        tokens_T: torch.Tensor,
        where: AttentionInput,
        layers: Sequence[KVLayer],
        taps: Sequence[int] = (),
    ) -> Hidden:
        """Runs all layers over packed rows; keys and values of every row are written to the cache.

        tokens_T: int64. layers: the cache, one entry per decoder layer. taps: j is the input of layer j, not
        normed; FINAL the LM head's input.
        """
        residual_TD = self.embed(tokens_T)
        tapped = {0: residual_TD}
        normed_TD = self._norm(residual_TD, self._layers[0].input_norm_D)
        for index, (layer, cache) in enumerate(zip(self._layers, layers, strict=True)):
            normed_TD, residual_TD = self._layer(layer, cache, where, normed_TD, residual_TD, self._norms_after[index])
            if index + 1 in taps:
                tapped[index + 1] = residual_TD
        tapped[FINAL] = normed_TD
        features_TF = torch.cat([tapped[tap] for tap in taps], dim=1) if taps else None
        return Hidden(normed_TD, features_TF)

    def logits(self, final_RD: torch.Tensor) -> torch.Tensor:
        """fp32 logits [R, V] of LM-head inputs."""
        logits_RV = self.kernels.linear(final_RD, self.lm_head)
        cap = self.config.final_softcap
        return self.kernels.softcap(logits_RV, cap) if cap else logits_RV

    def _layer(
        self,
        layer: Layer,
        cache: KVLayer,
        where: AttentionInput,
        normed_TD: torch.Tensor,
        residual_TD: torch.Tensor,
        norm_after_D: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(input of the next layer after its norm, and before it)."""
        kernels, config = self.kernels, self.config
        qkv_TF = kernels.linear(normed_TD, layer.qkv)
        q_THK = kernels.rope_write(
            qkv_TF,
            cache,
            where,
            layer.rope,
            heads=config.num_heads,
            norm=layer.head_norm,
        )
        mixed_THK = kernels.attention(
            q_THK,
            cache,
            where,
            scale=config.scale,
            window=layer.window,
            softcap=config.attention_softcap,
        )
        output_TD = kernels.linear(mixed_THK.flatten(1), layer.output)
        normed_TD, residual_TD = self._add(output_TD, residual_TD, layer.output_norm_D, layer.mlp_norm_D)
        gated_TI = kernels.gated(kernels.linear(normed_TD, layer.gate_up), self._activation)
        output_TD = kernels.linear(gated_TI, layer.down)
        return self._add(output_TD, residual_TD, layer.mlp_output_norm_D, norm_after_D)

    def _add(
        self,
        output_TD: torch.Tensor,
        residual_TD: torch.Tensor,
        output_norm_D: torch.Tensor | None,
        norm_D: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if output_norm_D is not None:
            output_TD = self._norm(output_TD, output_norm_D)
        config = self.config
        return self.kernels.add_rms_norm(
            output_TD,
            residual_TD,
            norm_D,
            config.norm_eps,
            round_last=config.norm_offset,
        )

    def _norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
        return self.kernels.rms_norm(x_TD, weight_D, self.config.norm_eps, round_last=self.config.norm_offset)
