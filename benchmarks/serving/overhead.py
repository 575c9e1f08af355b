"""What the server costs: seconds per token at concurrency 1, over HTTP and from the offline engine, in turn.

    python benchmarks/serving/overhead.py [--prompts 20] [--max-tokens 96] [--repeats 2]

The server is a process of its own with the same model, drafter, tree and threads as the engine in this one; prefix
caches are off in both. Per prompt: engine, server, server, engine, ..., each with speculation and without. Ends in one
JSON line. Exit code 1: tokens differ, or the server's median TPOT is more than --most above the engine's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mix import COMPLETIONS
from reporting import finish, table
from servers import Server, started

from alula.bench.tasks import as_user_turn, read_prompts
from alula.cli.progress import Progress
from alula.engine.config import EngineConfig
from alula.engine.llm import LLM
from alula.engine.request import Request, Speculation
from alula.sequence import SamplingParams

SIDES = ("engine", "server")


@dataclass
class Cell:
    """TPOT in seconds of each run, by side; how many prompts were told the same by both."""

    tpot_s: dict[str, list[float]] = field(default_factory=lambda: {side: [] for side in SIDES})
    ttft_s: dict[str, list[float]] = field(default_factory=lambda: {side: [] for side in SIDES})
    identical: int = 0
    prompts: int = 0

    def report(self) -> dict[str, Any]:
        tpot = {side: statistics.median(values) for side, values in self.tpot_s.items()}
        ttft = {side: statistics.median(values) for side, values in self.ttft_s.items()}
        return {
            "tpot_ms": {side: round(1000 * value, 4) for side, value in tpot.items()},
            "ttft_ms": {side: round(1000 * value, 3) for side, value in ttft.items()},
            "overhead": round(tpot["server"] / tpot["engine"] - 1, 5),
            "identical": self.identical,
            "prompts": self.prompts,
        }


def main() -> int:
    arguments = _arguments()
    threads = [] if arguments.threads is None else ["--threads", str(arguments.threads)]
    config = EngineConfig(max_num_seqs=1, enable_prefix_caching=False)
    llm = LLM(arguments.model, threads=arguments.threads, config=config)
    prompts = [tuple(as_user_turn(llm.tokenizer, text)) for text in read_prompts(limit=arguments.prompts)]
    cells = {"on": Cell(), "off": Cell()}
    flags = ["--model", arguments.model, "--max-num-seqs", "1", "--no-prefix-caching", *threads]
    with (
        Progress("in turn", 2 * len(prompts)) as progress,
        started(flags) as server,
    ):
        for speculation in ("on", "off"):
            measure(llm, server, prompts[:1], arguments, Cell(), speculation)  # both warm up
        for prompt in prompts:
            for speculation, cell in cells.items():
                measure(llm, server, [prompt], arguments, cell, speculation)
                progress.tick()
    found = {f"speculation_{name}": cell.report() for name, cell in cells.items()}
    same = all(cell["identical"] == cell["prompts"] for cell in found.values())
    passed = same and all(cell["overhead"] <= arguments.most for cell in found.values())
    _show(found)
    finish({"tool": "overhead", "passed": passed, "most": arguments.most, **found}, arguments.output)
    return 0 if passed else 1


def measure(
    llm: LLM,
    server: Server,
    prompts: Sequence[tuple[int, ...]],
    arguments: argparse.Namespace,
    cell: Cell,
    speculation: str,
) -> None:
    params = SamplingParams(max_tokens=arguments.max_tokens, ignore_eos=True)
    sides: dict[str, Callable[[tuple[int, ...]], tuple[list[int], float, float]]] = {
        "engine": lambda prompt: offline(llm, Request(prompt, params, Speculation(off=speculation == "off"))),
        "server": lambda prompt: over_http(server, prompt, params, speculation),
    }
    for prompt in prompts:
        written = []
        for turn in range(arguments.repeats):
            for side in SIDES if turn % 2 == 0 else SIDES[::-1]:
                tokens, ttft, tpot = sides[side](prompt)
                cell.tpot_s[side].append(tpot)
                cell.ttft_s[side].append(ttft)
                written.append(tokens)
        cell.prompts += 1
        cell.identical += all(tokens == written[0] for tokens in written)


def offline(llm: LLM, request: Request) -> tuple[list[int], float, float]:
    """Token ids, TTFT and TPOT."""
    engine = llm.engine
    request_id = engine.add(request)
    while engine.has_work:
        engine.step()
    output = engine.pop(request_id)
    tokens, first, whole = output.outputs[0].token_ids, output.ttft_s or 0.0, output.latency_s or 0.0
    return tokens, first, (whole - first) / (len(tokens) - 1)


def over_http(
    server: Server, prompt: Sequence[int], params: SamplingParams, speculation: str
) -> tuple[list[int], float, float]:
    body: dict[str, Any] = {
        "prompt": list(prompt),
        "max_tokens": params.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    if speculation == "off":
        body["speculation"] = {"off": True}

    lines = _stream(server, json.dumps(body))
    events = [(when, json.loads(line[6:])) for when, line in lines if line.startswith(b"data: {")]
    if not events or any("error" in event for _, event in events):
        raise RuntimeError(f"the server failed: {events[-1][1] if events else 'no reply'}")
    came = [(when, event["choices"][0]["token_ids"]) for when, event in events if event["choices"][0].get("token_ids")]
    tokens = [token for _, part in came for token in part]
    first, last = came[0][0], came[-1][0]
    return tokens, first, (last - first) / (len(tokens) - 1)


def _stream(server: Server, body: str) -> list[tuple[float, bytes]]:
    """Lines of the reply with the seconds they took. A client that does no more than that: it shares the cores."""
    parts = urlsplit(server.url)
    connection = HTTPConnection(parts.hostname or "", parts.port)
    connection.connect()  # no part of TTFT
    key = {"Authorization": f"Bearer {server.key}"} if server.key else {}
    start, lines = time.perf_counter(), []
    connection.request("POST", COMPLETIONS, body, {"Content-Type": "application/json", **key})
    with connection.getresponse() as reply:
        while line := reply.readline():
            lines.append((time.perf_counter() - start, line))
    connection.close()
    return lines


def _show(found: dict[str, Any]) -> None:
    rows = []
    for name, cell in found.items():
        times = [cell[kind][side] for kind in ("tpot_ms", "ttft_ms") for side in SIDES]
        rows.append([name, *times, f"{cell['overhead']:+.1%}", f"{cell['identical']}/{cell['prompts']}"])
    columns = ["", *(f"{kind} {side}, ms" for kind in ("TPOT", "TTFT") for side in SIDES), "TPOT overhead", "identical"]
    table("Concurrency 1, medians over runs", columns, rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=int, default=20, help="of alula's own set")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=2, help="runs of each side per prompt")
    parser.add_argument("--threads", type=int, help="CPU threads of both")
    parser.add_argument("--most", type=float, default=0.05, help="overhead that passes")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
