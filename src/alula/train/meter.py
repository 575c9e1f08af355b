"""What a training run costs: time, tokens and memory, since it was started or gone on with."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

_RSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""Of the system's own figure, bytes."""


class Meter:
    """device: where training happens. tokens: learned before this run."""

    def __init__(self, device: torch.device, tokens: int) -> None:
        self._device, self._before, self._started = device, tokens, time.monotonic()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def figures(self, tokens: int) -> dict[str, Any]:
        """tokens: learned by now. The rate is over everything in between, evaluations and checkpoints included.

        peak_memory_bytes: the most that torch held on the GPU, or that this process had in memory at any time.
        """
        seconds = time.monotonic() - self._started
        return {
            "seconds": round(seconds, 2),
            "tokens_per_second": round((tokens - self._before) / max(seconds, 1e-9), 2),
            "peak_memory_bytes": peak_memory(self._device),
            "memory_of": str(self._device) if self._device.type == "cuda" else "process",
        }


def peak_memory(device: torch.device) -> int:
    """Bytes: on the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT
