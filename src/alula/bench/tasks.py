"""Prompts: alula's own sets by name, and files of JSON lines with `turns` (the first is used) or `prompt`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alula.config import AlulaError

if TYPE_CHECKING:
    from alula.text import Tokenizer

DEFAULT = "default"
SETS = (DEFAULT, "summaries", "forms")
"""alula's own sets: mixed questions; texts of 1,000 to 4,000 tokens to summarise; templated, low-entropy text."""


def prompt_file(name: str | Path) -> Path:
    """Where a set of that name, or else a file of that path, lies. A file named like a set is reached by `./name`."""
    if name in SETS:
        return Path(str(files("alula").joinpath("prompts", f"{name}.jsonl")))
    return Path(name)


def read_prompts(name: str | Path = DEFAULT, limit: int | None = None) -> list[str]:
    """The first `limit` prompts of a set or a file. Raises AlulaError, naming file and line."""
    if limit is not None and limit < 1:
        raise AlulaError(f"limit is {limit}: give a whole number of at least 1")
    path, prompts = prompt_file(name), []
    for prompt in _parse(_read(path), str(path)):
        prompts.append(prompt)
        if len(prompts) == limit:
            break
    if not prompts:
        raise AlulaError(f"{path} holds no prompt: give JSON lines with `turns` or `prompt`")
    return prompts


def read_sets(names: Sequence[str], limit: int | None = None) -> dict[str, list[str]]:
    """The first `limit` prompts of each, by the name of the set or file. Raises AlulaError for one named twice."""
    found: dict[str, list[str]] = {}
    for name in names or (DEFAULT,):
        short = name if name in SETS else Path(name).stem
        if short in found:
            raise AlulaError(f"prompts: {short} is given twice: leave one out, or rename a file")
        found[short] = read_prompts(name, limit)
    return found


def as_user_turn(tokenizer: Tokenizer, text: str, *, raw: bool = False) -> list[int]:
    """Token ids of a text as a user's turn in the model's chat template; as it is with `raw` or without a template.

    Raises AlulaError for an empty text.
    """
    if not text:
        raise AlulaError("the prompt is empty: give some text")
    if raw or tokenizer.chat_template is None:
        return tokenizer.encode(text)
    return tokenizer.apply_chat_template([{"role": "user", "content": text}])


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise AlulaError(
            f"prompts: {path} cannot be read ({error.strerror}): give a file of JSON lines, or one of {', '.join(SETS)}"
        ) from None


def _parse(content: bytes, name: str) -> Iterator[str]:
    for number, line in enumerate(content.splitlines(), start=1):
        if line.strip():
            yield _prompt(line, f"{name}, line {number}")


def _prompt(line: bytes, where: str) -> str:
    try:
        entry = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise AlulaError(f"{where} is not valid UTF-8 (byte {error.start}): re-encode the file") from None
    except (ValueError, RecursionError) as error:
        raise AlulaError(f"{where} is not valid JSON ({error}): give one object per line") from None
    text = _text_of(entry)
    if not isinstance(text, str) or not text:
        raise AlulaError(f"{where} has no prompt: give `turns` (a list of texts) or `prompt` (a text)")
    return text


def _text_of(entry: Any) -> Any:
    if not isinstance(entry, dict):
        return None
    turns = entry.get("turns")
    if turns is None:
        return entry.get("prompt")
    return turns[0] if isinstance(turns, list) and turns else None
