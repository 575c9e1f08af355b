"""Products with a file's own blocks against the same arithmetic in numpy, bit for bit, and what they promise."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch

from alula.kernels.blocks import BLOCK, BlockFormat, BlockWeight, joined
from alula.kernels.native import NativeKernels
from alula.kernels.torch_reference import TorchKernels
from tests.kernels.arithmetic import GROUP, fma, groups_of
from tests.kernels.sets import DTYPES, LEVELS, same_bits

FORMATS = get_args(BlockFormat)


def drawn(seed: int, format: BlockFormat, outs: int, ins: int) -> BlockWeight:
    random = torch.Generator().manual_seed(seed)

    def halves() -> torch.Tensor:
        return (torch.randn(outs, ins // BLOCK, generator=random) * 0.02).half()

    if format == "q8":
        numbers = torch.randint(-128, 128, (outs, ins), generator=random, dtype=torch.int8)
        return BlockWeight("q8", numbers, halves())
    numbers = torch.randint(0, 16, (outs, ins), generator=random, dtype=torch.uint8)
    return BlockWeight("q4", numbers, halves(), halves())


def rows(seed: int, count: int, ins: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (3 * torch.randn(count, ins, generator=torch.Generator().manual_seed(seed))).to(dtype)


def reference(x_TI: torch.Tensor, weight: BlockWeight, bias_O: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    numbers, x_scales = groups_of(x_TI, bf16_scale=False)
    (outs, ins), scales = weight.shape, weight.scales_OG.float().numpy()
    weights = weight.numbers_OI.numpy().astype(np.int64).reshape(outs, ins // BLOCK, BLOCK)
    offsets = x_scales * numbers.sum(-1).astype(np.float32)
    result = np.zeros((len(x_TI), outs), np.float32)
    for group in range(ins // BLOCK):
        sums = (numbers[:, group] @ weights[:, group].T).astype(np.float32)
        result = fma(sums, x_scales[:, group, None] * scales[None, :, group], result)
        if weight.least_OG is not None:
            result = fma(offsets[:, group, None], weight.least_OG.float().numpy()[None, :, group], result)
    if bias_O is not None:
        result = result + bias_O.float().numpy()
    return torch.from_numpy(result).to(dtype)


@pytest.fixture(params=LEVELS)
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    return NativeKernels(request.param, linear="file")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 9, 70, 300])
@pytest.mark.parametrize(("ins", "outs"), [(576, 80), (32, 1), (64, 37), (1120, 50)])
def test_the_bits_of_the_definition(
    kernels: NativeKernels, format: BlockFormat, dtype: torch.dtype, count: int, ins: int, outs: int
) -> None:
    weight, x = drawn(ins, format, outs, ins), rows(count, count, ins, dtype)
    for bias, out_dtype in ((None, dtype), (rows(3, 1, outs, dtype)[0], torch.float32)):
        prepared = kernels.prepare_blocks(weight, bias, out_dtype=out_dtype)
        assert same_bits(kernels.linear(x, prepared), reference(x, weight, bias, out_dtype))


@pytest.mark.parametrize("format", FORMATS)
def test_extreme_numbers(kernels: NativeKernels, format: BlockFormat) -> None:
    """Sums of 16 bits hold the largest products, and fp16 scales their smallest and largest values."""
    weight = drawn(1, format, 33, 64)
    weight.numbers_OI[:] = 15 if format == "q4" else -128
    halves = [weight.scales_OG] if weight.least_OG is None else [weight.scales_OG, weight.least_OG]
    for values in halves:
        values[0], values[1], values[2], values[3] = 65504.0, -65504.0, 2.0**-24, 0.0
    x = torch.stack([torch.full((64,), 1e-3), torch.full((64,), -127.0), torch.zeros(64), 1e20 * torch.ones(64)])
    prepared = kernels.prepare_blocks(weight, out_dtype=torch.float32)
    assert same_bits(kernels.linear(x, prepared), reference(x, weight, None, torch.float32))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_spoils_its_own_row(kernels: NativeKernels, format: BlockFormat, value: float) -> None:
    weight, x = drawn(1, format, 40, 96), rows(2, 9, 96)
    prepared = kernels.prepare_blocks(weight, out_dtype=torch.float32)
    expected = kernels.linear(x, prepared)
    x[4, 95] = value
    found, others = kernels.linear(x, prepared), torch.arange(9) != 4
    assert found[4].isnan().all()
    assert same_bits(found[others], expected[others])


@pytest.mark.parametrize("format", FORMATS)
def test_row_alone_and_in_company(kernels: NativeKernels, format: BlockFormat) -> None:
    prepared = kernels.prepare_blocks(drawn(4, format, 100, 576), out_dtype=torch.bfloat16)
    for count in (2, 3, 5, 16, 61):
        x = rows(count, count, 576, torch.bfloat16)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(count))
        together = kernels.linear(x, prepared)
        assert same_bits(kernels.linear(x[order], prepared), together[order])
        for row in range(count):
            assert same_bits(kernels.linear(x[row : row + 1], prepared)[0], together[row])


@pytest.mark.parametrize("format", FORMATS)
def test_close_to_the_exact_product(kernels: NativeKernels, format: BlockFormat) -> None:
    """Only rows are rounded: by at most half a step of their group's largest over 127."""
    weight, x = drawn(1, format, 80, 960), rows(2, 8, 960)
    exactly = x.double() @ weight.values().double().T
    found = kernels.linear(x, kernels.prepare_blocks(weight, out_dtype=torch.float32))
    assert 0.001 * exactly.norm() < (found - exactly).norm() < 0.01 * exactly.norm()


