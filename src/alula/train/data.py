"""Conversations as token ids with a loss mask: reading, splitting, planning batches.

A data file holds JSON lines, each of one of these forms::

    {"tokens": [...], "learned": [[3, 9], ...], "tokenizer": "..."}     what `alula synth` writes (and more)
    {"prompt_ids": [...], "answer_ids": [...]}                          one answer at the end
    {"tokens": [...], "loss_mask": [0, 1, ...]}                         any number of answers
    {"messages": [...]}, {"conversations": [...]}                       text; the chat template says what is learned

Only masked tokens (the assistant's, their end-of-turn token included) are trained on: they are what the drafter
will be asked to guess.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alula.config import AlulaError
from alula.train.dialogue import vocabulary_hash
from alula.train.lines import BadLines, read_objects
from alula.train.masks import find_answers
from alula.train.sources import read_messages
from alula.train.watch import Watch

if TYPE_CHECKING:
    import torch

    from alula.text import Tokenizer

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


def conversation_from_record(record: Mapping[str, Any], tokenizer: Tokenizer | None = None) -> Conversation:
    """Parse one line's object (see the module's text); raises AlulaError naming the faulty field.

    tokenizer: the target's; without it messages cannot be read, and ids are taken as they are.
    """
    if "prompt_ids" in record and "answer_ids" in record:
        prompt, answer = (_ids(record, name, tokenizer) for name in ("prompt_ids", "answer_ids"))
        return Conversation((*prompt, *answer), (False,) * len(prompt) + (True,) * len(answer))
    if "tokens" in record and "learned" in record:
        tokens = _ids(record, "tokens", tokenizer)
        return Conversation(tokens, _mask(record["learned"], len(tokens)))
    if "tokens" in record and "loss_mask" in record:
        return Conversation(_ids(record, "tokens", tokenizer), _bits(record["loss_mask"]))
    if tokenizer is not None and ("messages" in record or "conversations" in record):
        ids, spans = find_answers(tokenizer, read_messages(record))
        return Conversation(tuple(ids), _mask(spans, len(ids)))
    raise AlulaError(
        "it has no conversation: give tokens and learned, prompt_ids and answer_ids, tokens and loss_mask, or messages"
    )


def _ids(record: Mapping[str, Any], name: str, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    ids = record[name]
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise AlulaError(f"{name} is no list of token ids: give whole numbers of at least 0")
    if tokenizer is not None and ids and max(ids) >= tokenizer.vocab_size:
        raise AlulaError(f"{name} has id {max(ids)}, and the tokenizer has {tokenizer.vocab_size}: give its own ids")
    return tuple(ids)


def _bits(mask: object) -> tuple[bool, ...]:
    if not isinstance(mask, list) or not all(bit in (0, 1) for bit in mask):
        raise AlulaError("loss_mask is no list of 0 and 1: give one per token")
    return tuple(bool(bit) for bit in mask)


def _mask(spans: object, size: int) -> tuple[bool, ...]:
    """Bits of spans [start, end). Raises AlulaError for spans that leave the text."""
    bits = [False] * size
    try:
        for start, end in spans:  # type: ignore[attr-defined]
            if not 0 <= start < end <= size:
                raise ValueError
            bits[start:end] = [True] * (end - start)
    except (TypeError, ValueError):
        raise AlulaError(f"learned is no list of [start, end] within {size} tokens: write the file again") from None
    return tuple(bits)


def read_conversations(
    paths: Iterable[Path],
    *,
    max_tokens: int,
    tokenizer: Tokenizer | None = None,
    tell: Callable[[str], None] | None = None,
) -> list[Conversation]:
    """All usable conversations of the files, in order, without repeats, cut to ``max_tokens``.

    Bad lines are left out; ``tell`` (None warns) gets a sentence for the first of them and their number. A last line
    without its newline may still be in the writing, so it is left for the next call. tokenizer: the target's; it
    reads lines of messages, and refuses, with an AlulaError, a file written for another vocabulary.
    """
    bad = BadLines(tell or Watch().tell)
    seen: dict[str, Conversation] = {}
    for path in paths:
        for number, record in read_objects(path, bad, growing=True):
            if tokenizer is not None:
                _check_tokenizer(record, tokenizer, path)
            try:
                conversation = conversation_from_record(record, tokenizer).cut(max_tokens)
            except AlulaError as error:
                bad.add(path, number, error)
                continue
            if len(conversation.tokens) >= _SHORTEST and conversation.learned:
                seen.setdefault(conversation.key, conversation)
    for sentence in bad.summary():
        (tell or Watch().tell)(sentence)
    return list(seen.values())


def _check_tokenizer(record: Mapping[str, Any], tokenizer: Tokenizer, path: Path) -> None:
    ours = vocabulary_hash(tokenizer)
    if record.get("tokenizer", ours) != ours:
        raise AlulaError(f"data file {path} was written for another tokenizer: write it with this model")


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
    import torch

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
