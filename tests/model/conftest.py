"""A dense causal forward of one sequence through the paged interface: slot = position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from alula.cache import KVLayer
from alula.kernels.protocol import Kernels
from alula.kernels.select import load_kernels
from alula.kernels.stack import Hidden
from alula.model.decoder import Decoder
from alula.model.hf_config import read_hf_config
from alula.model.weights import TensorFolder, check_tensors
from alula.tree import AttentionInput

PAGE = 16


def causal_input(start: int, rows: int) -> AttentionInput:
    """Rows at positions start .. start + rows - 1 of one sequence whose slots are its positions."""
    stop = start + rows
    positions = torch.arange(start, stop)
    pages = -(-stop // PAGE)
    return AttentionInput(
        positions_T=positions,
        slots_T=positions.clone(),
        sequence_T=torch.zeros(rows, dtype=torch.int32),
        page_table_BP=torch.arange(pages, dtype=torch.int32)[None],
        prefix_T=positions.to(torch.int32),
        tail_TE=positions[:, None].to(torch.int32),
        tail_len_T=torch.ones(rows, dtype=torch.int32),
        first_T=torch.zeros(rows, dtype=torch.int32),
        page_size=PAGE,
    )


def empty_cache(decoder: Decoder, slots: int) -> list[KVLayer]:
    return [KVLayer.zeros(shape, slots, decoder.dtype, decoder.device) for shape in decoder.kv_shapes]


@pytest.fixture
def dense() -> Callable[..., Hidden]:
    """dense(decoder, ids, taps=(), chunk=None): all positions of one sequence, in chunks of that many rows."""

    def run(decoder: Decoder, ids: Sequence[int], taps: tuple[int, ...] = (), chunk: int | None = None) -> Hidden:
        cache = empty_cache(decoder, -(-len(ids) // PAGE) * PAGE)
        tokens, size = torch.tensor(ids), chunk or len(ids)
        parts = [
            decoder.forward(tokens[at : at + size], causal_input(at, len(tokens[at : at + size])), cache, taps)
            for at in range(0, len(ids), size)
        ]
        features = torch.cat([part.features_TF for part in parts if part.features_TF is not None]) if taps else None
        return Hidden(torch.cat([part.final_TD for part in parts]), features)

    return run


@pytest.fixture
def load_folder() -> Callable[..., Decoder]:
    """load_folder(path, dtype=fp32, kernels=torch's): a decoder, checked as load_model checks it."""

    def load(folder: Path, dtype: torch.dtype = torch.float32, kernels: Kernels | None = None) -> Decoder:
        config, tensors = read_hf_config(folder), TensorFolder(folder)
        check_tensors(tensors, config)
        return Decoder(config, tensors, kernels or load_kernels("torch"), dtype=dtype)

    return load
