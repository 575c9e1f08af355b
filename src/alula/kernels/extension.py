"""The compiled kernels, with the OpenMP runtime that torch has loaded.

`_native` is linked to no runtime, so that there is never a second one. Its symbols are found where torch shares its own
with everybody, as its wheels for x86-64 do; those for Arm keep it to themselves.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import torch  # noqa: F401  (loads the runtime, so it must come first)

__all__ = ["_native"]


def share_openmp() -> None:
    """Let everybody find the symbols of the libgomp that is loaded, unless they are found already."""
    if sys.platform != "linux" or hasattr(ctypes.CDLL(None), "omp_get_thread_num"):
        return
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    for name in {line.split(maxsplit=5)[-1] for line in maps if "libgomp" in line}:
        ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_NOLOAD | os.RTLD_GLOBAL)


share_openmp()

from alula.kernels import _native  # noqa: E402
