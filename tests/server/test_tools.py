"""Tool calls in text that comes in pieces."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alula.server.tools import Argued, Called, Part, Said, ToolParser

CASES: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "hello world  \n": ("hello world  \n", []),
    "a < b <tool x": ("a < b <tool x", []),
    '<tool_call>\n{"name": "f", "arguments": {"a": "}\\" {", "b": [1, {"c": 2}]}}\n</tool_call>': (
        "",
        [("f", '{"a": "}\\" {", "b": [1, {"c": 2}]}')],
    ),
    'Sure. \n<tool_call>[{"name":"f","arguments":{"x":1}}, {"name":"g"}]</tool_call>\n': (
        "Sure.",
        [("f", '{"x":1}'), ("g", "{}")],
    ),
    '<tool_call>{"arguments": {"x": 1}, "name": "late"}</tool_call> bye ': (" bye", [("late", '{"x": 1}')]),
    '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>': ("", [("f", '{"x": 1}')]),
    '<tool_call>{"name":"f","parameters":{"y": "</tool_call>"}}</tool_call>': ("", [("f", '{"y": "</tool_call>"}')]),
    '<tool_call>{"name":"f","arguments":null}<tool_call>{"name":"g","arguments":[1]}</tool_call>': (
        "",
        [("f", "{}"), ("g", "[1]")],
    ),
    "<tool_call>nonsense</tool_call> x": ("<tool_call>nonsense</tool_call> x", []),
    '<tool_call>{"nam": 3}</tool_call> x': ('<tool_call>{"nam": 3}</tool_call> x', []),
    '<tool_call>{"name": "f", "arguments": {"x": "unfin': ("", [("f", '{"x": "unfin')]),
    '<tool_call>{"na': ('<tool_call>{"na', []),
    '<tool_call>[{"name":"f","arguments":{}}, {bad}]</tool_call> z': ("{bad}]</tool_call> z", [("f", "{}")]),
}


def parsed(pieces: list[str], most: int | None = None) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolParser(most)
    parts: list[Part] = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
    calls: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, Called):
            assert part.index == len(calls)
            calls.append((part.name, ""))
        elif isinstance(part, Argued):
            calls[part.index] = (calls[part.index][0], calls[part.index][1] + part.text)
    assert parser.calls == len(calls)
    return "".join(part.text for part in parts if isinstance(part, Said)), calls


@pytest.mark.parametrize("text", CASES)
def test_what_is_found(text: str) -> None:
    assert parsed([text]) == CASES[text]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(CASES)), st.lists(st.integers(0, 100), max_size=8))
def test_cuts_change_nothing(text: str, cuts: list[int]) -> None:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:stop] for start, stop in pairwise(places)]
    assert parsed(pieces) == CASES[text]


def test_arguments_come_as_they_are_written() -> None:
    parser = ToolParser()
    parser.feed('<tool_call>{"name": "f", "arguments": {"x"')
    assert parser.feed(": [1") == [Argued(0, ": [1")]


def test_further_calls_are_dropped() -> None:
    text = '<tool_call>{"name":"f"}</tool_call>\n<tool_call>{"name":"g","arguments":{"x":1}}</tool_call>'
    assert parsed([text], most=1) == ("", [("f", "{}")])
    assert parsed([text])[1] == [("f", "{}"), ("g", '{"x":1}')]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(max_size=6), json_values, max_size=4), st.booleans())
def test_any_arguments_survive(arguments: dict[str, object], ascii_only: bool) -> None:
    call = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=ascii_only)
    said, calls = parsed([f"<tool_call>{call}</tool_call>"])
    assert said == ""
    assert [name for name, _ in calls] == ["f"]
    assert json.loads(calls[0][1]) == arguments
