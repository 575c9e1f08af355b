"""What people have to train on: prompts and conversations in the usual shapes, as one.

Of one line's object these are read, the first that is there::

    {"messages": [{"role": "user", "content": "..."}, ...]}             OpenAI; content may be a list of text parts
    {"conversations": [{"from": "human", "value": "..."}, ...]}         ShareGPT; also with role and content
    {"turns": ["...", ...]}   {"prompt": "..."}   {"question": "..."}   what a user asks

A text under ``system`` is put first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alula.config import AlulaError
from alula.train.lines import BadLines, read_objects

Message = dict[str, str]
"""``role`` and ``content``."""

_ROLES = {
    "human": "user",
    "user": "user",
    "prompter": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
}
_KNOWN = "messages, conversations, turns, prompt or question"


@dataclass(frozen=True)
class Source:
    """One line of a file: a conversation, or only what a user asks."""

    path: Path
    number: int
    messages: tuple[Message, ...]

    @property
    def answered(self) -> bool:
        """Whether an assistant speaks in it."""
        return any(message["role"] == "assistant" for message in self.messages)

    def opening(self) -> list[Message]:
        """What stands before the first user's turn, to be kept when answers are written anew."""
        roles = [message["role"] for message in self.messages]
        return list(self.messages[: roles.index("user")])

    def questions(self) -> list[str]:
        """The user's turns. Raises AlulaError for a conversation that cannot be replayed turn by turn."""
        strange = {message["role"] for message in self.messages} - {"user", "assistant", "system"}
        if strange:
            raise AlulaError(f"messages of role {', '.join(sorted(strange))} cannot be replayed: leave such lines out")
        return [message["content"] for message in self.messages if message["role"] == "user"]


def read_sources(paths: Iterable[Path], bad: BadLines) -> Iterator[Source]:
    """Every usable line of the files, in order; the others go to ``bad``."""
    for path in paths:
        for number, record in read_objects(path, bad):
            try:
                yield Source(path, number, tuple(read_messages(record)))
            except AlulaError as error:
                bad.add(path, number, error)


def read_messages(record: Mapping[str, Any]) -> list[Message]:
    """The messages of one line's object (see the module's text). Raises AlulaError, naming field and mend."""
    found = _messages(record)
    system = record.get("system")
    if isinstance(system, str) and system.strip() and all(message["role"] != "system" for message in found):
        found.insert(0, {"role": "system", "content": system})
    if all(message["role"] != "user" for message in found):
        raise AlulaError("no user speaks in it: give at least one user's turn")
    return found


def _messages(record: Mapping[str, Any]) -> list[Message]:
    for field in ("messages", "conversations", "conversation"):
        if record.get(field) is not None:
            return [_message(entry, f"{field}[{i}]") for i, entry in enumerate(_list(record[field], field))]
    if record.get("turns") is not None:
        turns = enumerate(_list(record["turns"], "turns"))
        return [{"role": "user", "content": _text(turn, f"turns[{i}]")} for i, turn in turns]
    for field in ("prompt", "question"):
        if record.get(field) is not None:
            return [{"role": "user", "content": _text(record[field], field)}]
    raise AlulaError(f"it has none of {_KNOWN}: give one of them")


def _message(entry: object, where: str) -> Message:
    if not isinstance(entry, Mapping):
        raise AlulaError(f"{where} is no object: give role and content")
    role = entry.get("role", entry.get("from"))
    if not isinstance(role, str) or role.lower() not in _ROLES:
        raise AlulaError(f"{where} has role {role!r}: give one of {', '.join(_ROLES)}")
    content = entry.get("content", entry.get("value"))
    if isinstance(content, list):
        content = "".join(_part(part, where) for part in content)
    return {"role": _ROLES[role.lower()], "content": _text(content, where)}


def _part(part: object, where: str) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise AlulaError(f"{where} has a part that is not text: leave such lines out")
    return str(part["text"])


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise AlulaError(f"{where} is {str(value)[:40]!r}: give a text that is not empty")
    return value


def _list(value: object, field: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise AlulaError(f"{field} is no list or empty: give at least one entry")
    return value
