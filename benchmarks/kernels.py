"""How fast the kernels are, beside what the machine can do. Ends in one JSON line.

    python benchmarks/kernels.py [--set native] [--threads 2] [--dtype bf16] [--rows 1 16] [--repeats 30]

Every figure is the best of several repeats, so that other load on the machine shows least.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from alula.cache.pool import KVLayer
from alula.kernels.protocol import Kernels, Linear, RopeTable
from alula.kernels.select import load_kernels
from alula.tree import AttentionInput

LAYER_SHAPES = ((576, 960), (576, 576), (576, 3072), (1536, 576))
OTHER_SHAPES = ((576, 49152), (1728, 576), (1152, 960), (576, 8192))
LAYERS = 30
HEADS, GROUPS, HEAD_DIM, PAGE = 9, 3, 64, 16
COPIES_BYTES = 64e6

Figure = tuple[str, float, float, float]
"""What was measured, seconds, bytes read, operations."""


@dataclass(frozen=True)
class Ceiling:
    """What the machine can do: bytes read per second, and fp32 operations per second in torch's product."""

    bytes_per_second: float
    operations_per_second: float


def best(run: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest run after one to warm up."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def measure_ceiling(repeats: int) -> Ceiling:
    large = torch.ones(64 * 2**20)
    side = 1024
    square = torch.ones(side, side)
    return Ceiling(
        large.nbytes / best(large.sum, repeats), 2 * side**3 / best(lambda: square @ square, max(repeats // 3, 3))
    )


def show(name: str, seconds: float, bytes_read: float, operations: float, ceiling: Ceiling) -> dict[str, float | str]:
    floor = max(bytes_read / ceiling.bytes_per_second, operations / ceiling.operations_per_second)
    print(
        f"{name:44s} {seconds * 1e6:10.1f} us {bytes_read / seconds / 1e9:8.2f} GB/s "
        f"{operations / seconds / 1e9:8.1f} GFLOP/s {100 * floor / seconds:6.0f}% of the ceiling"
    )
    return {"name": name, "us": round(seconds * 1e6, 2), "ceiling_share": round(floor / seconds, 3)}


def linear_figures(kernels: Kernels, dtype: torch.dtype, rows: int, repeats: int) -> Iterable[Figure]:
    """Each shape over copies too many for the caches, as in a model."""
    for ins, outs in LAYER_SHAPES + OTHER_SHAPES:
        copies = max(1, min(LAYERS, int(COPIES_BYTES / (ins * outs * dtype.itemsize))))
        out_dtype = torch.float32 if outs > 4096 else dtype
        linears = [kernels.prepare_linear(torch.randn(outs, ins).to(dtype), out_dtype=out_dtype) for _ in range(copies)]
        x, size = torch.randn(rows, ins).to(dtype), linears[0].nbytes
        seconds = best(partial(multiply_all, kernels, x, linears), repeats) / copies
        yield f"linear {rows} x {ins} -> {outs}", seconds, size, 2.0 * rows * ins * outs


def multiply_all(kernels: Kernels, x: torch.Tensor, linears: Sequence[Linear]) -> None:
    for linear in linears:
        kernels.linear(x, linear)


def tree_input(rows: int, context: int) -> AttentionInput:
    """A tree of chains of length 3 hung on a prefix, all in one sequence."""
    pages = (context + rows) // PAGE + 1
    tails = [[context + max(row - e, 0) for e in range(2, -1, -1)] for row in range(rows)]

    def index(values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return AttentionInput(
        positions_T=torch.arange(context, context + rows),
        slots_T=torch.arange(context, context + rows),
        sequence_T=index([0] * rows),
        page_table_BP=index([list(range(pages))]),
        prefix_T=index([context] * rows),
        tail_TE=index(tails),
        tail_len_T=index([3] * rows),
        first_T=index([0] * rows),
        page_size=PAGE,
    )


def chunk_input(rows: int, context: int) -> AttentionInput:
    """A prefill chunk of `rows` after `context` keys."""
    tree = tree_input(rows, context)
    places = torch.arange(context, context + rows, dtype=torch.int32)
    return AttentionInput(
        **{**vars(tree), "prefix_T": places, "tail_TE": places[:, None].clone(), "tail_len_T": torch.ones_like(places)}
    )


def attention_figures(kernels: Kernels, dtype: torch.dtype, rows: int, repeats: int) -> Iterable[Figure]:
    for context in (128, 512, 2048):
        slots = (context + rows) // PAGE * PAGE + PAGE
        layer = KVLayer(*(torch.randn(GROUPS, slots, HEAD_DIM).to(dtype) for _ in range(2)))
        q = torch.randn(rows, HEADS, HEAD_DIM).to(dtype)
        for kind, where in (("tree", tree_input(rows, context)), ("chunk", chunk_input(rows, context))):
            seconds = best(partial(kernels.attention, q, layer, where, scale=0.125), repeats)
            keys = int((where.prefix_T + where.tail_len_T).sum())
            size = 2 * context * GROUPS * HEAD_DIM * dtype.itemsize
            yield f"attention {kind} {rows} rows, {context} keys", seconds, size, 4.0 * keys * HEADS * HEAD_DIM


def other_figures(kernels: Kernels, dtype: torch.dtype, rows: int, repeats: int) -> Iterable[Figure]:
    x, weight = torch.randn(rows, 576).to(dtype), torch.ones(576).to(dtype)
    gate_up = torch.randn(rows, 3072).to(dtype)
    logits = torch.randn(rows, 49152)
    where = tree_input(rows, 64)
    layer = KVLayer(*(torch.zeros(GROUPS, 64 + rows + PAGE, HEAD_DIM, dtype=dtype) for _ in range(2)))
    qkv = torch.randn(rows, (HEADS + 2 * GROUPS) * HEAD_DIM).to(dtype)
    rope = RopeTable(torch.ones(64 + rows, HEAD_DIM // 2), torch.zeros(64 + rows, HEAD_DIM // 2))
    steps: tuple[tuple[str, Callable[[], object], float], ...] = (
        ("add_rms_norm 576", lambda: kernels.add_rms_norm(x, x, weight, 1e-5), 4 * x.nbytes),
        ("rope_write", lambda: kernels.rope_write(qkv, layer, where, rope, heads=HEADS), 2 * qkv.nbytes),
        ("gated silu 1536", lambda: kernels.gated(gate_up, "silu"), 1.5 * gate_up.nbytes),
        ("argmax 49152", lambda: kernels.argmax(logits), logits.nbytes),
        ("topk 32 of 49152", lambda: kernels.topk(logits, 32), logits.nbytes),
        ("topk 8 of 8192", lambda: kernels.topk(logits[:, :8192], 8), logits.nbytes / 6),
        ("logsumexp 49152", lambda: kernels.logsumexp(logits), 2 * logits.nbytes),
        ("softmax 49152", lambda: kernels.softmax(logits), 3 * logits.nbytes),
    )
    for name, run, size in steps:
        yield f"{name}, {rows} rows", best(run, repeats), size, 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--set", default="auto")
    parser.add_argument("--linear", default="auto")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32, 128])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--only", choices=("linear", "attention", "other"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype = torch.bfloat16 if arguments.dtype == "bf16" else torch.float32
    kernels = load_kernels(arguments.set, linear=arguments.linear)
    ceiling = measure_ceiling(arguments.repeats)
    gigabytes, gigaflops = ceiling.bytes_per_second / 1e9, ceiling.operations_per_second / 1e9
    print(f"ceiling: {gigabytes:.1f} GB/s read, {gigaflops:.0f} GFLOP/s in torch's fp32 product")
    parts = {"linear": linear_figures, "attention": attention_figures, "other": other_figures}
    results = [
        show(*figure, ceiling)
        for rows in arguments.rows
        for name, part in parts.items()
        if arguments.only in (None, name)
        for figure in part(kernels, dtype, rows, arguments.repeats)
    ]
    print(json.dumps({"kernels": kernels.describe(), "ceiling": vars(ceiling), "results": results}))


if __name__ == "__main__":
    main()
