"""Choosing a set, the probe of torch's product, and refusals."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from alula.cache.pool import KVLayer
from alula.config import AlulaError
from alula.kernels import padded
from alula.kernels.native import NativeKernels
from alula.kernels.packed import NativeLinear
from alula.kernels.padded import PaddedLinear
from alula.kernels.protocol import Kernels, RopeTable
from alula.kernels.select import load_kernels
from alula.kernels.torch_reference import TorchKernels
from tests.kernels.sets import LEVELS, draw_rows, place


def test_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_kernels("torch").name == "torch"
    assert load_kernels("native").name == load_kernels("auto").name == "native"
    assert load_kernels("auto", "cuda").name == "torch"
    monkeypatch.setenv("ALULA_CPU_LEVEL", "portable")
    assert load_kernels("native").describe()["level"] == "portable"
    monkeypatch.delenv("ALULA_CPU_LEVEL")
    assert load_kernels("native").describe()["level"] == LEVELS[0]


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: load_kernels("fast"), "kernels"),
        (lambda: load_kernels("native", "cuda"), "CPU"),
        (lambda: load_kernels("native", level="sse"), "level"),
        (lambda: load_kernels("native", linear="mkl"), "linear"),  # type: ignore[arg-type]
        (lambda: load_kernels("torch", linear="int8"), "int8 is there in the native kernels"),
        (lambda: load_kernels("auto", "cuda", linear="int8"), "on cuda"),
    ],
)
def test_refused_choices(call: Callable[[], object], word: str) -> None:
    with pytest.raises(AlulaError, match=word):
        call()


def test_without_the_extension() -> None:
    """A checkout that was not built: torch's kernels, with a word about it, or a refusal that says what to do."""
    script = """
import sys, warnings
sys.modules["alula.kernels._native"] = None
warnings.simplefilter("error")
from alula.kernels.select import load_kernels
try:
    load_kernels("auto")
except UserWarning as warning:
    print(warning)
warnings.simplefilter("ignore")
kernels = load_kernels("auto")
kernels.release_threads()
print(kernels.name)
try:
    load_kernels("native")
except ValueError as error:
    print(error)
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    assert "the native kernels were not built" in out[0]
    assert out[1] == "torch"
    assert "reinstall alula, or give 'torch'" in out[2]


def test_linear_paths() -> None:
    """torch's product only where results are bf16: fp32 results would be rounded."""
    weight = torch.randn(32, 16).bfloat16()
    ours, theirs = NativeKernels(linear="native"), NativeKernels(linear="torch")
    assert isinstance(ours.prepare_linear(weight), NativeLinear)
    assert isinstance(theirs.prepare_linear(weight), PaddedLinear)
    assert isinstance(theirs.prepare_linear(weight, out_dtype=torch.float32), NativeLinear)
    assert isinstance(theirs.prepare_linear(weight.float()), NativeLinear)
    x = torch.randn(5, 16).bfloat16()
    a, b = (k.linear(x, k.prepare_linear(weight)).float() for k in (ours, theirs))
    assert torch.allclose(a, b, rtol=1e-2, atol=1e-2)
    with pytest.raises(ValueError, match="another kernel set"):
        TorchKernels().linear(x, ours.prepare_linear(weight))


def _fake_product(bad: Callable[[int], bool], by_place: bool = False) -> Callable[..., torch.Tensor]:
    """A product whose bits change for some row counts, or with the row's place."""

    def product(x: torch.Tensor, linear: PaddedLinear, rows: int) -> torch.Tensor:
        y = (x[:, None].double() * linear.weight_OI.double()).sum(-1).float()
        if bad(rows):
            y = y * (1 + 1e-6)
        if by_place and rows > 1:
            y = y * (1 + 1e-6 * torch.arange(len(x))[:, None])
        return y

    return product


