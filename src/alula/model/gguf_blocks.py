"""Weights of a GGUF file in its own blocks, for kernels that multiply them as they are.

The layout of a block is that of the GGUF specification (ggml-org/ggml): fp16 scale, for Q4_1 an fp16 least value, then
32 numbers; of 4-bit ones, the first 16 lie in the low halves of the bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch

from alula.config import AlulaError, ModelConfig
from alula.kernels.blocks import BlockFormat, BlockWeight, joined
from alula.model.gguf_directory import Directory
from alula.model.gguf_tensors import ROPE_FREQS, hf_name, to_hf_layout

_SCALE = 2
"""Bytes of an fp16 number."""
_BYTES = {"Q8_0": _SCALE + 32, "Q4_0": _SCALE + 16, "Q4_1": 2 * _SCALE + 16}
"""Of a block."""


class GgufBlocks:
    """Implements `alula.model.layers.Blocks` for a file that `alula.model.gguf` has converted."""

    def __init__(self, path: Path, folder: Path, config: ModelConfig) -> None:
        """folder: what `path` was converted to."""
        self._path, self._directory, self._config = path, Directory.read(folder), config
        names = (name for name in self._directory.places if name != ROPE_FREQS)
        self._names = {hf_name(name, self._directory.architecture): name for name in names}

    def get(self, names: Sequence[str]) -> BlockWeight | None:
        """In Hugging Face's layout. Raises AlulaError for scales that are not finite."""
        found = [self._one(self._names[name]) for name in names]
        weights = [weight for weight in found if weight is not None]
        return joined(weights) if len(weights) == len(found) else None

    def _one(self, name: str) -> BlockWeight | None:
        kind, config = self._directory.places[name].kind, self._config
        if kind not in _BYTES:
            return None
        weight = blocks_of(self._directory.stored(self._path, name), kind)
        for halves_OG in (weight.scales_OG, weight.least_OG):
            if halves_OG is not None and not halves_OG.isfinite().all():
                raise AlulaError(f"tensor {name!r} holds scales that are not finite: download the file again")
        numbers_O1 = torch.arange(weight.shape[0])[:, None]
        order_O1 = to_hf_layout(numbers_O1, name, self._directory.architecture, config.num_heads, config.num_kv_heads)
        return weight if order_O1 is numbers_O1 else weight.rows(order_O1[:, 0])


def usual_format(folder: Path) -> BlockFormat | None:
    """The format of most matrices of the file that a folder was converted from; None where most would be rounded."""
    kinds = Directory.read(folder).kinds()
    ours = Counter("q8" if kind == "Q8_0" else "q4" if kind in _BYTES else None for kind in kinds)
    return cast("BlockFormat | None", ours.most_common(1)[0][0]) if ours else None


def blocks_of(rows_OB: torch.Tensor, kind: str) -> BlockWeight:
    """rows_OB: uint8, whole blocks side by side. kind: Q8_0, Q4_0 or Q4_1."""
    outs = len(rows_OB)
    blocks_OGB = rows_OB.view(outs, -1, _BYTES[kind])
    scales_OG = _halves(blocks_OGB[..., :_SCALE])
    if kind == "Q8_0":
        return BlockWeight("q8", blocks_OGB[..., _SCALE:].reshape(outs, -1).view(torch.int8), scales_OG)
    packed_OGB = blocks_OGB[..., -16:]
    numbers_OI = torch.cat([packed_OGB & 15, packed_OGB >> 4], -1).view(outs, -1)
    # Q4_0 stores numbers 8 too large, and 8 times a half is a half.
    least_OG = scales_OG * -8 if kind == "Q4_0" else _halves(blocks_OGB[..., _SCALE : 2 * _SCALE])
    return BlockWeight("q4", numbers_OI, scales_OG, least_OG)


def _halves(bytes_OG2: torch.Tensor) -> torch.Tensor:
    return bytes_OG2.contiguous().view(torch.float16)[..., 0]
