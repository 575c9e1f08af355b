"""EAGLE-3's layer in one native call: the bits of the single steps, for every flag, dtype and dispatch level."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from alula.cache import KVLayer
from alula.config import Rope
from alula.kernels.fused_pair import FusedPair
from alula.kernels.native import NativeKernels
from alula.kernels.pair import DraftLayer, PairLayer, SteppedPair
from alula.kernels.products import LinearPath
from alula.model.rope import build_rope
from alula.tree import AttentionInput
from tests.kernels.sets import DTYPES, LEVELS, same_bits

WIDTH, MIDDLE, HEADS, GROUPS, HEAD_DIM, VOCABULARY, SLOTS, ROWS = 40, 56, 4, 2, 16, 19, 48, 5


def addressing() -> AttentionInput:
    """Five rows of two sequences: prompts of 7 and 3 entries, then tree nodes in slots far from them."""
    return AttentionInput(
        positions_T=torch.tensor([7, 8, 8, 3, 4]),
        slots_T=torch.tensor([7, 40, 41, 19, 42]),
        sequence_T=torch.tensor([0, 0, 0, 1, 1], dtype=torch.int32),
        page_table_BP=torch.tensor([[0], [1]], dtype=torch.int32),
        prefix_T=torch.tensor([8, 8, 8, 4, 4], dtype=torch.int32),
        tail_TE=torch.tensor([[0], [40], [41], [0], [42]], dtype=torch.int32),
        tail_len_T=torch.tensor([0, 1, 1, 0, 1], dtype=torch.int32),
        first_T=torch.tensor([1, 1, 1, 0, 0], dtype=torch.int32),
        page_size=16,
    )


def layer(
    kernels: NativeKernels, dtype: torch.dtype, *, normed_residual: bool, norm_output: bool, bias: bool
) -> PairLayer:
    random = torch.Generator().manual_seed(3)

    def weight(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=random) / shape[-1] ** 0.5).to(dtype)

    def norm() -> torch.Tensor:
        return (1 + torch.randn(WIDTH, generator=random) / 4).to(dtype)

    queries, total = HEADS * HEAD_DIM, (HEADS + 2 * GROUPS) * HEAD_DIM
    block = DraftLayer(
        qkv=kernels.prepare_linear(weight(total, 2 * WIDTH), weight(total) if bias else None),
        rope=build_rope(Rope(10000.0), HEAD_DIM, 32, torch.device("cpu")),
        output=kernels.prepare_linear(weight(WIDTH, queries)),
        mlp_norm_D=norm(),
        gate_up=kernels.prepare_linear(weight(2 * MIDDLE, WIDTH)),
        down=kernels.prepare_linear(weight(WIDTH, MIDDLE)),
        heads=HEADS,
        scale=HEAD_DIM**-0.5,
        activation="gelu_tanh" if bias else "silu",
        eps=1e-5,
    )
    output_norm_D = norm() if norm_output else None
    return PairLayer(block, weight(VOCABULARY, WIDTH), norm(), norm(), output_norm_D, normed_residual)


def cache(dtype: torch.dtype) -> KVLayer:
    random = torch.Generator().manual_seed(4)
    return KVLayer(*(torch.randn(GROUPS, SLOTS, HEAD_DIM, generator=random).to(dtype) for _ in "kv"))


def rows(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    tokens_T = torch.tensor([3, 18, 0, 3, 7])
    return tokens_T, torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(5)).to(dtype)


def fused(kernels: NativeKernels, pair: PairLayer) -> FusedPair:
    prepared = kernels.prepare_pair(pair)
    assert isinstance(prepared, FusedPair)
    return prepared


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("linear", ["native", "int8"])
@pytest.mark.parametrize("normed_residual", [False, True])
@pytest.mark.parametrize("norm_output", [False, True])
@pytest.mark.parametrize("keep", [None, [0, 3, 4], [4, 1], []])
def test_the_fused_layer_has_the_bits_of_the_steps(
    level: str,
    dtype: torch.dtype,
    linear: LinearPath,
    normed_residual: bool,
    norm_output: bool,
    keep: list[int] | None,
) -> None:
    kernels = NativeKernels(level, linear)
    pair = layer(kernels, dtype, normed_residual=normed_residual, norm_output=norm_output, bias=norm_output)
    kept = None if keep is None else torch.tensor(keep, dtype=torch.int64)
    found_cache, expected_cache = cache(dtype), cache(dtype)
    found = fused(kernels, pair).run(*rows(dtype), addressing(), found_cache, kept)
    expected = SteppedPair(kernels, pair).run(*rows(dtype), addressing(), expected_cache, kept)
    assert found.shape == expected.shape == (ROWS if keep is None else len(keep), WIDTH)
    assert same_bits(found, expected)
    assert same_bits(found_cache.keys, expected_cache.keys) and same_bits(found_cache.values, expected_cache.values)
    assert not same_bits(found_cache.keys, cache(dtype).keys)


@pytest.mark.parametrize("linear", ["native", "int8"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_change_the_bits(threads: int, linear: LinearPath) -> None:
    kernels, before = NativeKernels(linear=linear), torch.get_num_threads()
    pair = layer(kernels, torch.bfloat16, normed_residual=False, norm_output=True, bias=True)
    expected = SteppedPair(kernels, pair).run(*rows(torch.bfloat16), addressing(), cache(torch.bfloat16))
    torch.set_num_threads(threads)
    try:
        found = fused(kernels, pair).run(*rows(torch.bfloat16), addressing(), cache(torch.bfloat16))
    finally:
        torch.set_num_threads(before)
    assert same_bits(found, expected)


def test_no_rows_are_no_work() -> None:
    kernels, nothing = NativeKernels(linear="native"), torch.zeros(0, dtype=torch.int64)
    pair = layer(kernels, torch.float32, normed_residual=False, norm_output=False, bias=False)
    where = addressing().rows(nothing)
    assert fused(kernels, pair).run(nothing, torch.zeros(0, WIDTH), where, cache(torch.float32)).shape == (0, WIDTH)


def test_torch_products_are_run_step_by_step() -> None:
    kernels = NativeKernels(linear="torch")
    pair = layer(kernels, torch.bfloat16, normed_residual=False, norm_output=False, bias=False)
    assert isinstance(kernels.prepare_pair(pair), SteppedPair)


def test_bad_arguments_are_named() -> None:
    kernels = NativeKernels(linear="native")
    pair = fused(kernels, layer(kernels, torch.float32, normed_residual=False, norm_output=False, bias=False))
    (tokens, states), where, held = rows(torch.float32), addressing(), cache(torch.float32)
    narrow = KVLayer(held.keys[..., :4].contiguous(), held.values[..., :4].contiguous())
    twice = torch.tensor([0, 1, 2, 3, 4, 4])
    for message, arguments in {
        "token 19 is out of range: give 0 to 18": (tokens + 1, states, where, held),
        "token -1": (torch.tensor([0, 1, -1, 2, 3]), states, where, held),
        "position 32 is out of range": (tokens, states, replace(where, positions_T=where.positions_T + 24), held),
        "slot 50 is outside the cache of 48": (tokens, states, replace(where, slots_T=where.slots_T + 8), held),
        "slot 50 is outside": (
            tokens,
            states,
            replace(where, slots_T=where.slots_T + 8),
            held,
            torch.tensor([0]),
        ),
        "width 40": (tokens, states[:, :8].contiguous(), where, held),
        "float32": (tokens, states.bfloat16(), where, held),
        "4 tokens": (tokens[:4], states, where, held),
        "tokens are .* give contiguous int64": (tokens.int(), states, where, held),
        "keep are .* give contiguous int64": (tokens, states, where, held, torch.tensor([0], dtype=torch.int32)),
        "heads of 4": (tokens, states, where, narrow),
        "kept row -1": (tokens, states, where, held, torch.tensor([-1])),
        "kept row 5 is out of range: give 0 to 4": (tokens, states, where, held, torch.tensor([5])),
        "name each once": (tokens, states, where, held, twice),
    }.items():
        with pytest.raises(ValueError, match=message):
            pair.run(*arguments)
