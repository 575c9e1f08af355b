"""The file that `alula synth` writes: a JSON line per conversation, in whole batches, safe against a kill at any byte.

The last line of a batch carries ``end``: the batch's number, the inputs used so far, and what was dropped and why.
What follows the last such line belongs to a batch that was cut off; it is cut away and written again, the same.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from alula.config import AlulaError
from alula.train.lines import parse_object
from alula.train.sources import Message

_FIRST = b'{"batch": '
"""Every line begins so: what does not was written by somebody else."""

Record = dict[str, Any]


def record_of(
    messages: Sequence[Message], tokens: Sequence[int], learned: Iterable[tuple[int, int]], tokenizer: str, **more: Any
) -> Record:
    """One conversation as it is written. learned: spans of the answers. tokenizer: the hash of the vocabulary."""
    spans = [list(span) for span in learned]
    return {"messages": list(messages), "tokens": list(tokens), "learned": spans, "tokenizer": tokenizer, **more}


def answer_tokens(record: Mapping[str, Any]) -> int:
    """How many tokens of a record are learned."""
    if "answer_ids" in record:
        return len(record["answer_ids"])
    return sum(end - start for start, end in record["learned"])


def keys(messages: Iterable[Mapping[str, str]]) -> list[bytes]:
    """What may occur only once in a file: the words up to the first answer, and the first answer."""
    asked: list[str] = []
    for message in messages:
        if message["role"] == "assistant":
            return [_digest("asked", asked), _digest("answered", [message["content"]])]
        asked.append(message["content"])
    return [_digest("asked", asked)]


def _digest(kind: str, texts: Iterable[str]) -> bytes:
    plain = "\n".join(" ".join(text.casefold().split()) for text in texts)
    return hashlib.blake2b(f"{kind}\n{plain}".encode("utf-8", "surrogatepass"), digest_size=12).digest()


class Journal:
    """An output file, held for one writer. Raises AlulaError for a file that is not synth's own, or in use.

    answer_tokens, conversations: in the file. batch: number of the next batch. inputs: how many inputs are used up.
    dropped: conversations left out so far, by reason. seen: keys of what the file holds.
    """

    def __init__(self, path: Path, tokenizer: str, tell: Callable[[str], None]) -> None:
        self.path = path
        self.tokenizer = tokenizer
        self.answer_tokens = self.conversations = self.batch = self.inputs = 0
        self.dropped: Counter[str] = Counter()
        self.seen: set[bytes] = set()
        self._tell = tell
        self._foreign_tokenizer = False
        self._file = path.open("a+b")
        try:
            self._lock()
            self._cut_torn_batch()
            self._read()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def append(self, records: Sequence[Record], *, inputs: int, dropped: Mapping[str, int]) -> None:
        """Write one batch, in one piece and to the disk. inputs: used up by it. dropped: left out of it.

        A batch without records leaves no trace but in the next one's ``end``.
        """
        self.inputs += inputs
        self.dropped.update(dropped)
        if records:
            numbered = [{"batch": self.batch, **record} for record in records]
            numbered[-1]["end"] = {"batch": self.batch, "inputs": self.inputs, "dropped": dict(self.dropped)}
            self._file.write(b"".join(json.dumps(record).encode() + b"\n" for record in numbered))
            self._file.flush()
            os.fsync(self._file.fileno())
            for record in records:
                self._count(record)
        self.batch += 1

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AlulaError(f"output: {self.path} is being written by another process: wait for it") from None
        except OSError:  # some network file systems have no locks
            self._tell(f"{self.path} cannot be locked: let no other process write it")

    def _cut_torn_batch(self) -> None:
        self._file.seek(0)
        whole = position = lines = 0
        for line in self._file:
            position += len(line)
            lines += 1
            if line.endswith(b"\n") and self._ends_a_batch(line, lines):
                whole, lines = position, 0
            elif not line.endswith(b"\n") and line[: len(_FIRST)] != _FIRST[: len(line)]:
                raise self._foreign()
        if whole < position:
            what = f"{lines} {'line' if lines == 1 else 'lines'}, {position - whole} bytes"
            self._tell(f"{self.path}: the last batch was cut off, so its {what} are written again")
            self._file.truncate(whole)

    def _ends_a_batch(self, line: bytes, number: int) -> bool:
        if not line.strip():
            return False
        try:
            record = parse_object(line)
        except AlulaError:
            if not line.startswith(_FIRST):
                raise self._foreign() from None
            return False
        if not line.startswith(_FIRST) and "prompt_ids" not in record:
            raise self._foreign()
        return "end" in record or "prompt_ids" in record

    def _foreign(self) -> AlulaError:
        return AlulaError(f"output: {self.path} holds lines that alula synth did not write: give another file")

    def _read(self) -> None:
        self._file.seek(0)
        for number, line in enumerate(self._file, 1):
            try:
                self._take(parse_object(line))
            except AlulaError as error:
                self._tell(f"{self.path}, line {number} is left out: {error}")
            except (KeyError, TypeError, ValueError) as error:
                self._tell(f"{self.path}, line {number} is left out: it is no record of alula synth ({error!r})")
        if self._foreign_tokenizer:
            raise AlulaError(f"output: {self.path} was written for another tokenizer: give another file")

    def _take(self, record: Mapping[str, Any]) -> None:
        self._foreign_tokenizer |= record.get("tokenizer", self.tokenizer) != self.tokenizer
        self._count(record)
        self.batch = max(self.batch, record.get("batch", -1) + 1)
        if "end" in record:
            self.inputs, self.dropped = record["end"]["inputs"], Counter(record["end"]["dropped"])

    def _count(self, record: Mapping[str, Any]) -> None:
        self.conversations += 1
        self.answer_tokens += answer_tokens(record)
        self.seen.update(keys(record.get("messages", ())))
