"""How the tools tell what they found: a bar while they run, a table, and one JSON object at the end."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    shown = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        shown.add_column(column, justify="left" if number == 0 else "right")
    for row in rows:
        shown.add_row(*(_cell(value) for value in row))
    Console(width=None if sys.stdout.isatty() else 120).print(shown)


def finish(report: Mapping[str, Any], output: Path | None) -> None:
    """The last line of the output, and the file where one is wanted, which appears whole or not at all."""
    if output is not None:
        part = output.with_name(f"{output.name}.part")
        part.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        os.replace(part, output)
    print(json.dumps(report))


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return "-" if value is None else str(value)
