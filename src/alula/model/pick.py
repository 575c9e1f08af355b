"""`--dtype auto`: the numeric format whose products are fastest here, by a short measurement."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from alula.config import AlulaError, ModelConfig
from alula.kernels.blocks import BLOCK, BlockFormat, BlockWeight
from alula.kernels.select import load_kernels

if TYPE_CHECKING:
    from alula.kernels.products import LinearPath
    from alula.kernels.protocol import Kernels, Linear
    from alula.model.sources import Checkpoint

_MEASURED_WEIGHTS = 32 * 2**20
"""More than caches hold in every format."""
_ROWS = (1, 4)
"""Plain decoding, and a small tree."""
_GAIN = 0.9
"""A coarser format must take less than this share of a finer one's time."""


@dataclass(frozen=True)
class Pick:
    """reason: one line for people, with the times measured."""

    dtype: str
    reason: str


def pick_dtype(config: ModelConfig, checkpoint: Checkpoint, kernels: str | Kernels, device: torch.device) -> Pick:
    """bfloat16, or int8 or the file's own blocks where products with them take clearly less time.

    Raises AlulaError for kernels that are given ready-made: their format is chosen already.
    """
    if not isinstance(kernels, str):
        raise AlulaError("dtype is 'auto' and kernels are given ready-made: give dtype, or kernels by name")
    if kernels == "torch" or device.type != "cpu" or load_kernels(kernels, device).name != "native":
        return Pick("bfloat16", f"bfloat16, the only format measured for {kernels} kernels on {device}")
    seconds = {name: _seconds(config, name, blocks) for name, blocks in _candidates(checkpoint).items()}
    best = "bfloat16"
    for name, taken in seconds.items():
        best = name if taken < _GAIN * seconds[best] else best
    times = ", ".join(f"{name} {1e3 * taken:.1f} ms" for name, taken in seconds.items())
    return Pick(best, f"{best}: products of {_ROWS[0]} and {_ROWS[1]} rows with as many weights take {times}")


def _candidates(checkpoint: Checkpoint) -> dict[str, BlockFormat | None]:
    """From fine to coarse; `file` with the format of most of its matrices, where it has one."""
    found: dict[str, BlockFormat | None] = {"bfloat16": None, "int8": None}
    if checkpoint.gguf is not None:
        from alula.model.gguf_blocks import usual_format

        blocks = usual_format(checkpoint.folder)
        if blocks is not None:
            found["file"] = blocks
    return found


def _seconds(config: ModelConfig, dtype: str, blocks: BlockFormat | None) -> float:
    """Best of a few passes over weights of the MLP's width, all row counts together."""
    ins, outs = -(-config.hidden_size // BLOCK) * BLOCK, min(2 * config.intermediate_size, _MEASURED_WEIGHTS // BLOCK)
    path: LinearPath = "auto" if dtype == "bfloat16" else "file" if blocks is not None else "int8"
    kernels = load_kernels("native", linear=path)
    linear = _prepared(kernels, outs, ins, blocks)
    linears = [linear, *(_prepared(kernels, outs, ins, blocks) for _ in range(_MEASURED_WEIGHTS // (outs * ins)))]
    rows = [torch.ones(count, ins, dtype=torch.bfloat16) for count in _ROWS]
    return min(_timed(lambda: [kernels.linear(x, linear) for x in rows for linear in linears]) for _ in range(4))


def _prepared(kernels: Kernels, outs: int, ins: int, blocks: BlockFormat | None) -> Linear:
    if blocks is None:
        return kernels.prepare_linear(torch.ones(outs, ins, dtype=torch.bfloat16))
    halves = torch.ones(outs, ins // BLOCK, dtype=torch.float16)
    numbers = torch.ones(outs, ins, dtype=torch.uint8 if blocks == "q4" else torch.int8)
    weight = BlockWeight(blocks, numbers, halves, halves if blocks == "q4" else None)
    return kernels.prepare_blocks(weight, out_dtype=torch.bfloat16)


def _timed(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun
