"""The offline benchmark: the ceiling first, then plain and speculative runs in turn, then the figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from alula.bench.ceiling import Ceiling, read_bandwidth
from alula.bench.harness import interleave, spread
from alula.bench.huggingface import HuggingFace, compare_plain, ratio_spread
from alula.bench.report import bench_report, side_table, spread_line, step_table
from alula.bench.run import run_one
from alula.bench.session import Session
from alula.engine.config import EngineConfig
from alula.engine.engine import Engine
from alula.engine.request import resolve_seed
from alula.sequence import SamplingParams

Prompt = tuple[int, ...]


@dataclass(frozen=True)
class Watch:
    """Who is told of results as text, and of each finished run."""

    say: Callable[[str], None]
    tick: Callable[[], None]


def measure(
    session: Session,
    drafter: str,
    config: EngineConfig,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    repeats: int,
    watch: Watch,
) -> dict[str, Any]:
    """Run everything, telling it as text, and return it as plain JSON values.

    config: its prefix cache should be off, or repeats would skip their prompts.
    """
    ceiling = Ceiling(session.model.decoder.weight_bytes, read_bandwidth(session.model.device))
    watch.say(_ceiling_line(ceiling))
    params = replace(params, seed=resolve_seed(params.seed))
    plain, speculative = session.engine("none", config), session.engine(drafter, config)
    for engine in (plain, speculative):
        _warm_up(engine, prompts[0], params)
    pairs = interleave(plain, speculative, prompts, params, repeats=repeats, progress=watch.tick)
    setup = {**session.setup(), "rule": config.rule, "tree": config.shape.report(), "seed": params.seed}
    report = bench_report(pairs, plain, speculative, ceiling, setup)
    sides = report["plain"], report["speculative"]
    watch.say(f"\n{side_table(*sides)}\n\n{step_table(*sides)}\n")
    watch.say(f"same tokens as plain decoding: {report['identical']} of {len(pairs)} prompts")
    watch.say(f"plain decoding runs at {sides[0]['tokens_per_second'] / ceiling.tokens_per_second:.0%} of the ceiling")
    watch.say(spread_line("speedup", spread(pairs)))
    return report


def measure_huggingface(
    session: Session,
    config: EngineConfig,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    watch: Watch,
) -> dict[str, object]:
    """alula's plain decoding against transformers', prompt by prompt."""
    model = session.model
    engine, other = session.engine("none", config), HuggingFace(model.checkpoint.folder, model.dtype, model.eos_ids)
    found = compare_plain(engine, other, prompts, params, progress=watch.tick)
    same = sum(entry.tokens == entry.plain.completion.token_ids for entry in found)
    ratios = ratio_spread(found)
    watch.say(spread_line("plain decoding over transformers generate", ratios))
    seconds, tokens = sum(entry.seconds for entry in found), sum(len(entry.tokens) for entry in found)
    rate = round(tokens / seconds, 2)
    return {**ratios.report(), "tokens_per_second": rate, "identical": same, "prompts": len(found)}


def _warm_up(engine: Engine, prompt: Prompt, params: SamplingParams) -> None:
    """First calls allocate and probe; they are not what is measured."""
    run_one(engine, prompt, replace(params, max_tokens=8, min_tokens=0))


def _ceiling_line(ceiling: Ceiling) -> str:
    return (
        f"ceiling of plain decoding: {ceiling.weight_bytes / 1e6:.0f} MB of weights per token, read at "
        f"{ceiling.bytes_per_second / 1e9:.1f} GB/s: at most {ceiling.tokens_per_second:.0f} tokens/s"
    )
