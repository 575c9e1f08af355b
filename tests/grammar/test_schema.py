"""What is finished is valid, whatever the schema; and a schema that asks for more than can be kept is refused."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from alula.config import AlulaError
from alula.grammar import Grammars
from alula.structured import StructuredOutputsParams
from tests.grammar.support import PERSON, fits, json_like, walk

ONE = {"enum": [1]}
NODE = {"type": "object", "properties": {"v": ONE, "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}}
KEPT: dict[str, Any] = {
    "person": PERSON,
    "any value": True,
    "any object": {"type": "object"},
    "no type": {"properties": {"a": ONE}, "required": ["a"]},
    "limits without a type": {"minimum": 3, "maximum": 8},
    "keywords of two types": {"maximum": 8, "maxLength": 2},
    "types": {"type": ["integer", "null"]},
    "types with limits": {"type": ["integer", "string"], "minimum": 5, "maxLength": 3},
    "limits": {"type": "integer", "exclusiveMinimum": -3, "maximum": 12},
    "real limits": {"type": "number", "minimum": 1.5, "maximum": 3.25},
    "multiples": {"type": "integer", "multipleOf": 7},
    "lengths": {"type": "string", "minLength": 2, "maxLength": 4},
    "length in characters": {
        "type": "array",
        "items": {"type": "string", "minLength": 3, "maxLength": 3},
        "maxItems": 2,
    },
    "pattern": {"type": "string", "pattern": "^[a-c]{2}-[0-9]+$"},
    "pattern at the end": {"type": "string", "pattern": "[0-9]$"},
    "alternatives": {"type": "string", "pattern": "^a|b$"},
    "anything but": {"type": "string", "pattern": "^[^a]{1,4}$"},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "array": {"type": "array", "items": ONE, "minItems": 1, "maxItems": 2},
    "tuple": {"type": "array", "prefixItems": [ONE, {"enum": ["a"]}], "minItems": 2},
    "tuple and more": {"type": "array", "prefixItems": [ONE], "items": {"type": "boolean"}},
    "not more": {"type": "array", "prefixItems": [ONE], "items": False},
    "more properties": {"type": "object", "properties": {"a": ONE}, "additionalProperties": {"enum": [2]}},
    "counted properties": {"type": "object", "properties": {"a": ONE, "b": ONE, "c": ONE}, "minProperties": 2},
    "few properties": {"type": "object", "properties": {"a": ONE, "b": ONE, "c": ONE}, "maxProperties": 1},
    "names by pattern": {"type": "object", "patternProperties": {"^a+$": ONE}, "additionalProperties": False},
    "any of": {"anyOf": [{"type": "integer"}, {"type": "boolean"}]},
    "one of types": {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 2}]},
    "one of values": {"oneOf": [{"enum": [1, 2]}, {"const": "a"}]},
    "told apart": {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": "a"}, "v": ONE}, "required": ["k"]},
            {"type": "object", "properties": {"k": {"const": "b"}, "v": ONE}, "required": ["k"]},
        ]
    },
    "all of one": {"allOf": [{"type": "integer", "maximum": 5}], "title": "small"},
    "const": {"const": {"a": [1, 'x"\n', None]}},
    "typed values": {"type": ["string", "null"], "enum": ["a", 'q"\\', "ü", None]},
    "list of nodes": {"$defs": {"n": {**NODE, "required": ["v", "next"]}}, "$ref": "#/$defs/n"},
    "pointer anywhere": {
        "type": "object",
        "properties": {"a": ONE, "b": {"$ref": "#/properties/a"}},
        "required": ["b"],
    },
    "itself": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
    "odd names": {
        "type": "object",
        "properties": {'a"b': ONE, "c/d~": {"$ref": '#/properties/a"b'}},
        "required": ["c/d~"],
    },
    "notes": {"type": "integer", "title": "t", "description": "d", "default": 0, "x-more": 1, "maximum": 9},
}
REFUSED: dict[str, tuple[Any, str]] = {
    "not": ({"not": {"type": "string"}}, "not cannot be enforced"),
    "if": ({"type": "object", "properties": {"a": {"if": {}, "then": ONE}}}, "#/properties/a: if cannot"),
    "unique": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "contains": ({"type": "array", "contains": ONE}, "contains"),
    "large multiples": ({"type": "integer", "multipleOf": 1025}, "multipleOf"),
    "multiples of a part": ({"type": "integer", "multipleOf": 1.5}, "multipleOf"),
    "fewer than none": ({"type": "array", "minItems": -1}, "minItems"),
    "shorter than nothing": ({"type": "string", "maxLength": -1}, "maxLength"),
    "part of an item": ({"type": "array", "maxItems": 1.5}, "maxItems"),
    "a number beyond 64 bits": ({"const": [{"a": 2**63}]}, "64 bits"),
    "no number": ({"enum": [float("inf")]}, "finite"),
    "a reference that is no text": ({"$ref": []}, "$ref is []"),
    "a place before the first": ({"anyOf": [{"type": "null"}, {"$ref": "#/anyOf/-2"}]}, "points nowhere"),
    "types that are no texts": ({"oneOf": [{"type": [[]]}, {"type": "string"}]}, "oneOf"),
    "multiples in limits": ({"type": "integer", "multipleOf": 2, "minimum": 1}, "multipleOf"),
    "multiples of a real": ({"type": "number", "multipleOf": 0.5}, "multipleOf"),
    "all of two": ({"allOf": [{"minimum": 1}, {"maximum": 2}]}, "allOf of several"),
    "one of the same": ({"oneOf": [{"enum": [1, 2]}, {"enum": [2.0, 3]}]}, "oneOf"),
    "one of alike": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    "one of objects": ({"oneOf": [{"properties": {"a": ONE}}, {"properties": {"b": ONE}}]}, "oneOf"),
    "beside a reference": ({"$defs": {"n": {}}, "$ref": "#/$defs/n", "maximum": 3}, "combined with maximum"),
    "beside any of": ({"anyOf": [ONE], "required": ["k"]}, "combined with required"),
    "values of another type": ({"type": "string", "enum": ["a", 1]}, "not of its type"),
    "undeclared": ({"type": "object", "properties": {"a": ONE}, "required": ["z"]}, "'z'"),
    "a pattern and a length": ({"pattern": "^a+$", "maxLength": 3}, "length"),
    "a pattern with quotes": ({"pattern": '^"$'}, "escaped form"),
    "a pattern with tabs": ({"pattern": r"^[\t]$"}, "escaped form"),
    "look-ahead": ({"pattern": "^(?!a).*$"}, "not supported"),
    "two patterns": ({"patternProperties": {"^a": ONE, "^b": ONE}}, "patternProperties"),
    "free names, counted": ({"type": "object", "minProperties": 2}, "minProperties"),
    "elsewhere": ({"$ref": "http://x.y/z"}, "pointer into this schema"),
    "nowhere": ({"$ref": "#/$defs/none"}, "points nowhere"),
    "a circle": ({"$ref": "#"}, "nothing but each other"),
    "nothing": (False, "allows nothing"),
    "no such type": ({"type": "strnig"}, "type is"),
    "no values": ({"enum": []}, "at least one"),
    "a list": ({"type": "array", "items": [ONE]}, "give an object"),
    "crossed limits": ({"type": "integer", "minimum": 5, "maximum": 3}, "greater than"),
    "draft 4": ({"type": "integer", "minimum": 5, "exclusiveMinimum": True}, "give a number"),
    "too deep": (json.loads('{"items":' * 80 + "{}" + "}" * 80), "nested"),
}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("tight", [False, True], ids=["spaced", "tight"])
def test_what_is_finished_is_valid(made: Grammars, name: str, tight: bool) -> None:
    check_outputs(made, KEPT[name], random.Random(name), tries=15, disable_any_whitespace=tight)


def check_outputs(made: Grammars, schema: Any, rng: random.Random, tries: int, **options: bool) -> None:
    compiled = made.compile(json_like(schema, **options))
    finished = [walk(made.state(compiled), rng) for _ in range(tries)]
    texts = [text for text in finished if text is not None]
    assert texts
    for text in texts:
        Draft202012Validator(schema).validate(json.loads(text))


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_is_refused_with_its_place(made: Grammars, name: str) -> None:
    schema, reason = REFUSED[name]
    with pytest.raises(AlulaError, match=r"structured_outputs\.json") as caught:
        made.compile(json_like(schema))
    assert reason in str(caught.value)


def schemas(depth: int) -> st.SearchStrategy[Any]:
    small = st.integers(0, 3)
    leaves = st.one_of(
        st.just({"type": "boolean"}),
        st.builds(lambda a, b: {"type": "integer", "minimum": a - 2, "maximum": a + b}, small, small),
        st.builds(lambda a, b: {"type": "string", "minLength": a, "maxLength": a + b}, small, small),
        st.builds(lambda a: {"type": "string", "pattern": f"^[a-d]{{{a},5}}$"}, small),
        st.lists(st.sampled_from([1, "a", None, True, 'ü"']), min_size=1, max_size=3).map(lambda v: {"enum": v}),
    )
    if not depth:
        return leaves
    inner = schemas(depth - 1)
    properties = st.dictionaries(st.sampled_from(["a", "b", 'c"', "é"]), inner, max_size=3)
    return st.one_of(
        leaves,
        st.builds(lambda items, n: {"type": "array", "items": items, "minItems": n, "maxItems": n + 1}, inner, small),
        st.builds(
            lambda p, more: {"type": "object", "properties": p, "required": sorted(p)[:1], **more},
            properties,
            st.sampled_from([{}, {"additionalProperties": ONE}, {"additionalProperties": False}]),
        ),
        st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner),
        st.builds(lambda a, b: {"oneOf": [a, b]}, inner, inner),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(schema=schemas(2), seed=st.integers(0, 1000))
def test_random_schemas(made: Grammars, schema: Any, seed: int) -> None:
    error = made.submit(json_like(schema)).exception()
    if error is None:
        check_outputs(made, schema, random.Random(seed), tries=6)
    else:
        assert isinstance(error, AlulaError) and "oneOf" in str(error)


def test_whitespace_is_bounded_and_may_be_left_out(made: Grammars) -> None:
    schema = {"type": "object", "properties": {"a": ONE, "b": ONE}, "required": ["a", "b"]}
    loose = made.compile(json_like(schema))
    assert fits(loose, '{"a":1,"b":1}') and fits(loose, '{\n  "a": 1,\n  "b": 1\n}')
    assert fits(loose, '{"a":' + " " * 12 + '1,"b":1}') and not fits(loose, '{"a":' + " " * 13 + '1,"b":1}')
    tight = made.compile(json_like(schema, disable_any_whitespace=True))
    assert fits(tight, '{"a": 1, "b": 1}') and not fits(tight, '{"a":  1, "b": 1}')


def test_a_free_object_takes_anything_and_a_json_object_is_one(made: Grammars) -> None:
    for wanted in (StructuredOutputsParams(json_object=True), json_like({"type": "object"})):
        compiled = made.compile(wanted)
        assert fits(compiled, '{"a": {"b": [1, {"c": null}]}}') and fits(compiled, "{}")
        assert not fits(compiled, "[]") and not fits(compiled, "1")


def test_control_characters_stay_out_of_strings_with_a_length(made: Grammars) -> None:
    compiled = made.compile(json_like({"type": "string", "minLength": 1, "maxLength": 4000}))
    assert fits(compiled, '"ü"') and not any(fits(compiled, f'"{chr(code)}"') for code in range(32))


def test_patterns_match_anywhere_unless_anchored(made: Grammars) -> None:
    for pattern, text, holds in [
        ("b", '"abc"', True),
        ("^b", '"abc"', False),
        ("^b", '"bc"', True),
        ("b$", '"bc"', False),
        ("b$", '"ab"', True),
        ("a|c", '"bcb"', True),
        ("^a$|^c$", '"a"', True),
        ("^a$|^c$", '"ab"', False),
        (r"\$$", '"a$"', True),
    ]:
        assert fits(made.compile(json_like({"type": "string", "pattern": pattern})), text) == holds, (pattern, text)


def test_whole_numbers_may_be_written_as_fractions(made: Grammars) -> None:
    made.compile(json_like({"type": "array", "minItems": 2.0, "maxItems": 3.0}))


def test_schemas_that_refer_to_each_other_in_many_ways_are_compared_once(made: Grammars) -> None:
    """Compared along every path, 30 levels of two references each would take years."""
    both = {str(n): _two_references(n + 1) for n in range(30)} | {"30": {"type": "string"}}
    twice = {"oneOf": [{"$ref": "#/$defs/0"}, {"$ref": "#/$defs/0"}], "$defs": both}
    with pytest.raises(AlulaError, match="may both fit"):
        made.compile(json_like(twice))
    one, other = (
        {"type": "object", "properties": {"x": {"$ref": f"#/$defs/{name}"}}, "required": ["x"]} for name in "ab"
    )
    circle = {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": one, "b": other}}
    with pytest.raises(AlulaError, match="may both fit"):
        made.compile(json_like(circle))


def _two_references(target: int) -> dict[str, object]:
    reference = {"$ref": f"#/$defs/{target}"}
    return {"type": "object", "properties": {"x": reference, "y": reference}, "required": ["x", "y"]}
