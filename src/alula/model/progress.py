"""Progress bars on stderr for work that takes long enough to wonder about."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol


class Bar(Protocol):
    """One running task, counted in bytes."""

    def set(self, done: int) -> None: ...


class _NoBar:
    def set(self, done: int) -> None:
        pass


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
    """A bar towards `total` bytes. show: None shows it if stderr is a terminal."""
    if not (sys.stderr.isatty() if show is None else show):
        yield _NoBar()
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
