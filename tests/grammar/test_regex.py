"""Regular expressions mean what they mean elsewhere, or are refused."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from xgrammar import GrammarMatcher

from alula.config import AlulaError
from alula.grammar import Grammars
from alula.structured import StructuredOutputsParams
from tests.grammar.support import fits, walk

REFUSED = {
    r"a^b": "anchor",
    r"a$b": "anchor",
    r"x(a|^b)": "anchor",
    r"(?=a)b": "not supported",
    r"(?<!a)b": "not supported",
    r"(?i)a": "not supported",
    r"(?P<n>a)": "not supported",
    r"(?>a)": "not supported",
    r"(a)\1": "spell out",
    r"\Aa\Z": "spell out",
    r"[\h]": "spell out",
    r"\ba": "spell out",
    r"(a": "not closed",
    r"a{3,1}": "larger than",
    r"*a": "cannot be compiled",
    "(" * 17 + "a" + ")" * 17: "deep",
}


@pytest.mark.parametrize("pattern", REFUSED)
def test_what_would_be_misread_is_refused(made: Grammars, pattern: str) -> None:
    with pytest.raises(AlulaError, match=r"structured_outputs\.regex") as caught:
        made.compile(StructuredOutputsParams(regex=pattern))
    assert REFUSED[pattern] in str(caught.value)


@pytest.mark.parametrize("pattern", [r"\W", r"\S", r"\D", r"[\W]", r"[\D0]", r"[\S^]", r"[^\w]", "."])
def test_half_characters_match_nothing(made: Grammars, pattern: str) -> None:
    """Half of a surrogate pair, written as three bytes, is no UTF-8: the answer would hold replacement characters."""
    compiled = made.compile(StructuredOutputsParams(regex=pattern))
    assert GrammarMatcher(compiled).accept_string("€")
    assert not GrammarMatcher(compiled).accept_string(b"\xed\xa0\x80")


def test_what_stands_beside_a_class_in_a_class(made: Grammars) -> None:
    for pattern, fitting in ((r"[\D^7-9]", "a^7_9€"), (r"[\^a]", "a^"), (r"[\x5e-`]", "^_"), (r"[\^]", "^")):
        compiled = made.compile(StructuredOutputsParams(regex=pattern))
        assert "".join(char for char in "0a^7_9€6" if GrammarMatcher(compiled).accept_string(char)) == fitting


def joined(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.lists(parts, min_size=1, max_size=3).map("".join),
        st.lists(parts, min_size=2, max_size=3).map(lambda p: "(?:" + "|".join(p) + ")"),
        st.tuples(parts, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "*?"])).map(lambda p: f"(?:{p[0]}){p[1]}"),
    )


ATOMS = st.sampled_from(
    [
        "a",
        "b",
        "é",
        "日",
        ".",
        "[ab]",
        "[^a]",
        "[a-c]",
        r"\.",
        r"\d",
        r"[\w-]",
        r"\n",
        r"\x41",
        r"\u0062",
        r"[^\x41-\x43]",
    ]
)
PATTERNS = st.recursive(ATOMS, joined, max_leaves=5)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(pattern=PATTERNS, anchors=st.sampled_from(["{}", "^{}$", "(?:^{}$)"]), seed=st.integers(0, 1000))
def test_random_patterns_match_as_elsewhere(made: Grammars, pattern: str, anchors: str, seed: int) -> None:
    pattern = anchors.format(f"(?:{pattern})")
    compiled, rng = made.compile(StructuredOutputsParams(regex=pattern)), random.Random(seed)
    python = re.compile(re.sub(r"(?<!\\)\.", r"[^\\r\\n]", pattern), re.ASCII)
    for _ in range(4):
        text = walk(made.state(compiled), rng, limit=60)
        assert text is None or python.fullmatch(text.decode())
    for text in ("", "a", "b", "é", "日", "ab", "aa", "abb", "é日", "A", "\n", ".", "-", "9b", "aba", "bbbb"):
        assert fits(compiled, text) == bool(python.fullmatch(text)), text


def test_digits_after_a_code_are_characters_of_their_own(made: Grammars) -> None:
    compiled = made.compile(StructuredOutputsParams(regex=r"\x41a\u00e9f[\x42c]"))
    assert fits(compiled, "AaéfB") and fits(compiled, "Aaéfc") and not fits(compiled, "\u041aéfB")
