"""A row alone, and the same row inside random company: equal bit for bit, for every kernel of every set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alula.cache.pool import KVLayer
from alula.kernels.protocol import HeadNorm, Kernels, RopeTable
from tests.kernels.sets import DTYPES, draw_rows, place, same_bits

quick = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
seeds = st.integers(0, 2**31)
row_counts = st.one_of(st.integers(1, 20), st.sampled_from([33, 64, 97, 130]))
widths = st.sampled_from([1, 7, 16, 17, 48, 176, 576])
dtypes = st.sampled_from(DTYPES)


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def holds_alone(run: Callable[[torch.Tensor], torch.Tensor | tuple[torch.Tensor, ...]], x: torch.Tensor) -> bool:
    """Every row of run(x), its place and company changed, is run() of the row alone."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(len(x)))
    together, shuffled = _several(run(x)), _several(run(x[order].contiguous()))
    picks = {0, len(x) // 2, len(x) - 1}
    alone = {row: _several(run(x[row : row + 1])) for row in picks}
    moved = all(same_bits(t[order], s) for t, s in zip(together, shuffled, strict=True))
    return moved and all(
        same_bits(t[row : row + 1], a) for row in picks for t, a in zip(together, alone[row], strict=True)
    )


def _several(result: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (result,) if isinstance(result, torch.Tensor) else result


@quick
@given(seed=seeds, rows=row_counts, ins=widths, outs=widths, dtype=dtypes, wide=st.booleans(), bias=st.booleans())
def test_linear(
    products: Kernels, seed: int, rows: int, ins: int, outs: int, dtype: torch.dtype, wide: bool, bias: bool
) -> None:
    weight = normal(seed, outs, ins, dtype=dtype)
    out_dtype = torch.float32 if wide else dtype
    prepared = products.prepare_linear(weight, normal(seed, outs, dtype=dtype) if bias else None, out_dtype=out_dtype)
    assert holds_alone(lambda x: products.linear(x, prepared), normal(seed + 1, rows, ins, dtype=dtype))
    assert products.row_invariant


@pytest.mark.parametrize(("ins", "outs"), [(576, 960), (1536, 576), (1728, 64)])
def test_linear_of_model_sizes(products: Kernels, ins: int, outs: int) -> None:
    prepared = products.prepare_linear(normal(1, outs, ins, dtype=torch.bfloat16))
    for rows in (2, 5, 16, 61):
        assert holds_alone(lambda x: products.linear(x, prepared), normal(rows, rows, ins, dtype=torch.bfloat16))


def test_linear_at_any_address(products: Kernels) -> None:
    """The place in memory is no input: MKL's fp32 product of 16 x 17 by 17 x 7 differs between addresses."""
    weight, x = normal(0, 7, 17), normal(5, 16, 17)
    expected = products.linear(x, products.prepare_linear(weight))
    for offset in range(1, 16):
        shifted = torch.empty(x.numel() + 16)[offset : offset + x.numel()].view(x.shape).copy_(x)
        moved = torch.empty(weight.numel() + 16)[offset : offset + weight.numel()].view(weight.shape).copy_(weight)
        assert same_bits(products.linear(shifted, products.prepare_linear(moved)), expected)


@quick
@given(seed=seeds, rows=row_counts, width=widths, dtype=dtypes, last=st.booleans())
def test_norms(kernels: Kernels, seed: int, rows: int, width: int, dtype: torch.dtype, last: bool) -> None:
    weight = normal(seed, width, dtype=dtype)
    x = normal(seed + 1, rows, 2 * width, dtype=dtype)
    assert holds_alone(lambda x: kernels.rms_norm(x[:, :width], weight, 1e-5, round_last=last), x)
    assert holds_alone(lambda x: kernels.add_rms_norm(x[:, :width], x[:, width:], weight, 1e-5, round_last=last), x)


@quick
@given(seed=seeds, rows=row_counts, width=widths, dtype=dtypes)
def test_activations(kernels: Kernels, seed: int, rows: int, width: int, dtype: torch.dtype) -> None:
    x = 4 * normal(seed, rows, 2 * width, dtype=dtype)
    assert holds_alone(lambda x: kernels.gated(x, "silu"), x)
    assert holds_alone(lambda x: kernels.gated(x, "gelu_tanh"), x)
    assert holds_alone(lambda x: kernels.softcap(x, 1.5), x)


@quick
@given(seed=seeds, rows=st.integers(1, 12), width=st.sampled_from([1, 5, 16, 100, 1000, 4099]), masked=st.booleans())
def test_vocabulary(kernels: Kernels, seed: int, rows: int, width: int, masked: bool) -> None:
    x = (4 * normal(seed, rows, width)).round(decimals=1)
    if masked:
        x[normal(seed + 1, rows, width) > 0] = -torch.inf
    assert holds_alone(kernels.argmax, x)
    assert holds_alone(lambda x: kernels.topk(x, min(width, 20)), x)
    assert holds_alone(kernels.logsumexp, x)
    assert holds_alone(kernels.softmax, x)
    assert holds_alone(kernels.log_softmax, x)


@quick
@given(seed=seeds, rows=row_counts, size=st.sampled_from([8, 16, 24, 64]), dtype=dtypes, normed=st.booleans())
def test_rope_write(kernels: Kernels, seed: int, rows: int, size: int, dtype: torch.dtype, normed: bool) -> None:
    heads, groups = 4, 2
    random = torch.Generator().manual_seed(seed)
    rope = RopeTable(normal(seed, 50, size // 2), normal(seed + 1, 50, size // 2))
    norm = HeadNorm(normal(seed, size), normal(seed + 2, size), 1e-6) if normed else None
    qkv = normal(seed, rows, (heads + 2 * groups) * size, dtype=dtype)
    positions = torch.randint(50, (rows,), generator=random)

    def written(picks: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        layer = KVLayer(*(torch.zeros(groups, 200, size, dtype=dtype) for _ in range(2)))
        index = torch.zeros(len(picks), dtype=torch.int32)
        _, _, where = place(draw_rows(0, heads, groups, size, dtype)[:1], 0, 4)
        where = replace(
            where,
            positions_T=positions[picks],
            slots_T=slots,
            sequence_T=index,
            prefix_T=index,
            tail_len_T=index,
            first_T=index,
            tail_TE=index[:, None].clone(),
        )
        q = kernels.rope_write(qkv[picks], layer, where, rope, heads=heads, norm=norm)
        return q, layer.keys[:, slots].transpose(0, 1), layer.values[:, slots].transpose(0, 1)

    everything = torch.arange(rows)
    together = written(everything, torch.randperm(200, generator=random)[:rows])
    order = torch.randperm(rows, generator=random)
    shuffled = written(order, torch.arange(rows))
    alone = written(everything[-1:], torch.tensor([7]))
    assert all(same_bits(t[order], s) for t, s in zip(together, shuffled, strict=True))
    assert all(same_bits(t[-1:], a) for t, a in zip(together, alone, strict=True))


@pytest.mark.parametrize(("heads", "groups", "size"), [(9, 3, 64), (4, 4, 16), (8, 1, 24), (14, 2, 64), (2, 1, 128)])
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=seeds,
    dtype=dtypes,
    page_size=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([0, 0, 1, 20, 70]),
    softcap=st.sampled_from([0.0, 0.0, 2.0]),
)
def test_attention(
    kernels: Kernels,
    heads: int,
    groups: int,
    size: int,
    seed: int,
    dtype: torch.dtype,
    page_size: int,
    window: int,
    softcap: float,
) -> None:
    """Other slots, another page size, another split between prefix and tail, other company."""
    rows = draw_rows(seed, heads, groups, size, dtype)

    def run(some: list[int], seed: int, page_size: int) -> torch.Tensor:
        q, layer, where = place([rows[i] for i in some], seed, page_size)
        return kernels.attention(q, layer, where, scale=size**-0.5, window=window, softcap=softcap)

    everything = list(range(len(rows)))
    together = run(everything, seed, page_size)
    again = run(everything[::-1], seed + 1, 8)
    assert same_bits(together, again.flip(0))
    for row in {0, len(rows) // 2, len(rows) - 1}:
        assert same_bits(run([row], seed + 2, 2)[0], together[row])
    assert not together.isnan().any()


def test_prefill_and_decode_agree(kernels: Kernels) -> None:
    """Rows of a prompt in one forward, in chunks, and one by one: the same bits."""
    length, size = 150, 32
    keys, values, queries = normal(1, length, 1, size), normal(2, length, 1, size), normal(3, length, 3, size)
    rows = [
        replace(draw_rows(0, 3, 1, size, torch.float32)[0], query=queries[i], keys=keys[: i + 1], shared=i + 1)
        for i in range(length)
    ]
    rows = [replace(row, values=values[: len(row.keys)], first=0, sequence=0) for row in rows]

    def run(some: list) -> torch.Tensor:  # type: ignore[type-arg]
        q, layer, where = place(some, 5, 16)
        return kernels.attention(q, layer, where, scale=0.2)

    whole = run(rows)
    assert same_bits(torch.cat([run(rows[:70]), run(rows[70:])]), whole)
    assert all(same_bits(run([rows[i]])[0], whole[i]) for i in (0, 63, 64, 149))
