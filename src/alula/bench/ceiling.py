"""The bound that memory bandwidth sets on plain decoding: every forward reads every weight once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Ceiling:
    """weight_bytes: read by one forward of one row. bytes_per_second: measured."""

    weight_bytes: int
    bytes_per_second: float

    @property
    def tokens_per_second(self) -> float:
        """The bound for plain decoding of one sequence."""
        return self.bytes_per_second / self.weight_bytes

    def report(self) -> dict[str, float]:
        return {
            "weight_bytes": self.weight_bytes,
            "gigabytes_per_second": round(self.bytes_per_second / 1e9, 2),
            "tokens_per_second": round(self.tokens_per_second, 1),
        }


def read_bandwidth(device: torch.device | str = "cpu", *, mebibytes: int = 256, rounds: int = 5) -> float:
    """Bytes per second of the fastest of several reads, by all of torch's threads, of more than caches hold."""
    rows = mebibytes * 2**20 // 4 // 4096
    matrix, vector = torch.ones(rows, 4096, device=device), torch.ones(4096, device=device)
    reads: tuple[Callable[[], torch.Tensor], ...] = (lambda: torch.mv(matrix, vector), matrix.sum)
    best = min(_seconds(read) for _ in range(rounds) for read in reads)
    return matrix.numel() * matrix.element_size() / best


def _seconds(read: Callable[[], torch.Tensor]) -> float:
    """Until the result is there: reading one value waits for an asynchronous device."""
    start = time.perf_counter()
    read().reshape(-1)[0].item()
    return time.perf_counter() - start