@pytest.mark.parametrize(
    ("bad", "by_place", "rows", "plan", "tile"),
    [
        (lambda n: n == 1, False, 1, 2, 16),
        (lambda n: n % 4 != 0, False, 5, 8, 16),
        (lambda n: n % 4 != 0, False, 8, 8, 16),
        (lambda n: n != 16, False, 20, 0, 16),
        (lambda n: False, True, 3, 0, 1),
    ],
)
def test_probe_finds_the_padding(
    monkeypatch: pytest.MonkeyPatch,
    bad: Callable[[int], bool],
    by_place: bool,
    rows: int,
    plan: int,
    tile: int,
) -> None:
    monkeypatch.setattr(padded, "_product", _fake_product(bad, by_place))
    kernels = TorchKernels()
    linear = kernels.prepare_linear(torch.randn(6, 10))
    x = torch.randn(rows, 10)
    together = kernels.linear(x, linear)
    assert list(kernels.probe.plans.values()) == [plan]
    assert list(kernels.probe.tiles.values()) == [tile]
    assert "10x6" in str(kernels.describe()["linear"])
    alone = torch.cat([kernels.linear(row[None], linear) for row in x])
    assert torch.equal(together, alone)


def _attention_refusals() -> list[tuple[str, dict[str, torch.Tensor]]]:
    int32 = torch.int32
    return [
        ("sequence_T", {"sequence_T": torch.tensor([9], dtype=int32)}),
        ("prefix_T", {"prefix_T": torch.tensor([4000], dtype=int32)}),
        ("tail_len_T", {"tail_len_T": torch.tensor([4000], dtype=int32)}),
        ("slot", {"tail_TE": torch.full((1, 1), 10**6, dtype=int32), "tail_len_T": torch.tensor([1], dtype=int32)}),
        ("slot", {"slots_T": torch.tensor([-1])}),
        ("int32", {"first_T": torch.tensor([0])}),
    ]


@pytest.mark.parametrize(("word", "change"), _attention_refusals())
def test_native_refuses_addresses_outside(native: NativeKernels, word: str, change: dict[str, torch.Tensor]) -> None:
    q, layer, where = place(draw_rows(3, 2, 1, 16, torch.float32)[:1], 1, 16)
    with pytest.raises(ValueError, match=word):
        native.attention(q, layer, replace(where, **change), scale=1.0)


def test_refused_arguments(kernels: Kernels) -> None:
    q, layer, where = place(draw_rows(3, 2, 1, 16, torch.float32)[:1], 1, 16)
    x = torch.randn(3, 16)
    linear = kernels.prepare_linear(torch.randn(8, 16))
    rope = RopeTable(torch.ones(4, 8), torch.ones(4, 8))
    strided = KVLayer(*(torch.zeros(2, 100, 16)[:1, ::2] for _ in range(2)))
    calls: list[tuple[str, Callable[[], object]]] = [
        ("width 16", lambda: kernels.linear(x[:, :9], linear)),
        ("float32 or bfloat16", lambda: kernels.linear(x.double(), linear)),
        ("strided", lambda: kernels.linear(torch.randn(16, 3).T, linear)),
        ("weight", lambda: kernels.prepare_linear(torch.randn(8))),
        ("bias", lambda: kernels.prepare_linear(torch.randn(8, 16), torch.randn(7))),
        ("activation", lambda: kernels.gated(x, "relu")),  # type: ignore[arg-type]
        ("even", lambda: kernels.gated(x[:, :3], "silu")),
        ("k is 0", lambda: kernels.topk(x, 0)),
        ("k is 17", lambda: kernels.topk(x, 17)),
        ("logits", lambda: kernels.argmax(x.bfloat16())),
        ("q has shape", lambda: kernels.attention(q[..., :8], layer, where, scale=1.0)),
        ("rows", lambda: kernels.attention(q.repeat(2, 1, 1), layer, where, scale=1.0)),
        ("window", lambda: kernels.attention(q, layer, where, scale=1.0, window=-1)),
        ("contiguous", lambda: kernels.attention(q, strided, where, scale=1.0)),
        ("qkv", lambda: kernels.rope_write(x, layer, where, rope, heads=2)),
        ("residual", lambda: kernels.add_rms_norm(x, x[:2], torch.ones(16), 1e-5)),
    ]
    for word, call in calls:
        with pytest.raises(ValueError, match=word):
            call()


def test_rope_table_too_short(native: NativeKernels) -> None:
    _, layer, where = place(draw_rows(3, 2, 1, 16, torch.float32)[:1], 1, 16)
    rope = RopeTable(torch.ones(4, 8), torch.ones(4, 8))
    with pytest.raises(ValueError, match="rope table"):
        native.rope_write(torch.randn(1, 64), layer, replace(where, positions_T=torch.tensor([4])), rope, heads=2)
