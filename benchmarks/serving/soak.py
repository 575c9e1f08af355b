"""Hours in minutes: random arrivals, clients that leave, aborts and bad bodies, and what is left of it afterwards.

    python benchmarks/serving/soak.py --minutes 15 --rate 3
    python benchmarks/serving/soak.py --minutes 1 --rate 2 --output soak.json

Arrivals are Poisson, by --seed. Of them 30% leave in the middle of their stream, 8% abort by id, 8% send what is no
request, 10% want the whole at once, and the rest read a stream to its end. Ends after --minutes, or after --most
arrivals, and then waits until the server is idle. Ends in one JSON line. Exit code 1 when

- a request failed that was none of the bad ones, or a bad one was not a 4xx, or the log has an error;
- fewer KV pages are free than at the start, or something still runs;
- memory or the acceptance rate has a slope: a line is fitted to each, from --settle of the time on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from client import TIMEOUT_S, ask, client
from figures import Line, fit
from mix import Job, mix
from reporting import finish, table
from servers import Server, read_metrics, resident_mib, started

from alula.cli.progress import Progress

KINDS = {"leaves": 0.30, "aborts": 0.08, "bad": 0.08, "whole": 0.10, "stream": 0.44}
SERVE = ("--max-num-seqs", "16", "--max-waiting", "256", "--max-model-len", "2048", "--kv-cache-mib", "192")
"""A small cache: it is full early, so that memory has a level to keep, and samples are preempted."""
DISTINCT = 400
"""Different requests; they come again, so that the prefix cache has something to do."""
IDLE_S = 300.0
BAD: tuple[bytes, ...] = (
    b"",
    b"{",
    b"[]",
    b'{"prompt": "x", "temperature": "hot"}',
    b'{"prompt": "x", "colour": 1}',
    b'{"prompt": "x", "max_tokens": 100000000}',
    b'{"prompt": "x", "structured_outputs": {"regex": "(?=a)b"}}',
    b'{"prompt": [99999999]}',
)


@dataclass
class Sample:
    """seconds since the start; MiB of the process; draft tokens accepted and checked since the server began."""

    seconds: float
    mib: float
    accepted: float
    checked: float


@dataclass
class Record:
    """What happened. wrong: what should not have."""

    arrivals: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    skipped: int = 0
    wrong: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)


def main() -> int:
    arguments = _arguments()
    with started([*SERVE, "--model", arguments.model, *arguments.serve]) as server:
        before = server.metrics()
        record = asyncio.run(soak(server, arguments))
        after = server.metrics()
        log = server.log.read_text(encoding="utf-8") if server.log is not None else ""
    report = {"tool": "soak", "minutes": arguments.minutes, "rate": arguments.rate, "seed": arguments.seed}
    report |= conclude(record, before, after, error_lines(log), arguments)
    _show(report)
    finish(report, arguments.output)
    return 0 if report["passed"] else 1


async def soak(server: Server, arguments: argparse.Namespace) -> Record:
    rng, record, running = random.Random(arguments.seed), Record(), set[asyncio.Task[None]]()
    jobs, start = mix(DISTINCT, seed=arguments.seed, max_tokens=arguments.max_tokens), time.monotonic()
    end, total = start + 60 * arguments.minutes, int(60 * arguments.minutes)
    async with client(server.url, server.key) as web:
        watch = asyncio.create_task(_watch(server, web, record, start, arguments.sample_s))
        with Progress("soaking, seconds", total) as progress:
            told = 0
            while time.monotonic() < end and record.arrivals < arguments.most:
                await asyncio.sleep(min(rng.expovariate(arguments.rate), max(end - time.monotonic(), 0)))
                _arrive(web, rng, jobs, record, running, arguments.concurrency)
                while told < min(time.monotonic() - start, total):
                    told += 1
                    progress.tick()
        await _settled(web, record, running)
        watch.cancel()
    return record


def _arrive(
    web: httpx.AsyncClient,
    rng: random.Random,
    jobs: Sequence[Job],
    record: Record,
    running: set[asyncio.Task[None]],
    most: int,
) -> None:
    kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
    job, luck, number = rng.choice(jobs), rng.random(), record.arrivals
    if len(running) >= most:  # a client of its own would have gone elsewhere
        record.skipped += 1
        return
    record.arrivals += 1
    record.kinds[kind] += 1
    task = asyncio.create_task(_act(web, kind, job, luck, number, record))
    running.add(task)
    task.add_done_callback(running.discard)


async def _act(web: httpx.AsyncClient, kind: str, job: Job, luck: float, number: int, record: Record) -> None:
    """luck: from 0 to 1, how far a client reads, or which bad body it sends."""
    try:
        if kind == "bad":
            fault = await _send_bad(web, BAD[int(luck * len(BAD))])
        elif kind == "leaves":
            fault = await _leave(web, job, chunks=1 + int(8 * luck))
        elif kind == "aborts":
            fault = await _abort(web, job, f"soak-{number}", seconds=luck)
        elif kind == "whole":
            fault = await _whole(web, job)
        else:
            fault = (await ask(web, job)).error
    except httpx.HTTPError as error:
        fault = f"{type(error).__name__}: {error}"
    if fault is not None:
        record.wrong.append(f"{kind}, request {job.number}: {fault}")


async def _send_bad(web: httpx.AsyncClient, body: bytes) -> str | None:
    reply = await web.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    return None if 400 <= reply.status_code < 500 else f"{body!r} got {reply.status_code}"


async def _leave(web: httpx.AsyncClient, job: Job, chunks: int) -> str | None:
    """The connection is closed after some chunks, whatever is still to come."""
    async with web.stream("POST", job.path, json=dict(job.body)) as reply:
        if reply.status_code != 200:
            return f"got {reply.status_code}: {(await reply.aread())[:300]!r}"
        async for line in reply.aiter_lines():
            chunks -= line.startswith("data: ")
            if '"error"' in line[:20]:
                return line[:300]
            if chunks <= 0:
                return None
    return None


async def _abort(web: httpx.AsyncClient, job: Job, name: str, seconds: float) -> str | None:
    """It may have ended before; otherwise it ends with what it has."""
    asked = asyncio.create_task(ask(web, Job(job.number, job.path, {**job.body, "request_id": name}, job.schema)))
    await asyncio.sleep(seconds)
    reply = await web.delete(f"/v1/requests/{name}")
    answer = await asked
    if reply.status_code not in (200, 404):
        return f"the abort got {reply.status_code}"
    return answer.error


async def _whole(web: httpx.AsyncClient, job: Job) -> str | None:
    reply = await web.post(job.path, json={**job.body, "stream": False})
    return None if reply.status_code == 200 else f"got {reply.status_code}: {reply.text[:300]}"


async def _watch(server: Server, web: httpx.AsyncClient, record: Record, start: float, every_s: float) -> None:
    assert server.pid is not None
    while True:
        metrics = read_metrics((await web.get("/metrics")).text)
        accepted, checked = (metrics[f"spec_decode_num_{kind}_tokens_total"] for kind in ("accepted", "checked"))
        record.samples.append(Sample(time.monotonic() - start, resident_mib(server.pid), accepted, checked))
        await asyncio.sleep(every_s)


async def _settled(web: httpx.AsyncClient, record: Record, running: set[asyncio.Task[None]]) -> None:
    """Until nobody waits for an answer and nothing runs; no longer than IDLE_S."""
    end = time.monotonic() + IDLE_S
    if running:
        _, late = await asyncio.wait(set(running), timeout=min(IDLE_S, TIMEOUT_S))
        for task in late:
            task.cancel()
            record.wrong.append(f"a request had no answer {IDLE_S:.0f} s after the end")
    while time.monotonic() < end:
        metrics = read_metrics((await web.get("/metrics")).text)
        if metrics["num_requests_running"] + metrics["num_requests_waiting"] == 0:
            return
        await asyncio.sleep(0.1)
    record.wrong.append(f"something still runs {IDLE_S:.0f} s after the end")


def error_lines(log: str) -> list[str]:
    """What a server's JSON log says of errors, and lines that are no JSON."""
    found = []
    for line in log.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            found.append(line[:300])
            continue
        if entry.get("level") in ("error", "critical"):
            found.append(f"{entry.get('logger')}: {entry.get('message')}"[:300])
    return found


