"""Does a text share a run of words with a benchmark? Then it is not trained on."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from alula.config import AlulaError

SHORTEST = 4
"""Benchmark texts of fewer words are met by chance, so only the very same text overlaps with them."""

_IDEOGRAPHS = r"\u3040-\u30ff\u3400-\u9fff"
_WORD = re.compile(rf"[{_IDEOGRAPHS}]|[^\W{_IDEOGRAPHS}]+")


def words(text: str) -> tuple[str, ...]:
    """Words in lower case, without punctuation; of scripts without spaces each sign is one."""
    return tuple(_WORD.findall(text.casefold()))


class Exclusion:
    """Texts to keep away from, by the name of the set they come from.

    A text overlaps with a set if it has ``ngram`` words in a row with one of the set's texts in common. A text of the
    set that has fewer words has to be in it as a whole; one of fewer than 4 has to be the same.
    """

    def __init__(self, ngram: int) -> None:
        if ngram < SHORTEST:
            raise AlulaError(f"ngram is {ngram}: give at least {SHORTEST} words, or everything overlaps by chance")
        self._ngram = ngram
        self._runs: dict[int, dict[tuple[str, ...], str]] = defaultdict(dict)
        self._whole: dict[tuple[str, ...], str] = {}

    def add(self, name: str, texts: Iterable[str]) -> None:
        """Keep away from these texts too."""
        for found in map(words, texts):
            if not found:
                continue
            if len(found) < SHORTEST:
                self._whole.setdefault(found, name)
            else:
                size = min(len(found), self._ngram)
                self._runs[size] |= dict.fromkeys(_runs(found, size), name)

    def overlap(self, text: str) -> str | None:
        """Name of a set that the text overlaps with, None if there is none."""
        found = words(text)
        for size, known in self._runs.items():
            hit = next((known[run] for run in _runs(found, size) if run in known), None)
            if hit is not None:
                return hit
        return self._whole.get(found)


def _runs(found: Sequence[str], size: int) -> Iterable[tuple[str, ...]]:
    return (tuple(found[i : i + size]) for i in range(len(found) - size + 1))
