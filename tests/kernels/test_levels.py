"""All dispatch levels and thread counts give the same bits, and one OpenMP runtime serves torch and the kernels."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alula.kernels.extension import share_openmp
from alula.kernels.native import NativeKernels
from alula.kernels.protocol import Activation
from tests.kernels.sets import DTYPES, LEVELS, draw_rows, kernel_set, place, same_bits

Result = tuple[torch.Tensor, ...]


def everything(kernels: NativeKernels, seed: int, dtype: torch.dtype) -> Result:
    """One result of every kernel, on data drawn from `seed`."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return 3 * torch.randn(*shape, generator=random)

    rows, ins, outs = (int(n) for n in torch.randint(1, 150, (3,), generator=random))
    x, weight = normal(rows, 2 * ins).to(dtype), normal(ins).to(dtype)
    matrix, bias, int8 = normal(outs, ins).to(dtype), normal(outs), kernel_set(f"int8 {kernels.level_name}")
    linear, whole = (k.prepare_linear(matrix, bias, out_dtype=torch.float32) for k in (kernels, int8))
    q, layer, where = place(draw_rows(seed, 6, 2, 32, dtype), seed, 16)
    logits = normal(3, 40 * outs)
    activations: tuple[Activation, ...] = ("silu", "gelu_tanh")
    return (
        kernels.linear(x[:, :ins], linear),
        int8.linear(x[:, :ins], whole),
        kernels.rms_norm(x[:, :ins], weight, 1e-5),
        *kernels.add_rms_norm(x[:, :ins], x[:, ins:], weight, 1e-5, round_last=True),
        *(kernels.gated(x, activation) for activation in activations),
        kernels.attention(q, layer, where, scale=0.2, window=50, softcap=3.0),
        kernels.attention(q, layer, where, scale=0.2),
        kernels.softcap(x, 2.0),
        kernels.logsumexp(logits),
        kernels.softmax(logits),
        kernels.log_softmax(logits),
        kernels.argmax(logits),
        *kernels.topk(logits, 9),
    )


def agree(a: Callable[[], Result], b: Callable[[], Result]) -> bool:
    return all(same_bits(x, y) for x, y in zip(a(), b(), strict=True))


@pytest.mark.skipif(len(LEVELS) < 2, reason="this CPU has one level")
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**31), dtype=st.sampled_from(DTYPES))
def test_levels_agree(seed: int, dtype: torch.dtype) -> None:
    sets = [kernel_set(level) for level in LEVELS]
    results = [everything(k, seed, dtype) for k in sets if isinstance(k, NativeKernels)]
    for other in results[1:]:
        assert all(same_bits(x, y) for x, y in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_thread_counts_agree(native: NativeKernels, dtype: torch.dtype) -> None:
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append([everything(native, seed, dtype) for seed in range(3)])
    assert all(
        same_bits(x, y)
        for other in results[1:]
        for first, second in zip(results[0], other, strict=True)
        for x, y in zip(first, second, strict=True)
    )


def test_one_openmp_runtime() -> None:
    """The kernels use the runtime that torch loaded; a second one would fight it for the cores."""
    script = """
import torch
torch.set_num_threads(2)
from alula.kernels.native import NativeKernels
k = NativeKernels(linear="native")
k.linear(torch.randn(64, 512), k.prepare_linear(torch.randn(512, 512)))
torch.randn(512, 512) @ torch.randn(512, 512)
import os
maps = {line.split()[-1] for line in open("/proc/self/maps") if "/" in line}
print(sorted(name for name in maps if any(part in os.path.basename(name) for part in ("gomp", "iomp", "libomp"))))
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert len(eval(out)) == 1, out


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_a_runtime_that_is_kept_private_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's wheels for Arm keep theirs: the library that is loaded is opened again, for everybody."""
    opened, open_library = [], ctypes.CDLL

    def library(name: str | None, mode: int = 0) -> object:
        if name is None:
            return object()
        opened.append((Path(name).name, mode))
        return open_library(name, mode=mode)

    monkeypatch.setattr(ctypes, "CDLL", library)
    share_openmp()
    assert len(opened) == 1 and opened[0][0].startswith("libgomp")
    assert opened[0][1] & os.RTLD_GLOBAL and opened[0][1] & os.RTLD_NOLOAD
