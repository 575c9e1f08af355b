"""All layers in one native call: the bits of the single steps, for every family, dtype and dispatch level."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from alula.cache import KVLayer
from alula.kernels.fused import FusedStack
from alula.kernels.native import NativeKernels
from alula.kernels.products import LinearPath
from alula.kernels.stack import FINAL, Hidden, PreparedStack, Stack, SteppedStack
from alula.model.decoder import Decoder
from alula.tree import AttentionInput
from tests.kernels.sets import DTYPES, LEVELS, same_bits
from tests.model.conftest import causal_input, empty_cache
from tests.model.test_parity import CASES, SMALL, build

PROMPT, SLOTS, TAPS = 23, 48, (2, FINAL, 0, 4)


class SteppedKernels(NativeKernels):
    """The native set without fused layers."""

    def prepare_stack(self, stack: Stack) -> PreparedStack:
        return SteppedStack(self, stack)


def tree_input() -> AttentionInput:
    """Six nodes after the prompt (two children of the root, a grandchild under each, and so on) in slots 23 .. 28."""
    tails = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 1, 3, 5]]
    width, rows = max(map(len, tails)), len(tails)
    slots = torch.arange(PROMPT, PROMPT + rows)
    return AttentionInput(
        positions_T=torch.tensor([PROMPT + len(tail) - 1 for tail in tails]),
        slots_T=slots,
        sequence_T=torch.zeros(rows, dtype=torch.int32),
        page_table_BP=torch.arange(3, dtype=torch.int32)[None],
        prefix_T=torch.full((rows,), PROMPT, dtype=torch.int32),
        tail_TE=torch.tensor([[PROMPT + node for node in [*tail, *[0] * (width - len(tail))]] for tail in tails]).int(),
        tail_len_T=torch.tensor([len(tail) for tail in tails], dtype=torch.int32),
        first_T=torch.zeros(rows, dtype=torch.int32),
        page_size=16,
    )


def run(decoder: Decoder) -> tuple[list[Hidden], list[KVLayer]]:
    cache, random = empty_cache(decoder, SLOTS), torch.Generator().manual_seed(5)
    tokens = torch.randint(3, SMALL["vocab_size"], (PROMPT + 6,), generator=random)
    prompt = decoder.forward(tokens[:PROMPT], causal_input(0, PROMPT), cache, TAPS)
    tree = decoder.forward(tokens[PROMPT:], tree_input(), cache, TAPS)
    return [prompt, tree, decoder.forward(tokens[:1], causal_input(PROMPT, 1), cache)], cache


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("linear", ["native", "int8"])
@pytest.mark.parametrize("case", CASES)
def test_fused_layers_have_the_bits_of_the_steps(
    case: str, linear: LinearPath, dtype: torch.dtype, level: str, tmp_path: Path, load_folder: Callable[..., Any]
) -> None:
    build(case, tmp_path)
    fused, stepped = (
        load_folder(tmp_path, dtype, kernels(level, linear)) for kernels in (NativeKernels, SteppedKernels)
    )
    (found, cache), (expected, expected_cache) = run(fused), run(stepped)
    for a, b in zip(found, expected, strict=True):
        assert same_bits(a.final_TD, b.final_TD)
        assert (a.features_TF is None) == (b.features_TF is None)
        assert a.features_TF is None or same_bits(a.features_TF, b.features_TF)
    for layer, other in zip(cache, expected_cache, strict=True):
        assert same_bits(layer.keys, other.keys)
        assert same_bits(layer.values, other.values)


@pytest.mark.parametrize("linear", ["native", "int8"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_change_the_bits(
    threads: int, linear: LinearPath, tmp_path: Path, load_folder: Callable[..., Any]
) -> None:
    build("gemma3", tmp_path)
    decoder, before = load_folder(tmp_path, torch.bfloat16, NativeKernels(linear=linear)), torch.get_num_threads()
    expected, cache = run(load_folder(tmp_path, torch.bfloat16, SteppedKernels(linear=linear)))
    torch.set_num_threads(threads)
    try:
        found, threaded = run(decoder)
    finally:
        torch.set_num_threads(before)
    assert all(same_bits(a.final_TD, b.final_TD) for a, b in zip(found, expected, strict=True))
    assert all(same_bits(a.keys, b.keys) for a, b in zip(threaded, cache, strict=True))


def test_bad_arguments_are_named(tmp_path: Path, load_folder: Callable[..., Any]) -> None:
    build("llama", tmp_path)
    decoder = load_folder(tmp_path, torch.float32, NativeKernels(linear="native"))
    cache, where, tokens = empty_cache(decoder, SLOTS), causal_input(0, 3), torch.tensor([4, 5, 6])
    far = replace(where, positions_T=where.positions_T + 1000)
    outside = replace(where, slots_T=where.slots_T + SLOTS)
    narrow = [KVLayer(layer.keys[..., :4].contiguous(), layer.values[..., :4].contiguous()) for layer in cache]
    mixed = [*cache[:-1], KVLayer(cache[-1].keys.bfloat16(), cache[-1].values.bfloat16())]
    decoder.forward(tokens, where, cache)  # a cache that was right does not vouch for another one
    for message, arguments in {
        "rope table": (tokens, far, cache),
        "outside the cache": (tokens, outside, cache),
        "2 rows|3 rows": (tokens[:2], where, cache),
        "one per decoder layer": (tokens, where, cache[:-1]),
        "keys of 2 heads of 4": (tokens, where, narrow),
        "several dtypes": (tokens, where, mixed),
    }.items():
        with pytest.raises(ValueError, match=message):
            decoder.forward(*arguments)


def test_torch_products_are_run_step_by_step(tmp_path: Path, load_folder: Callable[..., Any]) -> None:
    build("llama", tmp_path)
    made: list[PreparedStack] = []

    class Watched(NativeKernels):
        def prepare_stack(self, stack: Stack) -> PreparedStack:
            made.append(super().prepare_stack(stack))
            return made[-1]

    linears: tuple[LinearPath, ...] = ("native", "int8", "torch")
    for linear in linears:
        load_folder(tmp_path, torch.bfloat16, Watched(linear=linear))
    assert [type(stack) for stack in made] == [FusedStack, FusedStack, SteppedStack]
