"""Finds tool calls in text as it grows: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

What is found does not depend on how the text was cut. One block may hold a list of calls (SmolLM2) or several one after
the other. Arguments are passed on as they are written, character by character. A block that is no call stays text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_ARGUMENTS = ("arguments", "parameters")
_SPACE = " \t\r\n"


@dataclass(frozen=True)
class Said:
    """Text of the message."""

    text: str


@dataclass(frozen=True)
class Called:
    """Call number `index` begins; its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True)
class Argued:
    """More of the arguments, as JSON text, of call number `index`."""

    index: int
    text: str


Part: TypeAlias = Said | Called | Argued


class ToolParser:
    """Feed it the text of one message. calls: how many it has had. most: further ones are dropped.

    inside: the text begins after an opening marker, which a call that was forced does not write.
    """

    def __init__(self, most: int | None = None, *, inside: bool = False) -> None:
        self.calls = 0
        self._most = most
        self._held = ""
        self._block: _Block | None = _Block(0, opening="") if inside else None

    def feed(self, text: str) -> list[Part]:
        return _joined(part for char in text for part in self._take(char))

    def finish(self) -> list[Part]:
        """What is held back when the text ends. A call that was begun stays as far as it got."""
        parts = [] if self._block is None else self._leave(self._block)
        if self._held.strip(_SPACE) or not self.calls:
            parts.append(Said(self._held))
        self._held = ""
        return _joined(parts)

    def _take(self, char: str) -> list[Part]:
        block = self._block
        if block is None:
            return self._outside(char)
        parts: list[Part] = []
        for part in block.take(char):
            if self._most is None or part.index < self._most:
                self.calls = part.index + 1
                parts.append(part)
        return parts + self._leave(block) if block.done else parts

    def _outside(self, char: str) -> list[Part]:
        """Spaces and what may begin a call are held back: spaces around calls are not part of the message."""
        self._held += char
        waiting = self._held.lstrip(_SPACE)
        if waiting == OPEN:
            self._held, self._block = "", _Block(self.calls)
        if OPEN.startswith(waiting):
            return []
        cut = len(self._held) - _tail(waiting)
        said, self._held = self._held[:cut], self._held[cut:]
        return [Said(said)]

    def _leave(self, block: _Block) -> list[Part]:
        self._block = None
        self._held = block.rest
        return [] if block.found else [Said(block.opening + block.text)]


class _Block:
    """What follows an opening marker. first: the number of its first call; found: calls in it.

    text: all of it, until the first call is found. done: it has ended, and `rest` belongs to what comes after it.
    """

    def __init__(self, first: int, opening: str = OPEN) -> None:
        self.opening = opening
        self.found = 0
        self.text = ""
        self.done = False
        self._first = first
        self._between = ""
        self._call: _Call | None = None

    @property
    def rest(self) -> str:
        return self._between.lstrip(_SPACE + "[],") if self.found else ""

    def take(self, char: str) -> Iterator[Called | Argued]:
        if not self.found:
            self.text += char
        if self._call is not None:
            yield from self._inside(self._call, char)
            return
        self._between += char
        waiting = self._between.lstrip(_SPACE + "[],")
        if waiting == "{":
            self._call, self._between = _Call(), ""
        elif waiting == CLOSE:
            self.done, self._between = True, ""
        elif not CLOSE.startswith(waiting):
            self.done = True

    def _inside(self, call: _Call, char: str) -> Iterator[Called | Argued]:
        was_named = call.name is not None
        call.take(char)
        if call.name is not None:
            if not was_named:
                self.found += 1
                yield Called(self._first + self.found - 1, call.name)
            if text := call.arguments():
                yield Argued(self._first + self.found - 1, text)
        if call.is_broken:
            self._between = "" if call.name is not None else "{" + call.text
        if call.is_broken or call.is_closed:
            self._call, self.done = None, call.is_broken


class _Call:
    """One JSON object, after its opening brace. text: all of it, while it has no name."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.text = ""
        self.is_closed = self.is_broken = False
        self._depth = 1
        self._in_string = self._is_escaped = False
        self._key: str | None = None
        self._value = ""
        self._ready = ""
        self._has_arguments = self._streams = False

    def arguments(self) -> str:
        """What has become known since it was last asked."""
        ready, self._ready = self._ready, ""
        return ready

    def take(self, char: str) -> None:
        if self.name is None:
            self.text += char
        if self._in_string:
            self._in_string = self._is_escaped or char != '"'
            self._is_escaped = char == "\\" and not self._is_escaped
        elif self._depth == 1 and char in ",}":
            self._end_value(is_last=char == "}")
            return
        elif self._depth == 1 and char == ":" and self._key is None:
            self._key, self._value = _string(self._value), ""
            self.is_broken = self._key is None
            return
        else:
            self._begin_arguments(char)
            self._in_string = char == '"'
            self._depth += (char in "{[") - (char in "}]")
            self.is_broken = self._depth < 1
        self._keep(char)

    def _begin_arguments(self, char: str) -> None:
        """An object goes out as it comes; anything else waits until it is whole."""
        if char == "{" and self._key in _ARGUMENTS and not self._has_arguments and not self._value.strip(_SPACE):
            self._has_arguments = self._streams = True

    def _keep(self, char: str) -> None:
        if self._streams:
            self._ready += char
            self._streams = self._depth > 1
        else:
            self._value += char

    def _end_value(self, *, is_last: bool) -> None:
        value, key = self._value.strip(_SPACE), self._key
        self._key, self._value = None, ""
        if key == "name":
            self.name = self.name or _string(value) or None
            self.is_broken = self.name is None
        elif key in _ARGUMENTS and not self._has_arguments:
            self._has_arguments = value != "null"
            self._ready += (_string(value) or value) if self._has_arguments else ""
        if is_last:
            self.is_closed, self.is_broken = True, self.name is None
            self._ready += "" if self._has_arguments else "{}"


def _tail(text: str) -> int:
    """Length of the end of the text that may yet turn out to be the space before a marker, or the marker's begin."""
    if text[-1] in _SPACE:
        return len(text) - len(text.rstrip(_SPACE))
    return max((size for size in range(1, len(text)) if OPEN.startswith(text[-size:])), default=0)


def _string(value: str) -> str | None:
    """The string that a JSON text stands for, None for anything else."""
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, str) else None


def _joined(parts: Iterator[Part] | list[Part]) -> list[Part]:
    """Neighbours of one kind as one part, and none of them empty."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, Said) and isinstance(last, Said):
            joined[-1] = Said(last.text + part.text)
        elif isinstance(part, Argued) and isinstance(last, Argued) and last.index == part.index:
            joined[-1] = replace(last, text=last.text + part.text)
        elif isinstance(part, Called) or part.text:
            joined.append(part)
    return joined
