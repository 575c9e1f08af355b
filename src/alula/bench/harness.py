"""Plain and speculative runs in turn, so that a drift of the machine meets both alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from alula.bench.run import Run, run_one
from alula.engine.engine import Engine
from alula.engine.metrics import DraftStats
from alula.sequence import SamplingParams


@dataclass
class Pair:
    """All runs of one prompt; entry i of both lists ran next to each other."""

    plain: list[Run] = field(default_factory=list)
    speculative: list[Run] = field(default_factory=list)

    @property
    def speedup(self) -> float:
        """Wall time of plain decoding over speculative, medians of the repeats, per token.

        Under `coupled` both wrote the same tokens, so this is the ratio of the wall times; under `rejection`
        lengths may differ.
        """
        return _seconds_per_token(self.plain) / _seconds_per_token(self.speculative)

    @property
    def identical(self) -> bool:
        return all(
            run.completion.token_ids == self.plain[0].completion.token_ids for run in [*self.plain, *self.speculative]
        )


@dataclass(frozen=True)
class Spread:
    """Of the per-prompt ratios: median, 10th and 90th percentile, and the ratio of the summed times."""

    median: float
    low: float
    high: float
    pooled: float

    def report(self) -> dict[str, float]:
        return {name: round(value, 4) for name, value in vars(self).items()}


def interleave(
    plain: Engine,
    speculative: Engine,
    prompts: Sequence[tuple[int, ...]],
    params: SamplingParams,
    *,
    repeats: int,
    progress: Callable[[], None] = lambda: None,
) -> list[Pair]:
    """Per prompt: plain, speculative, speculative, plain, plain, ... `repeats` times each."""
    pairs = []
    for prompt in prompts:
        pair = Pair()
        for repeat in range(repeats):
            order = [(plain, pair.plain), (speculative, pair.speculative)]
            for engine, runs in order if repeat % 2 == 0 else order[::-1]:
                runs.append(run_one(engine, prompt, params))
                progress()
        pairs.append(pair)
    return pairs


def spread(pairs: Sequence[Pair]) -> Spread:
    ratios = [pair.speedup for pair in pairs]
    low, high = quantile(ratios, 0.1), quantile(ratios, 0.9)
    plain = sum(_seconds_per_token(pair.plain) * pair.plain[0].tokens for pair in pairs)
    speculative = sum(_seconds_per_token(pair.speculative) * pair.plain[0].tokens for pair in pairs)
    return Spread(statistics.median(ratios), low, high, plain / speculative)


def quantile(values: Sequence[float], share: float) -> float:
    """By linear interpolation between the sorted values."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def pooled_stats(runs: Sequence[Run]) -> DraftStats:
    total = DraftStats()
    for run in runs:
        total.add(run.completion.stats)
    return total


def _seconds_per_token(runs: Sequence[Run]) -> float:
    return statistics.median(run.seconds / max(run.tokens, 1) for run in runs)
