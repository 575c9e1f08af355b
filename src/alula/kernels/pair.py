"""EAGLE-3's decoder layer, whose rows are pairs of a token and a state, and the plain way to run such layers.

Shape suffixes as in `protocol`; also R rows kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from alula.cache.pool import KVLayer
    from alula.kernels.protocol import Activation, Kernels, Linear, RopeTable
    from alula.tree import AttentionInput


@dataclass(frozen=True)
class DraftLayer:
    """A decoder layer from its normed input on, prepared: full attention, one norm before the MLP."""

    qkv: Linear
    rope: RopeTable
    output: Linear
    mlp_norm_D: torch.Tensor
    gate_up: Linear
    down: Linear
    heads: int
    scale: float
    activation: Activation
    eps: float

    @property
    def linears(self) -> tuple[Linear, Linear, Linear, Linear]:
        """All of the layer's products."""
        return self.qkv, self.output, self.gate_up, self.down

    def run(
        self,
        kernels: Kernels,
        input_TI: torch.Tensor,
        residual_TD: torch.Tensor,
        where: AttentionInput,
        cache: KVLayer,
        keep: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Output of the rows in `keep` (int64; None: all), [R, D]; keys and values of every row are written."""
        q_THK = kernels.rope_write(kernels.linear(input_TI, self.qkv), cache, where, self.rope, heads=self.heads)
        if keep is not None:
            if not len(keep):
                return residual_TD[:0]
            q_THK, residual_TD, where = q_THK[keep], residual_TD[keep], where.rows(keep)
        attended_RD = kernels.attention(q_THK, cache, where, scale=self.scale).flatten(1)
        normed_RD, residual_RD = kernels.add_rms_norm(
            kernels.linear(attended_RD, self.output), residual_TD, self.mlp_norm_D, self.eps
        )
        gated_RI = kernels.gated(kernels.linear(normed_RD, self.gate_up), self.activation)
        return residual_RD + kernels.linear(gated_RI, self.down)


@dataclass(frozen=True)
class PairLayer:
    """A layer that reads [norm(embedding); norm(state)], twice as wide as a state (arXiv 2503.01840, section 3).

    normed_residual: the residual is the normed state, not the state. output_norm_D: norm of the result, None for none.
    """

    layer: DraftLayer
    embedding_VD: torch.Tensor
    embedding_norm_D: torch.Tensor
    state_norm_D: torch.Tensor
    output_norm_D: torch.Tensor | None
    normed_residual: bool


class PreparedPair(Protocol):
    """A pair layer as one kernel set runs it."""

    def run(
        self,
        tokens_T: torch.Tensor,
        states_TD: torch.Tensor,
        where: AttentionInput,
        cache: KVLayer,
        keep: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """New states [R, D] of the rows in `keep` (int64; None: all); keys and values of every row are written."""
        ...


class SteppedPair:
    """The layer, one step after the other."""

    def __init__(self, kernels: Kernels, pair: PairLayer) -> None:
        self._kernels, self._pair = kernels, pair

    def run(
        self,
        tokens_T: torch.Tensor,
        states_TD: torch.Tensor,
        where: AttentionInput,
        cache: KVLayer,
        keep: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `PreparedPair`."""
        pair = self._pair
        embedded_TD = self._norm(pair.embedding_VD[tokens_T], pair.embedding_norm_D)
        normed_TD = self._norm(states_TD, pair.state_norm_D)
        paired_TI = torch.cat([embedded_TD, normed_TD], 1)
        residual_TD = normed_TD if pair.normed_residual else states_TD
        output_RD = pair.layer.run(self._kernels, paired_TI, residual_TD, where, cache, keep)
        return output_RD if pair.output_norm_D is None else self._norm(output_RD, pair.output_norm_D)

    def _norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
        return self._kernels.rms_norm(x_TD, weight_D, self._pair.layer.eps)
