"""A picture of a benchmark: speedup per prompt and where the time of a step goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from alula.config import AlulaError
from alula.engine.metrics import STAGES


def draw(report: dict[str, Any], path: Path) -> None:
    """Write the picture of a `bench_report`. Raises AlulaError without matplotlib or where it cannot be written."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise AlulaError("plot needs matplotlib: install it with pip, or leave --plot out") from None
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    _speedups(left, report)
    _steps(right, report)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise AlulaError(f"plot: {path} cannot be written ({error}): give a .png, .pdf or .svg file") from None


def _speedups(axes: Any, report: dict[str, Any]) -> None:
    ratios = sorted(report["speedup_per_prompt"])
    axes.bar(range(1, len(ratios) + 1), ratios, color="#4c78a8")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.axhline(report["speedup"]["median"], color="#e45756", linestyle="--", label="median")
    axes.set(xlabel="prompts, slowest first", ylabel="speedup (wall time)", title="Speculative over plain decoding")
    axes.legend()


def _steps(axes: Any, report: dict[str, Any]) -> None:
    sides = ("plain", "speculative")
    bottom = [0.0, 0.0]
    for stage in STAGES:
        values = [report[name]["step_ms"][stage] for name in sides]
        axes.bar(sides, values, bottom=bottom, label=stage)
        bottom = [below + value for below, value in zip(bottom, values, strict=True)]
    taus = ", ".join(f"{name} {report[name]['tau']:.2f}" for name in sides)
    axes.set(ylabel="ms per step", title=f"Time of a step (tokens per step: {taus})")
    axes.legend()
