"""Conversations as token ids with a loss mask: reading, splitting, planning batches.

A data file holds JSON lines of one of two forms::

    {"prompt_ids": [...], "answer_ids": [...]}          one answer at the end
    {"tokens": [...], "loss_mask": [0, 1, ...]}         any number of answers

Only masked tokens (the assistant's, their end-of-turn token included) are trained on: they are what the drafter
will be asked to guess.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from alula.config import AlulaError

_SHORTEST = 3
"""A pair (f_j, t_{j+1}) predicts t_{j+2}: shorter texts hold no prediction."""


@dataclass(frozen=True)
class Conversation:
    """One text of n tokens; ``mask[m]`` says whether token m is one to learn."""

    tokens: tuple[int, ...]
    mask: tuple[bool, ...]

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.mask):
            raise AlulaError(
                f"loss_mask has {len(self.mask)} entries for {len(self.tokens)} tokens; give one per token"
            )

    @cached_property
    def key(self) -> str:
        """A stable name of the content: 32 hex digits of SHA-256 over tokens and mask."""
        content = json.dumps([self.tokens, [int(bit) for bit in self.mask]])
        return hashlib.sha256(content.encode()).hexdigest()[:32]

    @cached_property
    def learned(self) -> tuple[int, ...]:
        """Indices of the masked tokens that a drafter can predict at all (index 2 and up)."""
        return tuple(m for m in range(2, len(self.tokens)) if self.mask[m])

    def cut(self, limit: int) -> Conversation:
        """The first ``limit`` tokens."""
        return self if len(self.tokens) <= limit else Conversation(self.tokens[:limit], self.mask[:limit])


def conversation_from_record(record: Mapping[str, Any]) -> Conversation:
    """Parse one line's object (see the module's text); raises AlulaError naming the missing field."""
    if "prompt_ids" in record and "answer_ids" in record:
        prompt, answer = record["prompt_ids"], record["answer_ids"]
        return Conversation((*prompt, *answer), (False,) * len(prompt) + (True,) * len(answer))
    if "tokens" in record and "loss_mask" in record:
        return Conversation(tuple(record["tokens"]), tuple(bool(bit) for bit in record["loss_mask"]))
    raise AlulaError("a training line needs prompt_ids and answer_ids, or tokens and loss_mask")


def read_conversations(paths: Iterable[Path], *, max_tokens: int) -> list[Conversation]:
    """All usable conversations of the files, in order, without repeats, cut to ``max_tokens``.

    A last line without its newline is still being written by the generator, so it is left for the next call.
    """
    seen: dict[str, Conversation] = {}
    for path in paths:
        for number, line in _complete_lines(path):
            try:
                conversation = conversation_from_record(json.loads(line)).cut(max_tokens)
            except (ValueError, TypeError, RecursionError) as error:
                raise AlulaError(f"{path}, line {number}: {error}") from error
            if len(conversation.tokens) >= _SHORTEST and conversation.learned:
                seen.setdefault(conversation.key, conversation)
    return list(seen.values())


def _complete_lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise AlulaError(f"data file {path} cannot be read ({error.strerror}); check the path") from error
    whole = text[: text.rfind("\n") + 1]
    for number, line in enumerate(whole.splitlines(), 1):
        if line.strip():
            yield number, line


def split_held_out(
    conversations: Sequence[Conversation], *, one_in: int
) -> tuple[list[Conversation], list[Conversation]]:
    """(training, held out). The key decides, so a conversation never changes sides while the data grows."""
    if one_in < 2:
        raise AlulaError(f"held_out_one_in must be at least 2, not {one_in}")
    held = [c for c in conversations if int(c.key[:8], 16) % one_in == 0]
    train = [c for c in conversations if int(c.key[:8], 16) % one_in != 0]
    return train, held


def plan_batches(
    conversations: Sequence[Conversation], *, tokens_per_batch: int, generator: torch.Generator, window: int = 64
) -> list[list[str]]:
    """One epoch: batches of conversation keys with about ``tokens_per_batch`` learned tokens each.

    Shuffled; lengths are sorted inside windows of ``window`` conversations, so that padding stays small, and the
    batches are shuffled again.
    """
    order = torch.randperm(len(conversations), generator=generator).tolist()
    batches: list[list[str]] = []
    for start in range(0, len(order), window):
        block = sorted((conversations[i] for i in order[start : start + window]), key=lambda c: len(c.learned))
        batches += _cut(block, tokens_per_batch)
    shuffled = torch.randperm(len(batches), generator=generator).tolist()
    return [batches[i] for i in shuffled]


def _cut(block: Sequence[Conversation], tokens_per_batch: int) -> list[list[str]]:
    """Cut a block into runs whose learned tokens reach about the budget (never over it, save a single long text)."""
    batches: list[list[str]] = []
    room = 0
    for conversation in block:
        size = len(conversation.learned)
        if not batches or size > room:
            batches.append([])
            room = tokens_per_batch
        batches[-1].append(conversation.key)
        room -= size
    return batches
