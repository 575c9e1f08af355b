"""Values: every set against plain formulas in double precision, and native against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alula.cache.pool import KVLayer
from alula.kernels import exact
from alula.kernels.native import NativeKernels
from alula.kernels.protocol import HeadNorm, Kernels, RopeTable
from alula.kernels.torch_reference import TorchKernels
from tests.kernels.sets import DTYPES, dense, draw_rows, place, same_bits

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    return torch.allclose(a.double(), b.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 6, 7, 16, 100])
@pytest.mark.parametrize(("ins", "outs"), [(576, 960), (1536, 80), (100, 37), (1, 1)])
def test_linear(kernels: Kernels, dtype: torch.dtype, rows: int, ins: int, outs: int) -> None:
    weight, bias, x = normal(1, outs, ins, dtype=dtype), normal(2, outs, dtype=dtype), normal(3, rows, ins, dtype=dtype)
    exactly = F.linear(x.double(), weight.double(), bias.double())
    size = ins**0.5
    narrow = kernels.linear(x, kernels.prepare_linear(weight, bias))
    wide = kernels.linear(x, kernels.prepare_linear(weight, bias, out_dtype=torch.float32))
    assert narrow.dtype == dtype
    assert wide.dtype == torch.float32
    assert close(narrow / size, exactly / size, TOLERANCE[dtype])
    assert close(wide / size, exactly / size, 5e-6)


def test_linear_reads_strided_rows(kernels: Kernels) -> None:
    prepared = kernels.prepare_linear(normal(1, 32, 48))
    x = normal(2, 9, 100)
    assert same_bits(kernels.linear(x[:, 20:68], prepared), kernels.linear(x[:, 20:68].contiguous(), prepared))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_norm_of_llama(kernels: Kernels, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    x, weight = normal(1, 5, 100, dtype=dtype), normal(2, 100, dtype=weight_dtype)
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(dtype)
    assert close(kernels.rms_norm(x, weight, 1e-5), weight * normed, TOLERANCE[dtype] / 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_gemma(kernels: Kernels, dtype: torch.dtype) -> None:
    x, weight = normal(1, 5, 100, dtype=dtype), normal(2, 100)
    wide = x.double()
    exactly = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.double()
    result = kernels.rms_norm(x, weight, 1e-6, round_last=True)
    assert same_bits(result.bfloat16(), exactly.bfloat16()) or dtype == torch.float32
    assert close(result, exactly, TOLERANCE[dtype] / 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_adds_the_residual_first(kernels: Kernels, dtype: torch.dtype) -> None:
    x, residual, weight = normal(1, 5, 48, dtype=dtype), normal(2, 5, 48, dtype=dtype), normal(3, 48, dtype=dtype)
    normed, total = kernels.add_rms_norm(x, residual, weight, 1e-5)
    assert same_bits(total, x + residual)
    assert same_bits(normed, kernels.rms_norm(x + residual, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations(kernels: Kernels, dtype: torch.dtype) -> None:
    x = 6 * normal(1, 4, 2 * 176, dtype=dtype)
    gate, up = x.chunk(2, -1)
    assert close(kernels.gated(x, "silu"), F.silu(gate) * up, TOLERANCE[dtype])
    assert close(kernels.gated(x, "gelu_tanh"), F.gelu(gate, approximate="tanh") * up, TOLERANCE[dtype])


def test_activations_at_the_ends(kernels: Kernels) -> None:
    gate = torch.tensor([[-1000.0, -90.0, 0.0, 90.0, 1000.0]])
    x = torch.cat((gate, torch.ones_like(gate)), -1)
    for activation in ("silu", "gelu_tanh"):
        result = kernels.gated(x, activation)  # type: ignore[arg-type]
        assert close(result, torch.tensor([[0.0, 0.0, 0.0, 90.0, 1000.0]]), 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_softcap(kernels: Kernels, dtype: torch.dtype) -> None:
    x = 50 * normal(1, 3, 77, dtype=dtype)
    assert close(kernels.softcap(x, 30.0), 30 * torch.tanh(x.double() / 30), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [8, 64])
def test_rope_write(kernels: Kernels, dtype: torch.dtype, size: int) -> None:
    """Against the rotate-half formula; the cache elsewhere stays as it was."""
    heads, groups, rows = 6, 2, 5
    angles = normal(1, 20, size // 2)
    rope = RopeTable(angles.cos(), angles.sin())
    qkv = normal(2, rows, (heads + 2 * groups) * size, dtype=dtype)
    weights = normal(3, size), normal(4, size)
    _, layer, where = place(draw_rows(1, heads, groups, size, dtype)[:1], 1, 16)
    index = torch.zeros(rows, dtype=torch.int32)
    where = replace(where, positions_T=torch.tensor([3, 0, 19, 3, 7]), slots_T=torch.tensor([4, 9, 1, 2, 30]))
    where = replace(
        where, sequence_T=index, prefix_T=index, tail_len_T=index, first_T=index, tail_TE=index[:, None] + 0
    )
    layer = KVLayer(torch.ones(groups, 40, size, dtype=dtype), torch.ones(groups, 40, size, dtype=dtype))
    q = kernels.rope_write(qkv, layer, where, rope, heads=heads, norm=HeadNorm(*weights, 1e-6, True))

    packed = qkv.view(rows, -1, size)
    cos, sin = (torch.cat((t, t), -1)[where.positions_T, None] for t in (rope.cos_MK, rope.sin_MK))

    def turned(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = kernels.rms_norm(x.reshape(-1, size), weight, 1e-6, round_last=True).view(x.shape).float()
        return x * cos + torch.cat((-x[..., size // 2 :], x[..., : size // 2]), -1) * sin

    assert close(q, turned(packed[:, :heads], weights[0]), TOLERANCE[dtype])
    keys, values = (held[:, where.slots_T].transpose(0, 1) for held in (layer.keys, layer.values))
    assert close(keys, turned(packed[:, heads:-groups], weights[1]), TOLERANCE[dtype])
    assert same_bits(values, packed[:, -groups:])
    others = [slot for slot in range(40) if slot not in where.slots_T.tolist()]
    assert (layer.keys[:, others] == 1).all()
    assert (layer.values[:, others] == 1).all()


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**31),
    shape=st.sampled_from([(9, 3, 64), (4, 4, 16), (8, 1, 24)]),
    dtype=st.sampled_from(DTYPES),
    window=st.sampled_from([0, 1, 33]),
    softcap=st.sampled_from([0.0, 1.5]),
)
def test_attention_against_a_dense_mask(
    kernels: Kernels, seed: int, shape: tuple[int, int, int], dtype: torch.dtype, window: int, softcap: float
) -> None:
    rows = draw_rows(seed, *shape, dtype)
    q, layer, where = place(rows, seed, 16)
    result = kernels.attention(q, layer, where, scale=0.25, window=window, softcap=softcap)
    exactly = torch.stack([dense(row, 0.25, window, softcap) for row in rows])
    assert close(result, exactly, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_native_equals_the_reference(native: NativeKernels, reference: TorchKernels, dtype: torch.dtype) -> None:
    """Rounding apart: the two add in another order."""
    for seed in range(5):
        q, layer, where = place(draw_rows(seed, 6, 2, 32, dtype), seed, 16)
        ours, theirs = (k.attention(q, layer, where, scale=0.2, window=40) for k in (native, reference))
        assert close(ours, theirs, TOLERANCE[dtype])
    x, weight = normal(1, 7, 200, dtype=dtype), normal(2, 200, dtype=dtype)
    assert close(native.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), TOLERANCE[dtype])
    assert close(native.gated(x, "silu"), reference.gated(x, "silu"), TOLERANCE[dtype])


@pytest.mark.parametrize("width", [1, 2, 63, 64, 65, 1000, 8192])
def test_order_of_ties(kernels: Kernels, width: int) -> None:
    """Value descending, index ascending, for values with many ties, NaN last."""
    x = normal(width, 6, width).round()
    x[1] = 0
    x[2, ::3] = torch.nan
    x[3] = -torch.inf
    x[4] = torch.nan
    values = [[v if v == v else -torch.inf for v in row] for row in x.tolist()]
    order = [sorted(range(width), key=lambda i, row=row: (-row[i], i)) for row in values]  # type: ignore[misc]
    for k in {1, min(width, 30), width}:
        found, index = kernels.topk(x, k)
        assert index.tolist() == [row[:k] for row in order]
        assert found.tolist() == [[row[i] for i in o[:k]] for row, o in zip(values, order, strict=True)]
    assert kernels.argmax(x).tolist() == [row[0] for row in order]


def test_sums_over_a_vocabulary(kernels: Kernels) -> None:
    x = 5 * normal(1, 4, 5000)
    x[1, ::2] = -torch.inf
    x[2] += 1000
    x[3] = -torch.inf
    wide = x.double()
    assert close(kernels.logsumexp(x)[:3], wide[:3].logsumexp(-1), 1e-6)
    assert close(kernels.softmax(x)[:3], wide[:3].softmax(-1), 1e-6)
    seen = wide > -torch.inf
    assert close(kernels.log_softmax(x)[:3][seen[:3]], wide[:3].log_softmax(-1)[seen[:3]], 2e-6)
    assert kernels.logsumexp(x)[3] == -torch.inf
    assert (kernels.softmax(x)[3] == 0).all()
    assert (kernels.log_softmax(x)[~seen] == -torch.inf).all()


def test_exact_functions() -> None:
    x = torch.linspace(-86.9, 87.9, 40001)
    assert torch.allclose(exact.exp(x).double(), x.double().exp(), rtol=2e-7, atol=0)
    small = torch.cat((torch.linspace(-10, 10, 40001), torch.tensor([1e-8, -1e-8, 100.0, -100.0])))
    assert torch.allclose(exact.tanh(small).double(), small.double().tanh(), rtol=3e-7, atol=0)
    positive = torch.logspace(-37, 37, 40001)
    assert torch.allclose(exact.log(positive).double(), positive.double().log(), rtol=2e-7, atol=2e-7)
    assert exact.exp(torch.tensor([-torch.inf, -88.0])).tolist() == [0, 0]