def test_weights_on_the_same_input_are_joined() -> None:
    first, second = drawn(1, "q4", 3, 64), drawn(2, "q4", 5, 64)
    both = joined([first, second])
    assert both is not None
    assert torch.equal(both.values(), torch.cat([first.values(), second.values()]))
    assert torch.equal(both.rows(torch.tensor([4, 0])).values(), both.values()[[4, 0]])
    assert joined([first, drawn(1, "q8", 3, 64)]) is None


def test_it_says_what_it_holds(kernels: NativeKernels) -> None:
    q4 = kernels.prepare_blocks(drawn(1, "q4", 33, 64), out_dtype=torch.bfloat16)
    kernels.prepare_blocks(drawn(1, "q8", 33, 64), out_dtype=torch.bfloat16)
    kernels.prepare_linear(torch.ones(33, 64))
    assert kernels.weight_format == "file"
    assert kernels.describe()["linear"] == "file (1 int8, 1 q4, 1 q8)"
    assert q4.nbytes == 48 * 64 * 5 // 8
    assert BLOCK == GROUP


def test_wrong_blocks_are_refused(kernels: NativeKernels) -> None:
    q4, q8 = drawn(1, "q4", 16, 64), drawn(1, "q8", 16, 64)
    faults = {
        "float32 scales": replace(q4, scales_OG=q4.scales_OG.float()),
        "least values for q4": replace(q4, least_OG=None),
        "none for q8": replace(q8, least_OG=q4.least_OG),
        "torch.int8 ones": replace(q8, numbers_OI=q4.numbers_OI),
        "a multiple of 32": replace(q8, numbers_OI=q8.numbers_OI[:, :40]),
        "one per group": replace(q8, scales_OG=q8.scales_OG[:, :1]),
    }
    for words, weight in faults.items():
        with pytest.raises(ValueError, match=words):
            kernels.prepare_blocks(weight, out_dtype=torch.float32)
    with pytest.raises(ValueError, match="one value per output"):
        kernels.prepare_blocks(q4, torch.ones(15), out_dtype=torch.float32)
    for other in (NativeKernels(linear="int8"), TorchKernels()):
        with pytest.raises(ValueError, match="give"):
            other.prepare_blocks(q4, out_dtype=torch.float32)
