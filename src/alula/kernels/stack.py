"""All layers of a decoder as one prepared object, and the plain way to run them: step by step through a kernel set.

Shape suffixes as in `protocol`; also F features, taps x D.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from alula.cache.pool import KVLayer
    from alula.kernels.protocol import Activation, HeadNorm, Kernels, Linear, RopeTable
    from alula.tree import AttentionInput

FINAL = -1
"""The tap after the final norm: the input of the LM head."""


@dataclass(frozen=True)
class Layer:
    """One decoder layer, prepared. Norms that a family does not have are None."""

    input_norm_D: torch.Tensor
    qkv: Linear
    head_norm: HeadNorm | None
    rope: RopeTable
    window: int
    output: Linear
    output_norm_D: torch.Tensor | None
    mlp_norm_D: torch.Tensor
    gate_up: Linear
    down: Linear
    mlp_output_norm_D: torch.Tensor | None

    @property
    def linears(self) -> tuple[Linear, Linear, Linear, Linear]:
        """All of the layer's products."""
        return self.qkv, self.output, self.gate_up, self.down


@dataclass(frozen=True)
class Stack:
    """All layers and the norm after them. `round_last`: see `Kernels.rms_norm`."""

    layers: tuple[Layer, ...]
    final_norm_D: torch.Tensor
    heads: int
    scale: float
    softcap: float
    activation: Activation
    eps: float
    round_last: bool

    def norm_after(self, index: int) -> torch.Tensor:
        """The norm that follows layer `index`: the next one's input norm, at the end the final one."""
        return self.layers[index + 1].input_norm_D if index + 1 < len(self.layers) else self.final_norm_D


@dataclass(frozen=True)
class Hidden:
    """What one forward leaves: LM-head inputs, and the tapped features side by side in the order asked for."""

    final_TD: torch.Tensor
    features_TF: torch.Tensor | None


class PreparedStack(Protocol):
    """A stack as one kernel set runs it."""

    def run(
        self, embedded_TD: torch.Tensor, where: AttentionInput, caches: Sequence[KVLayer], taps: Sequence[int]
    ) -> Hidden:
        """Run all layers over packed rows; keys and values of every row are written to the caches.

        caches: one per layer. taps: j is the input of layer j, not normed; FINAL the LM head's input.
        """
        ...


class SteppedStack:
    """The layers, one step after the other."""

    def __init__(self, kernels: Kernels, stack: Stack) -> None:
        self._kernels, self._stack = kernels, stack

    def run(
        self, embedded_TD: torch.Tensor, where: AttentionInput, caches: Sequence[KVLayer], taps: Sequence[int]
    ) -> Hidden:
        """See `PreparedStack`."""
        stack, residual_TD = self._stack, embedded_TD
        tapped = {0: residual_TD}
        normed_TD = self._norm(residual_TD, stack.layers[0].input_norm_D)
        for index, (layer, cache) in enumerate(zip(stack.layers, caches, strict=True)):
            mixed_TD = self._attention(layer, cache, where, normed_TD)
            normed_TD, residual_TD = self._add(mixed_TD, residual_TD, layer.output_norm_D, layer.mlp_norm_D)
            output_TD = self._mlp(layer, normed_TD)
            norm_D = stack.norm_after(index)
            normed_TD, residual_TD = self._add(output_TD, residual_TD, layer.mlp_output_norm_D, norm_D)
            if index + 1 in taps:
                tapped[index + 1] = residual_TD
        tapped[FINAL] = normed_TD
        return Hidden(normed_TD, torch.cat([tapped[tap] for tap in taps], dim=1) if taps else None)

    def _attention(self, layer: Layer, cache: KVLayer, where: AttentionInput, normed_TD: torch.Tensor) -> torch.Tensor:
        kernels, stack = self._kernels, self._stack
        qkv_TF = kernels.linear(normed_TD, layer.qkv)
        q_THK = kernels.rope_write(qkv_TF, cache, where, layer.rope, heads=stack.heads, norm=layer.head_norm)
        mixed_THK = kernels.attention(
            q_THK, cache, where, scale=stack.scale, window=layer.window, softcap=stack.softcap
        )
        return kernels.linear(mixed_THK.flatten(1), layer.output)

    def _mlp(self, layer: Layer, normed_TD: torch.Tensor) -> torch.Tensor:
        kernels = self._kernels
        gated_TI = kernels.gated(kernels.linear(normed_TD, layer.gate_up), self._stack.activation)
        return kernels.linear(gated_TI, layer.down)

    def _add(
        self,
        output_TD: torch.Tensor,
        residual_TD: torch.Tensor,
        output_norm_D: torch.Tensor | None,
        norm_D: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if output_norm_D is not None:
            output_TD = self._norm(output_TD, output_norm_D)
        stack = self._stack
        return self._kernels.add_rms_norm(output_TD, residual_TD, norm_D, stack.eps, round_last=stack.round_last)

    def _norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
        return self._kernels.rms_norm(x_TD, weight_D, self._stack.eps, round_last=self._stack.round_last)
