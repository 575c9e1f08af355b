"""The arithmetic of quantised products in numpy, rounding for rounding."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from alula.kernels.extension import _native

Floats = NDArray[np.float32]
GROUP = _native.GROUP
LEAST = 2.0**-100


def groups_of(rows_RI: torch.Tensor, *, bf16_scale: bool) -> tuple[NDArray[np.int64], Floats]:
    """Whole numbers [R, G, GROUP] and scales [R, G]."""
    rows = rows_RI.float().numpy()
    missing = -rows.shape[1] % GROUP
    values = np.pad(rows, ((0, 0), (0, missing))).reshape(len(rows), -1, GROUP)
    largest = np.abs(values).max(-1)
    largest[largest < LEAST] = 0
    scales = largest / np.float32(127)
    if bf16_scale:
        scales = torch.from_numpy(scales).bfloat16().float().numpy()
    inverse = np.where(scales > 0, np.float32(1) / np.where(scales > 0, scales, 1), 0).astype(np.float32)
    return np.rint(values * inverse[..., None]).astype(np.int64), scales


def fma(a: Floats, b: Floats, c: Floats) -> Floats:
    """a * b + c rounded once; a has 20 bits. The double sum is rounded to odd, so that the second rounding is right."""
    product, c64 = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + c64
    part = total - product
    error = (product - (total - part)) + (c64 - part)
    bits = total.view(np.int64)
    even = (error != 0) & (bits % 2 == 0)
    bits[even] += np.where(np.sign(error) == np.sign(total), 1, -1)[even]
    return total.astype(np.float32)
