"""JSON lines as people have them: good lines with their number, bad ones told, counted and left out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from alula.config import AlulaError

TOLD = 20
"""Of each file so many bad lines are told with their reason; the summary has the numbers of all."""

_BOM = b"\xef\xbb\xbf"


class BadLines:
    """Lines that could not be used. ``tell`` gets a sentence for each of the first ones of a file."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._numbers: dict[Path, dict[int, None]] = {}

    @property
    def total(self) -> int:
        return sum(len(numbers) for numbers in self._numbers.values())

    def add(self, path: Path, number: int, reason: object) -> None:
        """Note line ``number`` (from 1) of a file; a line noted before is not told again."""
        numbers = self._numbers.setdefault(path, {})
        if number in numbers:
            return
        numbers[number] = None
        if len(numbers) <= TOLD:
            self._tell(f"{path}, line {number} is left out: {reason}")

    def summary(self) -> list[str]:
        """One sentence per file that had bad lines."""
        return [f"{path}: left out {_counted(numbers)}" for path, numbers in self._numbers.items()]


def _counted(numbers: Iterable[int]) -> str:
    ranges: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    named = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
    total = sum(b - a + 1 for a, b in ranges)
    return f"{total} bad {'line' if total == 1 else 'lines'} ({named})"


def read_objects(path: Path, bad: BadLines, *, growing: bool = False) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(number, object) of each line that is a JSON object; empty lines are skipped, others go to ``bad``.

    growing: somebody may be writing the file, so a last line without its newline is skipped in silence if it is not
    whole yet. Raises AlulaError where the file itself cannot be read.
    """
    for number, line in _lines(path):
        try:
            yield number, parse_object(line)
        except AlulaError as error:
            if not growing or line.endswith(b"\n"):
                bad.add(path, number, error)


def parse_object(line: bytes) -> Mapping[str, Any]:
    """The JSON object of one line. Raises AlulaError with what is wrong and what to do."""
    try:
        found = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise AlulaError(f"it is not valid UTF-8 (byte {error.start}): re-encode the file") from None
    except (ValueError, RecursionError) as error:
        raise AlulaError(f"it is not valid JSON ({error}): give one object per line") from None
    if not isinstance(found, dict):
        raise AlulaError("it holds no JSON object: give one object per line")
    return found


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                text = line.removeprefix(_BOM) if number == 1 else line
                if text.strip():
                    yield number, text
    except OSError as error:
        raise AlulaError(f"data file {path} cannot be read ({error.strerror}); check the path") from error
