"""Structured output over draft trees: what each node may still be, and nothing that its path does not allow."""

from __future__ import annotations

from alula.grammar.compiler import Grammars, TooManyForms
from alula.grammar.response_format import from_response_format
from alula.grammar.state import GrammarState

__all__ = ["GrammarState", "Grammars", "TooManyForms", "from_response_format"]
