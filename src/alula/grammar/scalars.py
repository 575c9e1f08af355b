"""What a schema says of texts, numbers and counts, as the grammar library keeps to it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from alula.config import AlulaError
from alula.grammar.regex import rewrite_regex

Schema = dict[str, Any]

LARGEST_FACTOR = 1024
"""Of `multipleOf`; beyond it the library takes any number."""
OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_FORMATS = (
    *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "json-pointer"),
    *("uri", "uri-reference", "uri-template", "relative-json-pointer"),
)


def refused(at: str, reason: str) -> AlulaError:
    return AlulaError(f"structured_outputs.json at {at}: {reason}")


def text_schema(node: Mapping[str, Any], at: str) -> Schema:
    schema: Schema = {"type": "string", **counts(node, ("minLength", "maxLength"), at)}
    if "pattern" in node:
        if len(schema) > 1:
            raise refused(at, "pattern cannot be combined with a length: write the length as {m,n} in it")
        if not isinstance(node["pattern"], str):
            raise refused(at, "pattern is no text: give a regular expression")
        field = f"structured_outputs.json at {at}: pattern"
        return {**schema, "pattern": f"^{rewrite_regex(node['pattern'], field, in_json=True)}$"}
    if len(schema) == 1 and node.get("format") in _FORMATS:
        schema["format"] = node["format"]
    return schema


def number_schema(kind: str, node: Mapping[str, Any], at: str) -> Schema:
    schema: Schema = {"type": kind, **{name: node[name] for name in OF_NUMBERS if name in node}}
    for name, value in schema.items():
        if name != "type" and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise refused(at, f"{name} is {json.dumps(value)[:60]}: give a number")
        if name != "type":
            check_written(value, name, at)
    if "multipleOf" in schema:
        if kind != "integer" or len(schema) > 2:
            raise refused(at, "multipleOf can be enforced for integers without limits only: leave out one of them")
        factor = schema["multipleOf"] = _whole_number(schema["multipleOf"])
        if factor is None or not 0 < factor <= LARGEST_FACTOR:
            raise refused(at, f"multipleOf can be enforced up to {LARGEST_FACTOR}: give a whole number from 1")
    return schema


def counts(node: Mapping[str, Any], names: tuple[str, ...], at: str) -> Schema:
    """Those that are there. The library takes some negative ones for no limit at all."""
    found: Schema = {}
    for name in names:
        if name in node:
            count = found[name] = _whole_number(node[name])
            if count is None or count < 0:
                raise refused(at, f"{name} is {json.dumps(node[name])[:60]}: give a whole number of at least 0")
    return found


def _whole_number(value: Any) -> int | None:
    """2.0 is one too, as the standard has it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return int(value) if isinstance(value, int) or value.is_integer() else None


def check_written(value: Any, name: str, at: str) -> None:
    """The library reads whole numbers beyond 64 bits as fractions, and others than JSON's not at all."""
    for each in _numbers(value):
        if isinstance(each, int) and not -(2**63) <= each < 2**63:
            raise refused(at, f"{name} holds {str(each)[:60]}: whole numbers can be enforced up to 64 bits")
        if isinstance(each, float) and not math.isfinite(each):
            raise refused(at, f"{name} holds {each}, which is no JSON: give a finite number")


def _numbers(value: Any) -> Iterator[int | float]:
    if isinstance(value, (Mapping, list)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers(each)
    elif isinstance(value, (int, float)):
        yield value
