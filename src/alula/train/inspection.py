"""Conversations with their tokens coloured by the loss mask: what is learned, and what is only read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from alula.text.stream import Detokenizer
from alula.train.data import Conversation

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from alula.text import Tokenizer

_LEARNED = ("black on green", "black on bright_green")
_READ = ("grey62", "grey46")
"""Two shades in turn, so that the tokens can be told apart."""


def show(conversations: Iterable[Conversation], tokenizer: Tokenizer, console: Console) -> None:
    """Print them. Without colours what is learned stands in ⟦ ⟧."""
    from rich.rule import Rule

    for number, conversation in enumerate(conversations, 1):
        learned = sum(conversation.mask)
        title = f"conversation {number}: {len(conversation.tokens)} tokens, {learned} learned"
        console.print(Rule(title, align="left"))
        console.print(painted(conversation, tokenizer, colours=console.color_system is not None), soft_wrap=True)


def painted(conversation: Conversation, tokenizer: Tokenizer, *, colours: bool) -> Text:
    """The conversation as styled text, special tokens included."""
    from rich.text import Text

    text = Text()
    place = 0
    for learned, run in groupby(pieces(conversation, tokenizer), key=lambda piece: piece[1]):
        text.append("⟦" if learned and not colours else "")
        for piece, _ in run:
            text.append(piece, (_LEARNED if learned else _READ)[place % 2])
            place += 1
        text.append("⟧" if learned and not colours else "")
    return text


def pieces(conversation: Conversation, tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
    """(text, whether it is learned) token by token; a character of several tokens comes with the last of them."""
    decoder = Detokenizer(tokenizer, skip_special_tokens=False)
    learned = False
    for token, learned in zip(conversation.tokens, conversation.mask, strict=True):
        yield decoder.step(token), learned
    yield decoder.flush(), learned