def conclude(
    record: Record,
    before: dict[str, float],
    after: dict[str, float],
    errors: Sequence[str],
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    free = [metrics["kv_pages_total"] - metrics["kv_pages_used"] for metrics in (before, after)]
    memory = memory_line(record.samples, arguments.settle)
    acceptance = acceptance_line(record.samples, arguments.settle)
    checks = {
        "no_errors": not record.wrong,
        "no_errors_in_the_log": not errors,
        "all_pages_free": free[0] == free[1] and after["num_requests_running"] == 0,
        "memory_flat": memory is not None and memory.flat(arguments.most_mib),
        "acceptance_flat": acceptance is not None and acceptance.flat(arguments.most_acceptance * acceptance.mean),
        "something_happened": min(record.kinds[kind] for kind in KINDS) > 0,
    }
    return {
        "passed": all(checks.values()),
        "checks": checks,
        "arrivals": record.arrivals,
        "kinds": dict(record.kinds),
        "skipped": record.skipped,
        "wrong": record.wrong[:20],
        "log_errors": list(errors)[:20],
        "free_pages": free,
        "preemptions": after["num_preemptions_total"] - before["num_preemptions_total"],
        "tokens": after["generation_tokens_total"] - before["generation_tokens_total"],
        "memory_mib_per_s": None if memory is None else memory.report(),
        "acceptance_per_s": None if acceptance is None else acceptance.report(),
    }


def memory_line(samples: Sequence[Sample], settle: float) -> Line | None:
    """MiB over seconds; None for too few samples. settle: share of the time that is left out at the beginning."""
    late = _late(samples, settle)
    return fit([each.seconds for each in late], [each.mib for each in late]) if len(late) > 2 else None


def acceptance_line(samples: Sequence[Sample], settle: float) -> Line | None:
    """Acceptance rate between two samples over seconds, where anything was checked between them."""
    late = _late(samples, settle)
    points = [
        (right.seconds, (right.accepted - left.accepted) / (right.checked - left.checked))
        for left, right in pairwise(late)
        if right.checked > left.checked
    ]
    return fit(*zip(*points, strict=True)) if len(points) > 2 else None


def _late(samples: Sequence[Sample], settle: float) -> list[Sample]:
    whole = max((sample.seconds for sample in samples), default=0.0)
    return [sample for sample in samples if sample.seconds >= settle * whole]


def _show(report: dict[str, Any]) -> None:
    told = ", ".join(f"{count} {kind}" for kind, count in sorted(report["kinds"].items()))
    rows: list[list[Any]] = [["arrivals", f"{report['arrivals']} ({told})"], ["tokens", report["tokens"]]]
    rows.append(["free KV pages, start and end", "{:.0f}, {:.0f}".format(*report["free_pages"])])
    for name, unit in (("memory_mib_per_s", "MiB"), ("acceptance_per_s", "")):
        if line := report[name]:
            moved = f"change {line['change']:+.3g} {unit} (slope's error {line['error']:.2g}/s)"
            rows.append([name, f"mean {line['mean']:.4g} {unit}, {moved}"])
    rows += [[name, "ok" if good else "FAILED"] for name, good in report["checks"].items()]
    table(f"{report['minutes']} minutes, {report['rate']} arrivals/s", ["", ""], rows)
    for fault in [*report["wrong"], *report["log_errors"]]:
        print(f"wrong: {fault}", file=sys.stderr)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--serve", action="append", default=[], help="further flag of the server, as --serve=--threads=2"
    )
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--rate", type=float, default=2.0, help="arrivals per second, on average")
    parser.add_argument("--most", type=int, default=20_000, help="arrivals after which it ends")
    parser.add_argument("--concurrency", type=int, default=64, help="clients at once; further arrivals are skipped")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--sample-s", type=float, default=5.0, help="seconds between two samples of memory and acceptance"
    )
    parser.add_argument("--settle", type=float, default=0.3, help="share of the time before the lines are fitted")
    parser.add_argument("--most-mib", type=float, default=32.0, help="growth of memory that counts as flat")
    parser.add_argument("--most-acceptance", type=float, default=0.1, help="change of acceptance, as a share of it")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
