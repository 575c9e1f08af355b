"""The most requests that run side by side in equal memory, with speculation on and off, found by filling the cache.

    python benchmarks/serving/capacity.py [--kv-cache-mib 64] [--prompt-tokens 128] [--max-tokens 32]

A server with the drafter and one without get the same --kv-cache-mib. Requests of one size, no two with a page in
common, are sent at once; so many fit when all of them run at the same time and none is ever preempted. The largest such
number is found by bisection, beside what pages alone would allow. The drafter's weights are outside that memory and
told apart. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from client import ask_all, client
from mix import COMPLETIONS, Job
from reporting import finish, table
from servers import Server, read_metrics, started

from alula.cli.progress import Progress

PAGE = 16
"""Tokens of a page, as `alula serve` has it."""
TRIALS = 12
DRAFTERS = {"on": "auto", "off": "none"}


def main() -> int:
    arguments = _arguments()
    found = {}
    with Progress("filling", 2 * TRIALS) as progress:
        for name, drafter in DRAFTERS.items():
            progress.announce(f"filling, speculation {name}")
            with started(_flags(arguments, drafter)) as server:
                found[name] = measure(server, arguments, progress.tick)
    ratio = found["on"]["measured"] / found["off"]["measured"] if found["off"]["measured"] else None
    report = {"tool": "capacity", "kv_cache_mib": arguments.kv_cache_mib, "on_over_off": ratio, **found}
    rows = [
        [name, *(cell[key] for key in ("pages", "by_pages", "measured", "drafter_mib"))] for name, cell in found.items()
    ]
    size = f"{arguments.prompt_tokens} + {arguments.max_tokens} tokens each, {arguments.kv_cache_mib} MiB"
    table(
        f"Concurrent requests, {size}", ["speculation", "pages", "by pages", "measured", "drafter weights, MiB"], rows
    )
    finish(report, arguments.output)
    return 0


def _flags(arguments: argparse.Namespace, drafter: str) -> list[str]:
    most, rows = str(arguments.most), str(max(1024, arguments.most))
    flags = ["--model", arguments.model, "--drafter", drafter, "--kv-cache-mib", str(arguments.kv_cache_mib)]
    return [*flags, "--max-num-seqs", most, "--max-waiting", most, "--max-num-batched-tokens", rows, *arguments.serve]


def measure(server: Server, arguments: argparse.Namespace, tick: Callable[[], None]) -> dict[str, Any]:
    metrics = server.metrics()
    by_pages = int(metrics["kv_pages_total"]) // math.ceil((arguments.prompt_tokens + arguments.max_tokens) / PAGE)

    def fits(count: int) -> bool:
        tick()
        return fill(server, count, arguments)

    return {
        "pages": int(metrics["kv_pages_total"]),
        "by_pages": by_pages,
        "measured": largest(fits, min(by_pages, arguments.most), arguments.most, TRIALS),
        "drafter_mib": round(metrics["memory_bytes/drafter_weights"] / 2**20, 2),
    }


def largest(fits: Callable[[int], bool], guess: int, most: int, trials: int) -> int:
    """The largest number that fits, given that smaller ones then do too; asks no more often than `trials`."""
    low, high, tried, stride = 0, most + 1, max(min(guess, most), 1), 1
    while high - low > 1 and trials > 0:
        trials -= 1
        if fits(tried):
            low = tried
        else:
            high = tried
        if low and high <= most:
            tried = (low + high) // 2
        else:  # away from the guess, in growing strides
            tried = min(max(low + stride if low else high - stride, low + 1), high - 1)
            stride *= 2
    return low


def fill(server: Server, count: int, arguments: argparse.Namespace) -> bool:
    """Whether all ran at once, to their ends, and none was preempted."""
    jobs = [_job(number, count, arguments) for number in range(count)]
    before = server.metrics()["num_preemptions_total"]

    async def run() -> tuple[list[Any], int]:
        async with client(server.url, server.key) as web:
            answers = asyncio.ensure_future(ask_all(web, jobs, count))
            peak = 0
            while not answers.done():
                text = (await web.get("/metrics")).text
                peak = max(peak, int(read_metrics(text)["num_requests_running"]))
                await asyncio.sleep(arguments.poll_s)
            return await answers, peak

    answers, peak = asyncio.run(run())
    if failed := [answer.error for answer in answers if answer.error is not None]:
        raise RuntimeError(f"a request failed: {failed[0]}")
    return peak == count and server.metrics()["num_preemptions_total"] == before


def _job(number: int, count: int, arguments: argparse.Namespace) -> Job:
    """Random token ids, so that nothing is shared and nothing easy to draft."""
    rng = random.Random(f"{count}/{number}")
    body = {
        "prompt": [rng.randrange(1000, 20_000) for _ in range(arguments.prompt_tokens)],
        "max_tokens": arguments.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    return Job(number, COMPLETIONS, body)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--kv-cache-mib", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--most", type=int, default=256, help="requests that are ever tried at once")
    parser.add_argument("--poll-s", type=float, default=0.05, help="seconds between two looks at the metrics")
    parser.add_argument(
        "--serve", action="append", default=[], help="further flag of the servers, as --serve=--threads=2"
    )
    parser.add_argument("--output", type=Path, help="JSON file to write")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
