"""Figures as text tables and as one JSON object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from alula.bench.ceiling import Ceiling
from alula.bench.harness import Pair, Spread, pooled_stats, quantile, spread
from alula.bench.prove import CellReport, Difference
from alula.bench.run import Run, drafter_ms_per_level
from alula.engine.engine import Engine
from alula.engine.metrics import STAGES


def table(rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as their widest entry; the first row is the heading, the first column is text."""
    texts = [[_text(value) for value in row] for row in rows]
    widths = [max(len(row[i]) for row in texts) for i in range(len(texts[0]))]
    lines = []
    for row in texts:
        cells = [row[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def side(runs: Sequence[Run], engine: Engine) -> dict[str, Any]:
    """One side of a benchmark. Pooled over sequence-steps or tokens; latencies are medians over requests."""
    steps = sum(run.steps for run in runs)
    seconds = sum(run.seconds for run in runs)
    stages = {stage: sum(run.time_ms[stage] for run in runs) for stage in STAGES}
    gaps = [gap for run in runs for gap in run.gaps_s]
    return {
        "drafter": engine.drafter.name,
        **pooled_stats(runs).report(),
        "tokens_per_second": round(sum(run.tokens for run in runs) / seconds, 2),
        "ttft_ms": _milliseconds([run.ttft_s for run in runs], 0.5),
        "tpot_ms": _milliseconds([run.tpot_s for run in runs], 0.5),
        "itl_ms": {name: _milliseconds(gaps, share) for name, share in (("median", 0.5), ("p99", 0.99))},
        "step_ms": {stage: round(total / max(steps, 1), 4) for stage, total in stages.items()},
        "drafter_ms_per_level": drafter_ms_per_level(engine, stages["draft"], steps),
        "steps": steps,
    }


def bench_report(
    pairs: Sequence[Pair], plain: Engine, speculative: Engine, ceiling: Ceiling, setup: dict[str, object]
) -> dict[str, Any]:
    """Everything of a benchmark as plain JSON values."""
    return {
        "setup": setup,
        "ceiling": ceiling.report(),
        "prompts": len(pairs),
        "repeats": len(pairs[0].plain),
        "identical": sum(pair.identical for pair in pairs),
        "plain": side([run for pair in pairs for run in pair.plain], plain),
        "speculative": side([run for pair in pairs for run in pair.speculative], speculative),
        "speedup": spread(pairs).report(),
        "speedup_per_prompt": [round(pair.speedup, 4) for pair in pairs],
    }


def side_table(plain: dict[str, Any], speculative: dict[str, Any]) -> str:
    names = (
        ("tau (acceptance length)", "tau"),
        ("acceptance rate", "acceptance_rate"),
        ("accepted / drafted", "accepted_per_drafted"),
        ("rows per forward", "verified_rows_per_forward"),
        ("tokens per second", "tokens_per_second"),
        ("TTFT, ms (median)", "ttft_ms"),
        ("TPOT, ms (median)", "tpot_ms"),
        ("drafter, ms per level", "drafter_ms_per_level"),
    )
    rows = [[title, plain[key], speculative[key]] for title, key in names]
    rows += [[f"ITL, ms ({name})", plain["itl_ms"][name], speculative["itl_ms"][name]] for name in ("median", "p99")]
    return table([["", "plain", "speculative"], *rows])


def sets_table(reports: Mapping[str, dict[str, Any]]) -> str:
    """A row for each set of prompts; see `bench_report`."""
    heading = ["prompts", "number", "tau", "acceptance rate", "speedup (median)", "10%", "90%", "draft, ms per step"]
    rows = [
        [
            name,
            report["prompts"],
            report["speculative"]["tau"],
            report["speculative"]["acceptance_rate"],
            *(report["speedup"][key] for key in ("median", "low", "high")),
            report["speculative"]["step_ms"]["draft"],
        ]
        for name, report in reports.items()
    ]
    return table([heading, *rows])


def estimate_table(reports: Mapping[str, dict[str, Any]]) -> str:
    """A row for each set of prompts; see `alula.train.estimate`."""
    heading = ["prompts", "number", "served tau", "estimated", "apart", "served acceptance rate", "estimated"]
    rows = [
        [
            name,
            report["prompts"],
            report["tau"],
            report["estimate"]["tau"],
            f"{report['served_over_estimate']:+.1%}",
            report["acceptance_rate"],
            report["estimate"]["acceptance_rate"],
        ]
        for name, report in reports.items()
    ]
    return table([heading, *rows])


def step_table(plain: dict[str, Any], speculative: dict[str, Any]) -> str:
    rows = [[stage, plain["step_ms"][stage], speculative["step_ms"][stage]] for stage in STAGES]
    return table([["ms per step", "plain", "speculative"], *rows])


def spread_line(name: str, found: Spread) -> str:
    return (
        f"{name} {found.median:.2f} (median per prompt; 10% to 90%: {found.low:.2f} to {found.high:.2f}; "
        f"pooled {found.pooled:.2f})"
    )


def proof_table(reports: Sequence[CellReport]) -> str:
    rows = [_cell_row(report) for report in reports]
    heading = ["factor", "drafter", "tree", "batch", "chunk", "prefix", "preempted", "same", "tau", "multi-token"]
    return table([heading, *rows])


def difference_line(difference: Difference, where: str) -> str:
    return (
        f"{where}: prompt {difference.prompt}, position {difference.position}: "
        f"plain {_token(difference.plain)}, other {_token(difference.speculative)}"
    )


def _cell_row(report: CellReport) -> list[object]:
    setting = report.cell.setting
    return [
        report.cell.factor,
        setting.drafter if report.kind == setting.drafter else f"{setting.drafter} ({report.kind})",
        "/".join(map(str, setting.shape.report().values())),
        setting.batch,
        setting.chunk,
        f"{report.prefix_hit_tokens} hit" if setting.warm else "-",
        report.preemptions,
        f"{report.identical}/{report.cell.prompts}",
        report.tau,
        report.multi_token_commits,
    ]


def _milliseconds(seconds: Sequence[float], share: float) -> float:
    return round(1e3 * quantile(seconds, share), 3) if seconds else 0.0


def _token(token: int | None) -> str:
    return "ended" if token is None else f"token {token}"


def _text(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
