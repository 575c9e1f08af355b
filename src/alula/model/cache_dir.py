"""The user's cache directory: $ALULA_CACHE, else ~/.cache/alula. Everything in it appears whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alula.config import AlulaError

_SLACK = 16 << 20


def cache_folder(name: str) -> Path:
    """A folder of the cache, made if it is not there. Raises AlulaError where it cannot be."""
    root = os.environ.get("ALULA_CACHE")
    folder = (Path(root).expanduser() if root else Path.home() / ".cache" / "alula") / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AlulaError(f"the cache directory {folder} cannot be made ({error}): set ALULA_CACHE to another") from None
    return folder


def check_space(folder: Path, size: int, purpose: str) -> None:
    """Raises AlulaError unless the disk of that folder has room for `size` bytes and a little more."""
    free = shutil.disk_usage(folder).free
    if free < size + _SLACK:
        raise AlulaError(
            f"the disk of {folder} has {free >> 20} MiB free but {purpose} needs {(size + _SLACK) >> 20} MiB: "
            "free some, or set ALULA_CACHE to a directory on another disk"
        )


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turns a disk that fills up meanwhile into an AlulaError."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise
        raise AlulaError(f"{folder} cannot be written ({error}): free some space, or set ALULA_CACHE") from None


def replace_into(finished: Path, target: Path) -> None:
    """Moves a finished file or folder into place in one step; a folder another process put there first stays."""
    try:
        finished.replace(target)
    except OSError:
        if not (finished.is_dir() and target.is_dir()):
            raise
