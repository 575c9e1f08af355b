"""Choosing a kernel set by name."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

from alula.config import AlulaError
from alula.kernels.protocol import Kernels

if TYPE_CHECKING:
    import torch

    from alula.kernels.products import LinearPath

NAMES = ("auto", "native", "torch")
QUANTISED = ("int8", "file")
"""Paths of weights that are quantised."""
LEVEL_VARIABLE = "ALULA_CPU_LEVEL"


def load_kernels(
    name: str = "auto",
    device: str | torch.device = "cpu",
    *,
    level: str | None = None,
    linear: LinearPath = "auto",
) -> Kernels:
    """The kernel set of this name: `native` (CPU only), `torch` (any device) or `auto`.

    auto is native on a CPU where the extension was built, else torch. level and linear are for the native set (see
    `NativeKernels`); the environment variable ALULA_CPU_LEVEL names a level too. Raises AlulaError for an unknown name,
    path or level, for native on another device or without the extension, and for quantised weights with other kernels.
    """
    if name not in NAMES:
        raise AlulaError(f"kernels is {name!r}: give one of {', '.join(NAMES)}")
    on_cpu = str(device).split(":")[0] == "cpu"
    if linear in QUANTISED and (name == "torch" or not on_cpu):
        raise AlulaError(
            f"{linear} is there in the native kernels on the CPU only, not in kernels {name!r} on {device}: give "
            "these, or dtype bfloat16"
        )
    if name == "native" and not on_cpu:
        raise AlulaError(f"kernels 'native' run on the CPU, not on {device}: give kernels 'torch'")
    if name == "torch" or not on_cpu:
        from alula.kernels.torch_reference import TorchKernels

        return TorchKernels()
    return _native(name, level or os.environ.get(LEVEL_VARIABLE) or None, linear)


def _native(name: str, level: str | None, linear: LinearPath) -> Kernels:
    try:
        from alula.kernels.native import NativeKernels
    except ImportError as error:
        if name == "native" or linear in QUANTISED:
            mend = "or give dtype bfloat16" if linear in QUANTISED else "or give 'torch'"
            raise AlulaError(f"kernels 'native' were not built ({error}): reinstall alula, {mend}") from error
        from alula.kernels.torch_reference import TorchKernels

        warnings.warn(
            f"the native kernels were not built ({error}), and torch's are many times slower: reinstall alula",
            stacklevel=3,
        )
        return TorchKernels()
    try:
        return NativeKernels(level, linear)
    except ValueError as error:
        raise AlulaError(str(error)) from error
