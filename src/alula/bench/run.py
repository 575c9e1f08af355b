"""One request from add to finish, and the figures it left behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from alula.config import AlulaError
from alula.draft.neural import NeuralDrafter
from alula.engine.engine import Engine
from alula.engine.request import CompletionOutput, Request, RequestOutput
from alula.sequence import SamplingParams


@dataclass
class Run:
    """What one request cost.

    gaps_s: time between chunks of tokens (ITL). time_ms: per stage of a step, summed over this run's steps.
    """

    output: RequestOutput
    gaps_s: list[float] = field(default_factory=list)
    time_ms: dict[str, float] = field(default_factory=dict)
    steps: int = 0

    @property
    def completion(self) -> CompletionOutput:
        return self.output.outputs[0]

    @property
    def tokens(self) -> int:
        return len(self.completion.token_ids)

    @property
    def seconds(self) -> float:
        return self.output.latency_s or 0.0

    @property
    def ttft_s(self) -> float:
        return self.output.ttft_s or 0.0

    @property
    def tpot_s(self) -> float:
        """Seconds per token after the first."""
        return (self.seconds - self.ttft_s) / (self.tokens - 1) if self.tokens > 1 else 0.0


def run_one(
    engine: Engine, prompt: tuple[int, ...], params: SamplingParams, on_text: Callable[[str], None] | None = None
) -> Run:
    """Run a single request alone on an engine; `on_text` gets each newly safe text.

    KeyboardInterrupt and every other exception abort the request and are raised again. Raises AlulaError when the
    request itself fails.
    """
    before, steps, gaps = dict(engine.times.seconds), engine.times.steps, list[float]()
    with adopted(engine, Request(prompt, params)) as request_id:
        last = None
        while not engine.output(request_id).finished:
            for event in engine.step():
                if on_text is not None and event.text:
                    on_text(event.text)
            if engine.output(request_id).ttft_s is not None:
                now = time.perf_counter()
                gaps += [] if last is None else [now - last]
                last = now
        output = engine.pop(request_id)
    if output.outputs[0].error is not None:
        raise AlulaError(output.outputs[0].error)
    return Run(output, gaps, _since(engine, before), engine.times.steps - steps)


@contextmanager
def adopted(engine: Engine, request: Request) -> Iterator[int]:
    """Add a request; it never outlives the block by an exception."""
    request_id = engine.add(request)
    try:
        yield request_id
    except BaseException:
        engine.abort(request_id)
        raise


def _since(engine: Engine, before: Mapping[str, float]) -> dict[str, float]:
    return {name: round(1e3 * (value - before[name]), 3) for name, value in engine.times.seconds.items()}


def drafter_ms_per_level(engine: Engine, draft_ms: float, steps: int) -> float:
    """Milliseconds to grow one level of the trees; 0 without a drafter.

    A neural drafter clocks its levels, apart from reading what was committed, since it was loaded. Prompt lookup has no
    levels of its own: its time is spread over the levels asked for.
    """
    if isinstance(engine.drafter, NeuralDrafter):
        times = engine.drafter.times
        return round(1e3 * times.level_s / times.levels, 4) if times.levels else 0.0
    levels = steps * engine.config.shape.depth
    return round(draft_ms / levels, 4) if levels and engine.drafter.name != "none" else 0.0


def extra_kv_bytes(engine: Engine, tokens: int) -> int:
    """Cache memory that speculation adds to a sequence of so many tokens.

    The drafter's layers and the kept features of its pages, and the pages that only tentative nodes need.
    """
    layout, shape = engine.cache.layout, engine.config.shape
    if engine.drafter.name == "none":
        return 0
    tentative = max(shape.nodes, 1 + engine.drafter.scratch(shape)) - 1
    held, peak = (-(-count // layout.page_size) for count in (tokens, tokens + tentative))
    return peak * layout.page_bytes - held * layout.target_page_bytes


def request_stats(engine: Engine, run: Run) -> dict[str, object]:
    """The figures of one request as plain JSON values."""
    shape = engine.config.shape
    report = run.completion.stats.report()
    kept = ("tau", "acceptance_rate", "acceptance_by_depth", "first_rejection_depth", "drafted", "checked", "accepted")
    total = len(run.output.prompt_token_ids) + run.tokens
    return {
        "drafter": engine.drafter.name,
        "rule": engine.config.rule,
        "tree": shape.report(),
        **{key: report[key] for key in kept},
        "verified_rows_per_forward": report["verified_rows_per_forward"],
        "target_forwards": report["target_forwards"],
        "tokens_per_second": round(run.tokens / run.seconds, 2) if run.seconds else 0.0,
        "ttft_ms": round(1e3 * run.ttft_s, 3),
        "tpot_ms": round(1e3 * run.tpot_s, 3),
        "drafter_ms_per_level": drafter_ms_per_level(engine, run.time_ms["draft"], run.steps),
        "extra_kv_bytes": extra_kv_bytes(engine, total),
        "time_ms": run.time_ms,
    }
