"""Rotation angles of every position (Su et al., arXiv 2104.09864), built once."""

from __future__ import annotations

import math

import torch

from alula.config import Rope
from alula.kernels.protocol import RopeTable


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair of dimensions, fp32 [K / 2], computed as transformers does."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inverse = 1.0 / (rope.theta**exponents)
    if rope.scaling == "linear":
        return inverse / rope.factor
    if rope.scaling == "llama3":
        return _llama3(inverse, rope)
    return inverse


def _llama3(inverse: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Llama 3.1's scaling: long wavelengths over the factor, short ones as they are, a ramp in between."""
    wavelength = 2 * math.pi / inverse
    ramp = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    mixed = (1 - ramp) * inverse / rope.factor + ramp * inverse
    scaled = torch.where(
        wavelength > rope.original_max_position / rope.low_freq_factor,
        inverse / rope.factor,
        mixed,
    )
    return torch.where(wavelength < rope.original_max_position / rope.high_freq_factor, inverse, scaled)


def build_rope(rope: Rope, head_dim: int, positions: int, device: torch.device | str = "cpu") -> RopeTable:
    """Table for positions 0 .. positions - 1.

    Cosines are taken in fp64 and rounded once, so an entry does not depend on the size of the table.
    """
    inverse_K = inverse_frequencies(rope, head_dim)
    angles_MK = (torch.arange(positions, dtype=torch.float32)[:, None] * inverse_K).double()
    return RopeTable(angles_MK.cos().float().to(device), angles_MK.sin().float().to(device))
