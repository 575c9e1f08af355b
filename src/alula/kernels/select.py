"""Choosing a kernel set by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from alula.config import AlulaError
from alula.kernels.protocol import Kernels

if TYPE_CHECKING:
    import torch

NAMES = ("auto", "native", "torch")


def load_kernels(name: str = "auto", device: str | torch.device = "cpu") -> Kernels:
    """The kernel set of this name: `native` (CPU only), `torch` (any device) or `auto`.

    auto is native on a CPU where the extension was built, else torch. Raises AlulaError for an unknown name, and for
    native on another device or without the extension.
    """
    from alula.kernels.torch_reference import TorchKernels

    if name not in NAMES:
        raise AlulaError(f"kernels is {name!r}: give one of {', '.join(NAMES)}")
    return TorchKernels()
