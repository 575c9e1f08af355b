"""Progress on stderr for work that takes long enough to wonder about: a bar on a terminal, in a log a line a minute."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol


class Bar(Protocol):
    """One running task, counted in bytes."""

    def set(self, done: int) -> None: ...


class _NoBar:
    def set(self, done: int) -> None:
        pass


class Pace:
    """Says when a log is due another line."""

    def __init__(self, interval_s: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s, self._clock = interval_s, clock
        self._last_s = clock()

    def is_due(self) -> bool:
        """True once per interval, the first time when one has passed."""
        now_s = self._clock()
        due = now_s - self._last_s >= self._interval_s
        self._last_s = now_s if due else self._last_s
        return due


class _Lines:
    def __init__(self, description: str, total: int) -> None:
        self._description, self._total, self._pace = description, total, Pace()

    def set(self, done: int) -> None:
        if self._pace.is_due():
            print(f"{self._description}: {done / max(self._total, 1):.0%}", file=sys.stderr, flush=True)


class _RichBar:
    def __init__(self, description: str, total: int) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
        )
        self.progress = Progress(*columns, console=Console(stderr=True))
        self._task = self.progress.add_task(description, total=total)

    def set(self, done: int) -> None:
        self.progress.update(self._task, completed=done)


@contextmanager
def progress_bar(description: str, total: int, show: bool | None = None) -> Iterator[Bar]:
    """A bar towards `total` bytes. show: None makes it lines where stderr is no terminal, False shows nothing."""
    if not (sys.stderr.isatty() if show is None else show):
        yield _Lines(description, total) if show is None else _NoBar()
        return
    bar = _RichBar(description, total)
    with bar.progress:
        yield bar


@contextmanager
def folder_growth(folder: Path, bar: Bar, interval: float = 0.2) -> Iterator[None]:
    """Sets the bar to the size of everything in a folder that another process fills."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(interval):
            bar.set(_size(folder))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        bar.set(_size(folder))


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # gone between listing and asking
            continue
    return total
