"""How the table of methods is shown: as Markdown, and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table, a row for each cell."""
    heading = (
        "| prompts | temperature, rule | method | rows, depth, branch (, floor) | tau (10% to 90%) | acceptance rate "
        "(10% to 90%) | tokens/s | ratio to plain (10% to 90%) | draft, ms per step | trainable parameters | training "
        "tokens |"
    )
    lines = [heading, "|" + "---|" * 11]
    for row in rows:
        cells = [
            f"{row['set']} ({row['prompts']})",
            f"{row['temperature']:g}, {row['rule']}",
            row["method"],
            ", ".join(map(str, row["tree"])),
            f"{row['tau']:.2f} ({row['tau_spread']['low']:.2f} to {row['tau_spread']['high']:.2f})",
            f"{row['acceptance_rate']:.2f} ({row['acceptance_spread']['low']:.2f} to "
            f"{row['acceptance_spread']['high']:.2f})",
            f"{row['tokens_per_second']:.1f}",
            f"{row['ratio']['median']:.2f} ({row['ratio']['low']:.2f} to {row['ratio']['high']:.2f})",
            f"{row['draft_ms_per_step']:.2f}",
            *("-" if row[name] is None else f"{row[name]:,}" for name in ("parameters", "training_tokens")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Tau and the ratio to plain decoding by method; a panel for each temperature and rule, a bar for each set."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    kinds = list(dict.fromkeys((row["temperature"], row["rule"]) for row in rows))
    methods, groups = (list(dict.fromkeys(row[name] for row in rows)) for name in ("method", "set"))
    figure, axes = pyplot.subplots(len(kinds), 2, figsize=(12, 3.2 * len(kinds)), squeeze=False)
    for line, kind in zip(axes, kinds, strict=True):
        for axis, (title, value) in zip(line, (("tau", _tau), ("ratio to plain decoding", _ratio)), strict=True):
            for place, group in enumerate(groups):
                found = {r["method"]: r for r in rows if r["set"] == group and (r["temperature"], r["rule"]) == kind}
                known = [(index, value(found[name])) for index, name in enumerate(methods) if name in found]
                width = 0.8 / len(groups)
                spots = [index - 0.4 + (place + 0.5) * width for index, _ in known]
                middles, lows, highs = zip(*(numbers for _, numbers in known), strict=True)
                errors = [
                    [max(m - b, 0) for m, b in zip(middles, lows, strict=True)],
                    [max(b - m, 0) for m, b in zip(middles, highs, strict=True)],
                ]
                axis.bar(spots, middles, width, yerr=errors, label=group, error_kw={"linewidth": 0.6})
            axis.set_xticks(range(len(methods)), [name.replace("-", "\n") for name in methods])
            axis.set_title(f"{title}, temperature {kind[0]:g}, rule {kind[1]}")
            axis.axhline(1.0, color="grey", linewidth=0.6)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="lower center", ncols=len(groups), fontsize="small")
    figure.tight_layout(rect=(0, 0.3 / figure.get_figheight(), 1, 1))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _tau(row: dict[str, Any]) -> tuple[float, float, float]:
    return row["tau"], row["tau_spread"]["low"], row["tau_spread"]["high"]


def _ratio(row: dict[str, Any]) -> tuple[float, float, float]:
    return row["ratio"]["median"], row["ratio"]["low"], row["ratio"]["high"]
