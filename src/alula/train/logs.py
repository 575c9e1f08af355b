"""What a run leaves to look at: JSON lines always, TensorBoard where asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from alula.train.files import write_text

Entry = Mapping[str, Any]


class RunLog:
    """``log.jsonl`` of a run: a line per step with its losses, a line per evaluation.

    step: the step the run goes on from. Lines of later steps, written by a run that was cut before its next
    checkpoint, are dropped, since these steps come again.
    """

    def __init__(self, folder: Path, *, step: int, tensorboard: bool) -> None:
        self.path = folder / "log.jsonl"
        self._board = _Board(folder / "tensorboard", step) if tensorboard else None
        kept = [entry for entry in read_log(self.path) if entry["step"] <= step]
        write_text(self.path, "".join(json.dumps(entry) + "\n" for entry in kept))

    def add(self, entry: Entry) -> None:
        """One line with ``step``, ``tokens`` and figures, nested or not."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dict(entry)) + "\n")
        if self._board is not None:
            self._board.add(entry)

    def close(self) -> None:
        """Nothing is added afterwards."""
        if self._board is not None:
            self._board.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a log, [] where there is none; a line that a kill has cut is left out."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    lines = text[: text.rfind("\n") + 1].splitlines()
    return [entry for line in lines if (entry := _parsed(line)) is not None]


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("step"), int) else None


class _Board:
    """The same figures as TensorBoard scalars."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), purge_step=step + 1)

    def add(self, entry: Entry) -> None:
        for name, value in _scalars(entry):
            self._writer.add_scalar(name, value, entry["step"])

    def close(self) -> None:
        self._writer.close()


def _scalars(entry: Entry, above: str = "") -> Iterator[tuple[str, float]]:
    for name, value in entry.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{above}{name}/")
        elif isinstance(value, list):
            yield from _scalars({str(place): one for place, one in enumerate(value)}, f"{above}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and f"{above}{name}" != "step":
            yield f"{above}{name}", value
