"""Weights as quantised files hold them: whole numbers in groups of inputs, with a scale and perhaps a least value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

BlockFormat = Literal["q8", "q4"]
"""q8: numbers of -128 to 127 (GGUF's Q8_0). q4: of 0 to 15, with a least value (Q4_0, Q4_1)."""

BLOCK = 32
"""Inputs of a group."""


@dataclass(frozen=True)
class BlockWeight:
    """A weight [O, I] of G = I / 32 groups: scale * number + least.

    numbers_OI: int8 for q8, uint8 for q4. scales_OG, least_OG: fp16; q8 has no least values.
    """

    format: BlockFormat
    numbers_OI: torch.Tensor
    scales_OG: torch.Tensor
    least_OG: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        outs, ins = self.numbers_OI.shape
        return outs, ins

    def rows(self, order_R: torch.Tensor) -> BlockWeight:
        """Outputs picked by number."""
        least_OG = None if self.least_OG is None else self.least_OG[order_R]
        return BlockWeight(self.format, self.numbers_OI[order_R], self.scales_OG[order_R], least_OG)

    def values(self) -> torch.Tensor:
        """The weight in fp32 [O, I]."""
        outs, ins = self.shape
        numbers_OGB = self.numbers_OI.view(outs, -1, BLOCK).float()
        values_OGB = numbers_OGB * self.scales_OG.float()[..., None]
        if self.least_OG is not None:
            values_OGB = values_OGB + self.least_OG.float()[..., None]
        return values_OGB.view(outs, ins)


def joined(weights: Sequence[BlockWeight]) -> BlockWeight | None:
    """Weights on the same input as one; None where they are of several formats."""
    first = weights[0]
    if any(weight.format != first.format for weight in weights):
        return None
    least = [weight.least_OG for weight in weights if weight.least_OG is not None]
    return BlockWeight(
        first.format,
        torch.cat([weight.numbers_OI for weight in weights]),
        torch.cat([weight.scales_OG for weight in weights]),
        torch.cat(least) if least else None,
    )
