"""Whether a checkpoint may be gone on from: the same target, data and settings, or changes that were named."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from alula.config import AlulaError
from alula.train.config import TrainConfig

DATA = "data"
_DECIDING = ("dtype", "max_tokens", "held_out_one_in", "seed")
"""Settings of the run itself that decide its losses, besides recipe and method."""


def settings_of(config: TrainConfig, target: str) -> dict[str, Any]:
    """All that decides the losses but the data, by the names of the command line. target: hash of its weights."""
    recipe = {f"recipe.{name}": value for name, value in asdict(config.recipe).items()}
    method = {f"method.{name}": value for name, value in asdict(config.method).items()}
    run = {name: getattr(config, name) for name in _DECIDING}
    found: dict[str, Any] = json.loads(
        json.dumps({"target": target, **run, **recipe, "method": config.method.name, **method}, default=str)
    )
    return found


def data_record(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Length and SHA-256 of each file, so that it is known again after it has grown at its end."""
    return [{"bytes": path.stat().st_size, "sha256": _hash(path, path.stat().st_size)} for path in files]


def check_resumable(
    path: Path, state: Mapping[str, Any], settings: Mapping[str, Any], files: Sequence[Path], change: Sequence[str]
) -> None:
    """Raises AlulaError, naming the first thing that differs, unless ``change`` names it.

    path: the checkpoint. files: the data now; more files, and more lines at the end of one, are no change.
    """
    check_names(change, settings)
    if "settings" not in state:
        raise AlulaError(f"checkpoint {path} does not say its settings: remove it to start over")
    saved = state["settings"]
    for name in [*settings, *(name for name in saved if name not in settings)]:
        if saved.get(name) != settings.get(name) and name not in change:
            raise AlulaError(
                f"checkpoint {path} is of {name} {saved.get(name)!r}, and this run's is {settings.get(name)!r}: give "
                f"it as it was, give another output, or allow it with --change {name}"
            )
    if DATA not in change and not same_data(state["data"], files):
        raise AlulaError(
            f"checkpoint {path} is of other data: give the same files (they may have grown), give another output, or "
            f"allow it with --change {DATA}"
        )


def check_names(change: Sequence[str], settings: Mapping[str, Any]) -> None:
    """Raises AlulaError for a name that is no setting."""
    for name in change:
        if name not in settings and name != DATA:
            raise AlulaError(f"change names {name!r}: give one of {', '.join([DATA, *settings])}")


def same_data(record: Sequence[Mapping[str, Any]], files: Sequence[Path]) -> bool:
    """Whether the files begin with what was recorded."""
    return len(record) <= len(files) and all(
        path.stat().st_size >= known["bytes"] and _hash(path, known["bytes"]) == known["sha256"]
        for known, path in zip(record, files, strict=False)
    )


def _hash(path: Path, size: int) -> str:
    """SHA-256 of the first ``size`` bytes."""
    total = hashlib.sha256()
    with path.open("rb") as file:
        while size > 0 and (block := file.read(min(size, 2**20))):
            total.update(block)
            size -= len(block)
    return total.hexdigest()
