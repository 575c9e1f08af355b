"""An ablation as a table and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from alula.bench.report import table
from alula.train.ablation import STEPS, Result
from alula.train.files import write_whole


def by_arm(results: Sequence[Result]) -> dict[str, list[Result]]:
    """In the order in which they first appear; one result per seed."""
    arms: dict[str, list[Result]] = {}
    for result in results:
        arms.setdefault(result.arm, []).append(result)
    return arms


def ablation_table(results: Sequence[Result]) -> str:
    """Mean over seeds, with half the range where there are several."""
    heading = ["head", *(f"{n}-alpha" for n in range(STEPS)), "seeds"]
    rows = [
        [arm, *(_cell([result.alpha[n] for result in found]) for n in range(STEPS)), len(found)]
        for arm, found in by_arm(results).items()
    ]
    return table([heading, *rows])


def draw_ablation(results: Sequence[Result], title: str, path: Path) -> None:
    """One line per head, n-alpha over n, with the range over seeds; ``path`` is replaced whole."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes, steps = figure.subplots(), range(STEPS)
    for arm, found in by_arm(results).items():
        values = [[result.alpha[n] for result in found] for n in steps]
        means = [fmean(column) for column in values]
        below = [mean - min(column) for mean, column in zip(means, values, strict=True)]
        above = [max(column) - mean for mean, column in zip(means, values, strict=True)]
        axes.errorbar(steps, means, yerr=[below, above], marker="o", markersize=3, capsize=2, label=arm)
    axes.set(xlabel="features of its own among those it has read", ylabel="acceptance (n-alpha)", title=title)
    axes.set_xticks(list(steps))
    axes.legend(fontsize="small")
    write_whole(path, lambda unfinished: figure.savefig(unfinished, dpi=110))


def _cell(values: Sequence[float]) -> str:
    spread = f" ±{(max(values) - min(values)) / 2:.3f}" if len(values) > 1 else ""
    return f"{fmean(values):.3f}{spread}"
