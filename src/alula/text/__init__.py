"""Between text and token ids: tokenizer, chat template, streamed text, stop strings."""

from __future__ import annotations

from alula.text.stream import Detokenizer, TextStream
from alula.text.tokenizer import Tokenizer

__all__ = ["Detokenizer", "TextStream", "Tokenizer"]
