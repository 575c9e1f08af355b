"""One decoder by flags, over a kernel set and the paged cache.

Shape suffixes: T packed rows, R rows of them, D hidden, F tapped features, V vocabulary, H heads, K head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from alula.cache import KVLayer, KVShape
from alula.config import AlulaError, ModelConfig
from alula.kernels.protocol import Activation, Kernels, RopeTable
from alula.kernels.stack import FINAL, Hidden, Stack
from alula.model.layers import (
    EMBEDDING,
    FINAL_NORM,
    Blocks,
    LayerBuilder,
    Tensors,
)
from alula.model.rope import build_rope
from alula.tree import AttentionInput

DRAFT_MARGIN = 64
"""Positions past the limit that RoPE tables cover, since drafts may look past the end of a sequence."""


class Decoder:
    """A decoder-only transformer: Llama, Mistral, Qwen 2 and 3, Gemma 3 (text).

    tensors: weights by Hugging Face name, already checked against `expected_shapes`; each is read once and
    may be dropped afterwards. blocks: the same weights as a quantised file holds them, used where the kernels' weight
    format is `file`. max_positions: longest sequence in tokens, None for the model's own limit.
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
        blocks: Blocks | None = None,
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
        build = LayerBuilder(config, tensors, kernels, dtype, self.device, blocks)
        self.embedding_VD = build.tensor(EMBEDDING)
        self.lm_head = build.head(self.embedding_VD)
        ropes = {
            rope: build_rope(rope, config.head_dim, self.max_positions + DRAFT_MARGIN, self.device)
            for rope in {config.layer_rope(index) for index in range(config.num_layers)}
        }
        self._layers = [build.layer(index, ropes[config.layer_rope(index)]) for index in range(config.num_layers)]
        self._stack = kernels.prepare_stack(
            Stack(
                layers=tuple(self._layers),
                final_norm_D=build.norm(FINAL_NORM),
                heads=config.num_heads,
                scale=config.scale,
                softcap=config.attention_softcap,
                activation=cast("Activation", config.activation),
                eps=config.norm_eps,
                round_last=config.norm_offset,
            )
        )
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype, device=self.device)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the matrices that every forward reads whole: the layers' and the LM head, not the embedding."""
        return self.lm_head.nbytes + sum(linear.nbytes for layer in self._layers for linear in layer.linears)

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
        return self._stack.run(self.embed(tokens_T), where, layers, taps)

    def logits(self, final_RD: torch.Tensor) -> torch.Tensor:
        """fp32 logits [R, V] of LM-head inputs."""
        logits_RV = self.kernels.linear(final_RD, self.lm_head)
        cap = self.config.final_softcap
        return self.kernels.softcap(logits_RV, cap) if cap else logits_RV
