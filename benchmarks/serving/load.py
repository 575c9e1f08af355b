"""Load on a server, with speculation and then without: are the tokens the same, and how long did clients wait?

    python benchmarks/serving/load.py                               # starts a server for each of the two passes
    python benchmarks/serving/load.py --url http://127.0.0.1:8000   # one that runs; its cache is warm in the second
    python benchmarks/serving/load.py --requests 24 --concurrency 8 --max-tokens 16 --serve=--max-num-seqs=8

480 requests of mixed lengths, temperatures, JSON schemas, penalties and samples, always the same ones for --seed, 32
at a time. Ends in one JSON line. Exit code 1: tokens differ, a request failed, or an answer does not fit its schema.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from client import Answer, ask_all, client
from figures import Slo, check_json, compare, summary
from mix import Job, mix, without_speculation
from reporting import finish, table
from servers import Server, started

from alula.cli.progress import Progress

Pass = tuple[list[Answer], dict[str, Any]]
SERVE = ("--max-num-seqs", "32", "--max-waiting", "512", "--kv-cache-mib", "768", "--max-model-len", "2048")


def main() -> int:
    arguments = _arguments()
    jobs = mix(arguments.requests, seed=arguments.seed, max_tokens=arguments.max_tokens)
    slo = Slo(arguments.slo_ttft_s, arguments.slo_tpot_s)
    passes: dict[str, Pass] = {}
    with Progress("speculation on", 2 * len(jobs)) as progress, _servers(arguments) as serve:
        for name, asked in (("on", jobs), ("off", [without_speculation(job) for job in jobs])):
            progress.announce(f"speculation {name}")
            with serve() as server:
                passes[name] = run_pass(server, asked, arguments.concurrency, slo, progress.tick)
    report = {"tool": "load", "slo": vars(slo), "arguments": _plain(arguments)} | conclude(jobs, passes)
    _show(report)
    finish(report, arguments.output)
    return 0 if report["passed"] else 1


@contextmanager
def _servers(arguments: argparse.Namespace) -> Iterator[Any]:
    """What gives a server for one pass."""
    if arguments.url is None:
        yield lambda: started([*SERVE, "--model", arguments.model, *arguments.serve])
        return

    @contextmanager
    def running() -> Iterator[Server]:
        yield Server(arguments.url.rstrip("/"), arguments.api_key)

    yield running


def run_pass(server: Server, jobs: Sequence[Job], concurrency: int, slo: Slo, tick: Any) -> Pass:
    before = server.metrics()

    async def run() -> tuple[list[Answer], float]:
        async with client(server.url, server.key) as web:
            start = time.perf_counter()
            answers = await ask_all(web, jobs, concurrency, tick)
            return answers, time.perf_counter() - start

    answers, seconds = asyncio.run(run())
    after = server.metrics()
    gained = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return answers, summary(answers, seconds, slo) | _engine_figures(gained)


def _engine_figures(gained: dict[str, float]) -> dict[str, Any]:
    """Of the server, from its metrics during the pass."""
    forwards, checked = gained["target_forwards_total"], gained["spec_decode_num_checked_tokens_total"]
    accepted = gained["spec_decode_num_accepted_tokens_total"]
    return {
        "tau": round(gained["generation_tokens_total"] / forwards, 4) if forwards else None,
        "acceptance_rate": round(accepted / checked, 4) if checked else None,
        "preemptions": gained["num_preemptions_total"],
        "prefix_hits": gained["prefix_cache_hits_total"],
    }


def conclude(jobs: Sequence[Job], passes: dict[str, Pass]) -> dict[str, Any]:
    same = compare(passes["on"][0], passes["off"][0])
    forms = {name: check_json(jobs, answers) for name, (answers, _) in passes.items()}
    failed = [answer.error for answers, _ in passes.values() for answer in answers if answer.error is not None]
    passed = same["identical"] == len(jobs) and not failed and not any(each["invalid"] for each in forms.values())
    figures = {name: figures for name, (_, figures) in passes.items()}
    return {"passed": passed, "passes": figures, "same": same, "json": forms, "errors": failed[:20]}


def _show(report: dict[str, Any]) -> None:
    rows = []
    for name, figures in report["passes"].items():
        latencies = [figures[kind][f"p{q}"] for kind in ("ttft_s", "tpot_s") for q in (50, 95, 99)]
        rest = [figures["goodput_per_s"], figures["tokens_per_s"], figures["tau"]]
        rows.append([name, *latencies, f"{figures['good']}/{figures['requests']}", *rest])
    columns = ["speculation", *(f"{kind} p{q}" for kind in ("TTFT", "TPOT") for q in (50, 95, 99))]
    slo = report["slo"]
    title = f"Seconds; good: TTFT {slo['ttft_s']} s and TPOT {1000 * slo['tpot_s']:.0f} ms"
    table(title, [*columns, "good", "goodput/s", "tokens/s", "tau"], rows)
    same = report["same"]
    print(f"{same['identical']} of {same['requests']} requests have the same token ids")
    for name, forms in report["json"].items():
        told = f"{forms['valid']} valid, {forms['cut']} cut by length, {len(forms['invalid'])} invalid"
        print(f"JSON, speculation {name}: {forms['answers']} answers, {told}")
    for error in report["errors"]:
        print(f"failed: {error}", file=sys.stderr)


def _plain(arguments: argparse.Namespace) -> dict[str, Any]:
    hidden = ("api_key", "output")
    return {name: value for name, value in vars(arguments).items() if name not in hidden}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a server that runs; without it one is started for each pass")
    parser.add_argument("--api-key", default=os.environ.get("ALULA_API_KEYS", "").split(",")[0] or None)
    parser.add_argument("--model", default="smollm2", help="of the servers that are started")
    parser.add_argument("--serve", action="append", default=[], help="further flag of theirs, as --serve=--threads=2")
    parser.add_argument("--requests", type=int, default=480)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64, help="most tokens of an answer that is no JSON")
    parser.add_argument("--seed", type=int, default=0, help="another one makes another mix")
    parser.add_argument("--slo-ttft-s", type=float, default=1.0)
    parser.add_argument("--slo-tpot-s", type=float, default=0.06)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
