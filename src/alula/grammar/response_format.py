"""OpenAI's `response_format` as structured outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from alula.config import AlulaError
from alula.structured import StructuredOutputsParams

TYPES = ("text", "json_object", "json_schema")


def from_response_format(response_format: Mapping[str, Any] | None, **options: Any) -> StructuredOutputsParams | None:
    """None for plain text. options: further fields, such as `free_until`.

    Raises AlulaError for anything else than one of TYPES, with its schema where it has one.
    """
    kind = "text" if response_format is None else response_format.get("type")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True, **options)
    if kind != "json_schema":
        raise AlulaError(f"response_format.type is {str(kind)[:80]!r}: give one of {', '.join(TYPES)}")
    named = response_format.get("json_schema")
    schema = named.get("schema") if isinstance(named, Mapping) else None
    if not isinstance(schema, (Mapping, bool)):
        raise AlulaError('response_format.json_schema.schema is missing: give {"name": ..., "schema": {...}}')
    return StructuredOutputsParams(json=schema, **options)
