"""Progress on standard error: a bar on a terminal, in a log a line a minute."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from alula.model.progress import Pace


class Progress:
    """`with Progress(...) as progress: progress.tick()`."""

    def __init__(self, what: str, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self._console, self._pace = Console(stderr=True), Pace()
        console = self._console
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
        if not self._console.is_terminal and self._pace.is_due():
            task = self._bar.tasks[self._task]
            line = f"{task.description}: {task.completed:.0f} of {task.total or 0:.0f}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def announce(self, what: str, more: int = 0) -> None:
        """A new part begins; `more` is added to the total."""
        total = (self._bar.tasks[self._task].total or 0) + more
        self._bar.update(self._task, description=what, total=total)
