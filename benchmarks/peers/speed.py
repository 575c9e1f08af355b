"""Tokens per second of alula and of other engines: same file, same prompts as token ids, one stream, in turn.

    python benchmarks/peers/speed.py --gguf model.gguf --prompts mt_bench.jsonl humaneval.jsonl --limit 20 --rounds 3 \
        --output runs/peers alula:dtype=file alula:dtype=file,drafter=auto llama_cpp@envs/llama/bin/python \
        openvino@envs/openvino/bin/python

An engine is `kind`, or `kind@PYTHON` with the Python of an environment that has it, then `:name=value,...`. Kinds and
their settings are those of worker.py beside this file; docs/benchmarks.md says how the environments are made. Every
engine is a process of its own, loaded before the first round, stopped (SIGSTOP) while another one has its turn, so that
no thread that still waits busily takes its cores; who goes first changes from prompt to prompt. Decoding is greedy, up
to `--max-tokens` or the model's end.

The report, OUTPUT/peers.json and .md: tokens per second by prompt (median of the rounds; the prompt's reading counted),
median and 10th to 90th percentile over prompts, decoding alone (after the first token), reading (prompt tokens over the
time to the first token), and the ratio to the first engine named, prompt by prompt.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from alula.bench.ceiling import read_bandwidth
from alula.bench.harness import quantile
from alula.bench.tasks import as_user_turn, read_sets
from alula.cli.errors import guarded
from alula.cli.progress import Progress
from alula.config import AlulaError
from alula.model.load import load_model, set_threads
from alula.train.files import write_text

WORKER = Path(__file__).with_name("worker.py")
PATIENCE_S = 20.0
"""How long an engine may take to end by itself."""


@dataclass(frozen=True)
class Spec:
    """One engine as it was named."""

    text: str
    kind: str
    python: str
    settings: dict[str, str]

    @classmethod
    def parse(cls, text: str) -> Spec:
        """Raises AlulaError for settings that are no name=value."""
        place, _, rest = text.partition(":")
        kind, _, python = place.partition("@")
        pairs = [part.partition("=") for part in rest.split(",") if part]
        if any(not sign for _, sign, _ in pairs):
            raise AlulaError(f"engine {text!r} has settings {rest!r}: give name=value, with commas between")
        return cls(text, kind, python or sys.executable, {name: value for name, _, value in pairs})

    @property
    def label(self) -> str:
        return " ".join([self.kind, *(f"{name}={value}" for name, value in self.settings.items())])


class Worker:
    """A process with one engine, which answers a line with a line."""

    def __init__(self, spec: Spec, gguf: Path, threads: int) -> None:
        self.spec = spec
        command = [spec.python, str(WORKER), spec.kind, str(gguf), str(threads), json.dumps(spec.settings)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,  # so that all of it can be ended
        )
        try:
            self.about = self._answer()
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def run(self, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
        self._signal(signal.SIGCONT)
        answer = self._ask(prompt, max_tokens)
        self._signal(signal.SIGSTOP)
        return answer

    def _ask(self, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"prompt": list(prompt), "max_tokens": max_tokens}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise AlulaError(f"engine {self.spec.text!r} has ended: see its messages above") from None
        return self._answer()

    def close(self) -> None:
        """Ends the engine and the processes it has started, as vLLM does."""
        self.dismiss()
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(PATIENCE_S)
        finally:
            self._signal(signal.SIGKILL)
        self._process.wait()

    def dismiss(self) -> None:
        """Tells the engine that there is no more to do."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def _signal(self, number: int) -> None:
        """To the engine and all it has started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _answer(self) -> dict[str, Any]:
        """The next line that is an answer: engines print things of their own."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"answer"'):
                found: dict[str, Any] = json.loads(line)["answer"]
                return found
        raise AlulaError(f"engine {self.spec.text!r} ended without an answer: see its messages above")


def measure(arguments: argparse.Namespace, prompts: Sequence[tuple[int, ...]], workers: Sequence[Worker]) -> list[Any]:
    """Per engine and prompt, all rounds: {"tokens", "seconds", "first"}."""
    runs: list[Any] = [[[] for _ in prompts] for _ in workers]
    for worker in workers:
        worker.run(prompts[0], 16)
    with Progress("rounds", arguments.rounds * len(prompts)) as progress:
        for turn in range(arguments.rounds):
            for number, prompt in enumerate(prompts):
                for place in range(len(workers)):
                    index = (place + number + turn) % len(workers)
                    runs[index][number].append(workers[index].run(prompt, arguments.max_tokens))
                progress.tick()
    return runs


