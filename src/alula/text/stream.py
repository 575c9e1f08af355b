"""Output text as it grows: whole code points only, and stop strings found wherever they fall."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Protocol

from alula.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Decodes token by token; the pieces joined, with `flush` at the end, equal the decoding of all ids at once.

    Decoding starts at the piece before, so that what a decoder strips from the first token is not stripped from
    every piece. A piece is given out only once it ends in a whole code point, and not inside a run of byte
    tokens (`<0xE2>`), since decoders replace all of a run that turns out not to be UTF-8.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._given: list[int] = []
        self._open: list[int] = []

    def step(self, token: int) -> str:
        """Text that this token completes, possibly none."""
        if token in self._skipped:
            return ""
        self._open = [*self._open, token]
        spelled = self._tokenizer.token(token) or ""
        if len(spelled) == 6 and spelled.startswith("<0x") and spelled.endswith(">"):
            return ""
        text = self._rest()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        self._given, self._open = self._open, []
        return text

    def flush(self) -> str:
        """What is left at the end of the output; bytes that make no code point become U+FFFD."""
        text = self._rest() if self._open else ""
        self._given, self._open = self._given + self._open, []
        return text

    def _rest(self) -> str:
        before = self._decode(self._given) if self._given else ""
        return self._decode(self._given + self._open)[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class TextOptions(Protocol):
    """What a request asks of its text; SamplingParams has it."""

    @property
    def stop(self) -> tuple[str, ...]: ...

    @property
    def include_stop_str_in_output(self) -> bool: ...

    @property
    def skip_special_tokens(self) -> bool: ...


class TextStream:
    """Text of one output. Feed it committed tokens; it gives out text that no stop string can take back.

    Characters count in order: the stop string that is complete first ends the text, the longer one if two are
    complete with the same character. Tokens are fed one at a time, so the outcome does not depend on how many
    a step commits, and the token that completed the stop string is the last of the output.
    """

    def __init__(self, tokenizer: Tokenizer, options: TextOptions) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=options.skip_special_tokens)
        self._stops = options.stop
        self._include = options.include_stop_str_in_output
        self._text = ""
        self._emitted = 0
        self._ended = False

    @property
    def text(self) -> str:
        """Everything decoded so far, held-back characters included; final after a stop string or `finish`."""
        return self._text

    def copy(self) -> TextStream:
        """An independent stream at the same point."""
        twin = copy(self)
        twin._detokenizer = copy(self._detokenizer)  # its lists are replaced, never changed in place
        return twin

    def feed(self, token: int, may_stop: bool = True) -> tuple[str, str | None]:
        """Newly safe text, and the stop string that this token completes (never one while not `may_stop`)."""
        if self._ended:
            raise RuntimeError("the text has ended")
        start = len(self._text)
        self._text += self._detokenizer.step(token)
        found = _first_complete(self._text, self._stops, start) if may_stop and len(self._text) > start else None
        if found is None:
            return self._emit(len(self._text) - self._held()), None
        end, stop = found
        self._text = self._text[: end if self._include else end - len(stop)]
        self._ended = True
        return self._emit(len(self._text)), stop

    def finish(self) -> str:
        """Text still held back when the output ends without a stop string; half a code point becomes U+FFFD."""
        if not self._ended:
            self._text += self._detokenizer.flush()
            self._ended = True
        return self._emit(len(self._text))

    def _emit(self, end: int) -> str:
        delta = self._text[self._emitted : end]
        self._emitted = max(self._emitted, end)
        return delta

    def _held(self) -> int:
        """Characters at the end that may yet turn out to begin a stop string."""
        if self._include:
            return 0
        return max((_overlap(self._text, stop) for stop in self._stops), default=0)


def _first_complete(text: str, stops: Sequence[str], start: int) -> tuple[int, str] | None:
    """(end, stop) of the first stop string that ends after `start`."""
    found = []
    for stop in stops:
        at = text.find(stop, max(0, start - len(stop) + 1))
        if at >= 0:
            found.append((at + len(stop), -len(stop), stop))
    if not found:
        return None
    end, _, stop = min(found)
    return end, stop


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that begins the stop string, short of all of it."""
    longest = min(len(stop) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
