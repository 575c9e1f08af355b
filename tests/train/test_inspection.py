"""What `--inspect` shows."""

from __future__ import annotations

import io

from rich.console import Console

from alula.train.data import Conversation
from alula.train.inspection import painted, pieces, show
from tests.train.chat import chat_tokenizer

TOKENIZER = chat_tokenizer()


def conversation(*parts: tuple[str, bool]) -> Conversation:
    tokens, mask = list[int](), list[bool]()
    for text, learned in parts:
        ids = TOKENIZER.encode(text, add_special_tokens=False)
        tokens += ids
        mask += [learned] * len(ids)
    return Conversation(tuple(tokens), tuple(mask))


CHAT = conversation(("<|start|>user\n[b]hi[/b]<|end|>", False), ("Ärger", True), ("<|end|>", True), ("\n", False))


def test_pieces_are_the_whole_text_with_its_mask() -> None:
    found = list(pieces(CHAT, TOKENIZER))
    assert "".join(text for text, _ in found) == "<|start|>user\n[b]hi[/b]<|end|>Ärger<|end|>\n"
    assert "".join(text for text, learned in found if learned) == "Ärger<|end|>"


def test_half_a_character_at_the_end_is_shown() -> None:
    half = Conversation((*CHAT.tokens, TOKENIZER.encode("Ä")[0]), (*CHAT.mask, True))
    assert list(pieces(half, TOKENIZER))[-1] == ("\ufffd", True)


def test_colours_say_what_is_learned_and_neighbours_differ() -> None:
    text = painted(CHAT, TOKENIZER, colours=True)
    styles = [str(span.style) for span in text.spans for _ in text.plain[span.start : span.end]]
    shown = "".join(letter for letter, style in zip(text.plain, styles, strict=True) if "green" in style)
    assert shown == "Ärger<|end|>"
    spans = [str(span.style) for span in text.spans if span.end > span.start]
    assert len(set(spans)) == 4


def test_without_colours_there_are_brackets() -> None:
    out = io.StringIO()
    show([CHAT], TOKENIZER, Console(file=out, width=80))
    shown = out.getvalue()
    assert "conversation 1: 24 tokens, 7 learned" in shown
    assert "<|start|>user\n[b]hi[/b]<|end|>⟦Ärger<|end|>⟧" in shown