def speeds(rounds: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Tokens per second of one prompt: everything, and decoding alone."""
    whole = statistics.median(run["tokens"] / run["seconds"] for run in rounds)
    later = [(run["tokens"] - 1) / (run["seconds"] - run["first"]) for run in rounds if run["tokens"] > 1]
    return whole, statistics.median(later) if later else whole


def reading(prompt: Sequence[int], rounds: Sequence[dict[str, Any]]) -> float:
    """Prompt tokens per second until the first token was there."""
    return statistics.median(len(prompt) / run["first"] for run in rounds)


def summary(prompts: Sequence[Sequence[int]], runs: Sequence[Any], workers: Sequence[Worker]) -> list[dict[str, Any]]:
    whole = [[speeds(rounds)[0] for rounds in engine] for engine in runs]
    rows = []
    for engine, worker, values in zip(runs, workers, whole, strict=True):
        ratios = [value / first for value, first in zip(values, whole[0], strict=True)]
        rows.append(
            {
                "engine": worker.spec.label,
                **worker.about,
                "tokens_per_second": _spread(values),
                "decoding_alone": _spread([speeds(rounds)[1] for rounds in engine]),
                "reading": _spread([reading(*pair) for pair in zip(prompts, engine, strict=True)]),
                "ratio_to_first": _spread(ratios),
                "mean_tokens": statistics.mean(run["tokens"] for rounds in engine for run in rounds),
            }
        )
    return rows


def markdown(report: dict[str, Any]) -> str:
    lines = [
        f"{report['date']}, {report['cpu']}, {report['threads']} threads, {report['prompts']} prompts, up to "
        f"{report['max_tokens']} tokens, {report['rounds']} rounds; plain reads run at "
        f"{report['gigabytes_per_second']:.1f} GB/s.",
        "",
        "| engine | version | tokens/s (10% to 90%) | decoding alone | reading | ratio to the first |",
        "|---|---|---|---|---|---|",
    ]
    for row in report["engines"]:
        cells = [_shown(row[name], digits) for name, digits in COLUMNS]
        lines.append(f"| {row['engine']} | {row['version']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


COLUMNS = (("tokens_per_second", 1), ("decoding_alone", 1), ("reading", 0), ("ratio_to_first", 2))


def _spread(values: Sequence[float]) -> dict[str, float]:
    ends = {name: quantile(values, share) for name, share in (("low", 0.1), ("high", 0.9))}
    return {name: round(value, 4) for name, value in {"median": statistics.median(values), **ends}.items()}


def _shown(spread: dict[str, float], digits: int) -> str:
    return f"{spread['median']:.{digits}f} ({spread['low']:.{digits}f} to {spread['high']:.{digits}f})"


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _run(arguments: argparse.Namespace) -> int:
    specs = [Spec.parse(text) for text in arguments.engines]
    set_threads(arguments.threads)
    texts = [text for found in read_sets(arguments.prompts, arguments.limit).values() for text in found]
    tokenizer = load_model(arguments.gguf).tokenizer
    prompts = [tuple(as_user_turn(tokenizer, text)) for text in texts]
    with ExitStack() as stack:
        workers = []
        for spec in specs:
            workers.append(Worker(spec, arguments.gguf, arguments.threads))
            stack.callback(workers[-1].close)
        runs = measure(arguments, prompts, workers)
        for worker in workers:
            worker.dismiss()
    report = {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": _cpu(),
        "gguf": arguments.gguf.name,
        "prompts": len(prompts),
        **{name: getattr(arguments, name) for name in ("threads", "max_tokens", "rounds")},
        "gigabytes_per_second": round(read_bandwidth() / 1e9, 2),
        "engines": summary(prompts, runs, workers),
        "runs": runs,
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    write_text(arguments.output / "peers.json", json.dumps(report) + "\n")
    write_text(arguments.output / "peers.md", markdown(report))
    print(markdown(report))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="+", help="kind[@PYTHON][:name=value,...]; ratios are to the first")
    parser.add_argument("--gguf", type=Path, required=True, help="the model, read by all of them")
    parser.add_argument("--prompts", nargs="+", default=["default"], help="alula's sets by name, or files")
    parser.add_argument("--limit", type=int, default=None, help="prompts of each set")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--output", type=Path, required=True, help="folder of the report")
    arguments = parser.parse_args(argv)
    return guarded(lambda: _run(arguments))


if __name__ == "__main__":
    sys.exit(main())
