"""Which tokens of a conversation are the assistant's: the chat template is asked, whatever it looks like.

A template that marks generated text (``{% generation %}``) says it. Any other is rendered once more per answer with a
mark in the answer's place: what stands before and after the mark is the template's, what is between in the real text
is the answer. The end-of-turn token, which the model has to say too, belongs to the answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from alula.config import AlulaError
from alula.train.sources import Message

if TYPE_CHECKING:
    from alula.text import Tokenizer

Span = tuple[int, int]
"""From the first index to the one after the last."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE: list[Message] = [
    {"role": "user", "content": "Which is the first letter?"},
    {"role": "assistant", "content": "It is A."},
]


def find_answers(tokenizer: Tokenizer, messages: Sequence[Message]) -> tuple[list[int], list[Span]]:
    """(tokens, spans of the answers in them, each with its end of turn). Answers the template leaves out have none.

    Raises AlulaError where the template refuses the messages or does not show where the answers stand.
    """
    text = tokenizer.render_chat(messages, add_generation_prompt=False)
    marked = _GENERATION.search(tokenizer.chat_template or "") is not None
    places = _told(tokenizer, messages) if marked else _sought(tokenizer, messages, text)
    encoding = tokenizer.backend.encode(text, add_special_tokens=False)
    spans = [_token_span(tokenizer, encoding.ids, encoding.offsets, place) for place in places]
    return list(encoding.ids), [(start, end) for start, end in spans if start < end]


def turn_ends(tokenizer: Tokenizer) -> frozenset[int]:
    """Tokens that may end a turn: the special ones, and the end token where it is not marked as special."""
    return tokenizer.special_ids if tokenizer.eos_id is None else tokenizer.special_ids | {tokenizer.eos_id}


def check_template(tokenizer: Tokenizer) -> None:
    """Raises AlulaError for a chat template in which answers cannot be found, before any work is done."""
    tokens, spans = find_answers(tokenizer, _PROBE)
    found = tokenizer.decode([token for start, end in spans for token in tokens[start:end]])
    if _PROBE[1]["content"] not in found:
        raise AlulaError(
            "the model's chat template does not show which tokens are the assistant's: put {% generation %} and "
            "{% endgeneration %} around its answers"
        )


def _told(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[Span]:
    """Characters that the template's own markers enclose."""
    from transformers.utils.chat_template_utils import render_jinja_template

    names: dict[str, Any] = {"return_assistant_tokens_mask": True, **tokenizer.special_tokens}
    rendered: Any = render_jinja_template(
        conversations=[list(messages)], chat_template=tokenizer.chat_template, add_generation_prompt=False, **names
    )
    return [(int(start), int(end)) for start, end in rendered[1][0]]


def _sought(tokenizer: Tokenizer, messages: Sequence[Message], text: str) -> list[Span]:
    """Characters of each answer, from one more rendering per answer."""
    mark = "answermark"
    while mark in text:
        mark += "x"
    return [
        _place(tokenizer, messages, index, text, mark)
        for index, message in enumerate(messages)
        if message["role"] == "assistant"
    ]


def _place(tokenizer: Tokenizer, messages: Sequence[Message], index: int, text: str, mark: str) -> Span:
    swapped = [*messages[:index], {**messages[index], "content": mark}, *messages[index + 1 :]]
    before, found, after = tokenizer.render_chat(swapped, add_generation_prompt=False).partition(mark)
    if found and mark not in after and text.endswith(after):
        end = len(text) - len(after)
        if text.startswith(before) and len(before) <= end:
            return len(before), end
        # A template may write something of its own only for answers without reasoning: then the prompt says it.
        prompt = tokenizer.render_chat(messages[:index]) if index else ""
        if prompt and text.startswith(prompt) and len(prompt) <= end:
            return len(prompt), end
    raise AlulaError(
        f"the model's chat template does not show where the answer in message {index} stands, so nothing can be "
        "learned from it"
    )


def _token_span(tokenizer: Tokenizer, ids: Sequence[int], offsets: Sequence[Span], place: Span) -> Span:
    """Tokens that begin inside the characters, and the end of turn behind them."""
    first, last = place
    start = next((i for i, (begin, _) in enumerate(offsets) if begin >= first), len(ids))
    end = next((i for i in range(start, len(ids)) if offsets[i][0] >= last), len(ids))
    if start == end or ids[end - 1] in turn_ends(tokenizer):
        return start, end
    if end < len(ids) and ids[end] in turn_ends(tokenizer):
        return start, end + 1
    spaced = end + 1 < len(ids) and not tokenizer.decode([ids[end]]).strip()
    return (start, end + 2) if spaced and ids[end + 1] == tokenizer.eos_id else (start, end)
