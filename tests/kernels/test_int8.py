"""Products in int8 against the same arithmetic in numpy, bit for bit, and what they promise beyond that."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from alula.kernels.native import NativeKernels
from tests.kernels.arithmetic import GROUP, fma, groups_of
from tests.kernels.sets import DTYPES, LEVELS, kernel_set, same_bits


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def int8_set(level: str) -> NativeKernels:
    found = kernel_set(f"int8 {level}")
    assert isinstance(found, NativeKernels)
    return found


@pytest.fixture(params=LEVELS)
def int8(request: pytest.FixtureRequest) -> NativeKernels:
    return int8_set(request.param)


def reference(
    x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    x, x_scales = groups_of(x_TI, bf16_scale=False)
    weight, weight_scales = groups_of(weight_OI, bf16_scale=True)
    result = np.zeros((len(x), len(weight)), np.float32)
    for group in range(x.shape[1]):
        sums = (x[:, group] @ weight[:, group].T).astype(np.float32)
        result = fma(sums, x_scales[:, group, None] * weight_scales[None, :, group], result)
    if bias_O is not None:
        result = result + bias_O.float().numpy()
    return torch.from_numpy(result).to(out_dtype)


SHAPES = [(576, 80), (100, 37), (1, 1), (31, 16), (33, 17), (64, 100), (1100, 50)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 9, 70, 300])
@pytest.mark.parametrize(("ins", "outs"), SHAPES)
def test_the_bits_of_the_definition(int8: NativeKernels, dtype: torch.dtype, rows: int, ins: int, outs: int) -> None:
    weight, x = normal(ins, outs, ins, dtype=dtype), 3 * normal(rows, rows, ins, dtype=dtype)
    bias = normal(3, outs, dtype=dtype)
    for given, out_dtype in ((None, dtype), (bias, torch.float32)):
        prepared = int8.prepare_linear(weight, given, out_dtype=out_dtype)
        assert same_bits(int8.linear(x, prepared), reference(x, weight, given, out_dtype))


def test_values_of_every_size(int8: NativeKernels) -> None:
    """Groups of zeros, of the smallest and of the largest numbers, and ties between two whole numbers."""
    x = normal(1, 6, 4 * GROUP)
    x[0] = 0
    x[1, GROUP : 2 * GROUP] = 0
    x[2] *= 1e-40
    x[3, :GROUP] *= 1e-30
    x[4] *= 1e30
    x[5] = (torch.arange(4 * GROUP) % 255 - 127) / 2
    weight = normal(2, 20, 4 * GROUP)
    weight[3] = 0
    weight[4, GROUP:] = 0
    weight[5] *= 1e-38
    bias = normal(3, 20)
    found = int8.linear(x, int8.prepare_linear(weight, bias))
    assert same_bits(found, reference(x, weight, bias, torch.float32))
    assert same_bits(found[0], bias)
    assert same_bits(found[2], bias)


@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_spoils_its_own_row_or_output(int8: NativeKernels, value: float) -> None:
    """With the same NaN on every level."""
    x, weight = normal(1, 9, 100), normal(2, 40, 100)
    expected = int8.linear(x, int8.prepare_linear(weight))
    bad_x, bad_weight = x.clone(), weight.clone()
    bad_x[4, 99] = value
    bad_weight[17, 0] = value
    rows, outs = torch.arange(9) != 4, torch.arange(40) != 17
    found = int8.linear(bad_x, int8.prepare_linear(weight))
    assert same_bits(found[4], torch.full((40,), torch.nan))
    assert same_bits(found[rows], expected[rows])
    found = int8.linear(x, int8.prepare_linear(bad_weight))
    assert same_bits(found[:, 17], torch.full((9,), torch.nan))
    assert same_bits(found[:, outs], expected[:, outs])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("ins", "outs"), [(576, 960), (1536, 80), (100, 37)])
def test_close_to_the_exact_product(int8: NativeKernels, dtype: torch.dtype, ins: int, outs: int) -> None:
    """Each number is off by at most half a step of its group's largest over 127, so a sum by about 1% of its size."""
    weight, x = normal(1, outs, ins, dtype=dtype), normal(2, 8, ins, dtype=dtype)
    exactly = x.double() @ weight.double().T
    found = int8.linear(x, int8.prepare_linear(weight, out_dtype=torch.float32))
    assert (found - exactly).norm() < 0.01 * exactly.norm()
    assert (found - exactly).norm() > 0.001 * exactly.norm()


def test_rows_may_be_strided(int8: NativeKernels) -> None:
    prepared, x = int8.prepare_linear(normal(1, 32, 48)), normal(2, 9, 100)
    assert same_bits(int8.linear(x[:, 20:68], prepared), int8.linear(x[:, 20:68].contiguous(), prepared))


def test_it_says_so(int8: NativeKernels) -> None:
    assert int8.weight_format == "int8"
    assert int8.describe()["linear"] == f"int8/{GROUP}"
    packed = int8.prepare_linear(normal(1, 33, 65))
    assert packed.nbytes == 48 * 96 * 17 // 16
