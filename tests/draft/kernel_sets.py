"""The kernel sets that exist here."""

from __future__ import annotations

import importlib.util

from alula.kernels.protocol import Kernels
from alula.kernels.select import load_kernels


def kernel_sets() -> list[str]:
    """`torch`, and `native` where it was built."""
    return ["torch", "native"] if importlib.util.find_spec("alula.kernels._native") else ["torch"]


def kernel_set(name: str) -> Kernels:
    return load_kernels(name)
