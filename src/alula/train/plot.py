"""The picture of a run: losses, and what matters in the end, the tokens per forward in service."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alula.train.files import write_whole

_POINTS = 200
"""Of each loss curve; every point is the mean of a run of steps."""


def available() -> bool:
    """Whether matplotlib is there."""
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def draw(entries: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the entries of a `RunLog`, steps and evaluations, to ``path``, which is replaced whole."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    _losses(left, [entry for entry in entries if "evaluation" not in entry])
    _served(right, [entry for entry in entries if entry.get("evaluation", {}).get("served")])
    write_whole(path, lambda unfinished: figure.savefig(unfinished, dpi=110))


def _losses(axes: Any, steps: Sequence[dict[str, Any]]) -> None:
    names = [name for name in (steps[-1] if steps else {}) if name.startswith("loss")]
    width = -(-len(steps) // _POINTS)
    for name in names:
        runs = [steps[start : start + width] for start in range(0, len(steps), max(width, 1))]
        values = [sum(entry.get(name, 0.0) for entry in run) / len(run) for run in runs]
        axes.plot([run[-1]["tokens"] for run in runs], values, label=name.replace("_", " "), linewidth=1)
    axes.set(xlabel="learned tokens", ylabel="loss", title="Losses in training")
    if names:
        axes.legend(fontsize="small")


def _served(axes: Any, evaluations: Sequence[dict[str, Any]]) -> None:
    tokens = [entry["tokens"] for entry in evaluations]
    served = [entry["evaluation"]["served"] for entry in evaluations]
    axes.plot(tokens, [found["tau"] for found in served], marker="o", markersize=3, label="served")
    estimated = [
        (at, found["estimate"]["tau"]) for at, found in zip(tokens, served, strict=True) if "estimate" in found
    ]
    if estimated:
        axes.plot(*zip(*estimated, strict=True), linestyle="--", label="estimated in training")
    axes.set(xlabel="learned tokens", ylabel="tau", title="Tokens per target forward, in service")
    if served:
        axes.legend(fontsize="small")
