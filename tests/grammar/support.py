"""Grammars over the byte tokenizer, random walks through them, and an independent reading of masks."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch
from xgrammar import CompiledGrammar, GrammarMatcher, allocate_token_bitmask

from alula.grammar import Grammars, GrammarState
from alula.structured import StructuredOutputsParams
from alula.text import Tokenizer
from tests.engine.tiny import EOS, VOCAB, _byte_tokenizer

USER, ASSISTANT = 257, 258
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "ü"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
}
_LIKELY = b'"}],:0123456789abtrue{['


def byte_tokenizer() -> Tokenizer:
    return Tokenizer(_byte_tokenizer().backend_tokenizer)


def grammars(**limits: int) -> Grammars:
    return Grammars(byte_tokenizer(), VOCAB, (EOS,), **limits)


def bytes_of(tokens: Sequence[int]) -> bytes:
    """The text of byte tokens, whole characters or not; special tokens have none."""
    letters = {token: letter for letter, token in _byte_tokenizer().backend_tokenizer.get_vocab().items()}
    table = {chr(code): bytes([byte]) for byte, code in _alphabet().items()}
    return b"".join(table[letters[token]] for token in tokens if token < 256)


def _alphabet() -> dict[int, int]:
    """The byte-level alphabet of GPT-2: printable bytes stand for themselves, the others for code points above 255."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    codes = {byte: byte for byte in plain}
    others = [byte for byte in range(256) if byte not in codes]
    return codes | {byte: 256 + i for i, byte in enumerate(others)}


def allowed(mask: torch.Tensor) -> list[int]:
    bits = np.unpackbits(mask.numpy().astype("<i4").view(np.uint8), bitorder="little")[:VOCAB]
    return np.flatnonzero(bits).tolist()


def replayed(compiled: CompiledGrammar, tokens: Sequence[int]) -> list[int]:
    """What a fresh matcher allows after these tokens; only the end after an end."""
    if EOS in tokens:
        return [EOS]
    matcher, mask = GrammarMatcher(compiled), allocate_token_bitmask(1, VOCAB)
    assert all(matcher.accept_token(token) for token in tokens)
    matcher.fill_next_token_bitmask(mask)
    return allowed(mask[0])


def walk(state: GrammarState, rng: random.Random, limit: int = 300) -> bytes | None:
    """A random output up to EOS; None where it did not end, or nothing was allowed."""
    tokens: list[int] = []
    likely = set(byte_tokenizer().encode(_LIKELY.decode()))
    for _ in range(limit):
        choices = allowed(state.mask(()))
        if EOS in choices and (len(choices) == 1 or rng.random() < 0.5):
            return bytes_of(tokens)
        choices = [token for token in choices if token != EOS]
        if not choices:
            return None
        usual = [token for token in choices if token in likely]
        tokens.append(rng.choice(usual if usual and rng.random() < 0.9 else choices))
        state.advance(tokens[-1:])
    return None


def fits(compiled: CompiledGrammar, text: str | bytes) -> bool:
    """Whether the text may be a whole output."""
    matcher, mask = GrammarMatcher(compiled), allocate_token_bitmask(1, VOCAB)
    if not matcher.accept_string(text):
        return False
    matcher.fill_next_token_bitmask(mask)
    return EOS in allowed(mask[0])


def json_like(schema: object, **options: object) -> StructuredOutputsParams:
    return StructuredOutputsParams(json=schema, **options)  # type: ignore[arg-type]
