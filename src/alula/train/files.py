"""Files that are whole or not there: written beside their place, flushed to the disk, then renamed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """``write`` fills a temporary file of the same suffix; only a complete one on disk takes the name ``path``."""
    unfinished = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    _clear(path)
    try:
        write(unfinished)
        _flush(unfinished)
        unfinished.replace(path)
        _flush(path.parent)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """A whole text file."""

    def write(unfinished: Path) -> None:
        unfinished.write_text(text, encoding="utf-8")

    write_whole(path, write)


def _clear(path: Path) -> None:
    """Remove what writers of this file left that were killed on the way."""
    begin, end = f".{path.stem}.", f".tmp{path.suffix}"
    for name in os.listdir(path.parent):
        writer = name.removeprefix(begin).removesuffix(end)
        if name == f"{begin}{writer}{end}" and writer.isdecimal() and not _lives(int(writer)):
            path.with_name(name).unlink(missing_ok=True)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's
    return True


def _flush(path: Path) -> None:
    """Of a file its content, of a folder its names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
