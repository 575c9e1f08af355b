"""A progress bar on standard error, where that is a terminal."""

from __future__ import annotations

from types import TracebackType
from typing import Self


class Progress:
    """`with Progress(...) as progress: progress.tick()`; quiet in pipes and logs."""

    def __init__(self, what: str, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        console = Console(stderr=True)
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self._bar = Bar(
            TextColumn("{task.description}"), *columns, console=console, disable=not console.is_terminal, transient=True
        )
        self._task = self._bar.add_task(what, total=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def tick(self) -> None:
        self._bar.advance(self._task)

    def announce(self, what: str, more: int = 0) -> None:
        """A new part begins; `more` is added to the total."""
        total = (self._bar.tasks[self._task].total or 0) + more
        self._bar.update(self._task, description=what, total=total)
