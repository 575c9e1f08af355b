"""The form an answer must have: a `response_format`, `structured_outputs`, or a tool that must be called."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from alula.config import AlulaError
from alula.grammar import from_response_format
from alula.server.errors import ApiError
from alula.server.protocol import GenerationBody, Tool
from alula.structured import StructuredOutputsParams


def structured_outputs(body: GenerationBody, forced: Sequence[Tool] = ()) -> StructuredOutputsParams | None:
    """forced: tools one of which must be called. Raises ApiError for what cannot be one form."""
    asked = [name for name in ("response_format", "structured_outputs") if _asks(body, name)]
    if len(asked) + bool(forced) > 1:
        names = " and ".join([*asked, "tool_choice"][:2])
        raise ApiError(400, f"{asked[0]}: {names} both say what the answer looks like, so give one", param=asked[0])
    if body.free_until is not None and asked != ["response_format"]:
        raise ApiError(
            400,
            "free_until needs a response_format of type json_object or json_schema: give one, or leave it out",
            param="free_until",
        )
    try:
        if forced:
            return StructuredOutputsParams(json=call_schema(forced))
        if body.structured_outputs is not None:
            given = body.structured_outputs.model_dump(by_alias=True)
            choice = given.pop("choice")
            return StructuredOutputsParams(**given, choice=None if choice is None else tuple(choice))
        if body.response_format is not None:
            wanted = body.response_format.model_dump(by_alias=True)
            return from_response_format(wanted, free_until=body.free_until)
    except AlulaError as error:
        field = form_field(body)
        raise ApiError(400, in_clients_words(str(error), field), param=field) from None
    return None


def in_clients_words(message: str, field: str) -> str:
    """Forms are structured outputs to the engine, whichever field asked for them."""
    return message if field == "structured_outputs" else re.sub(r"structured_outputs(\.json\b)?", field, message)


def form_field(body: GenerationBody) -> str:
    """The field that a form which cannot be compiled came from."""
    asked = [name for name in ("response_format", "structured_outputs") if _asks(body, name)]
    return asked[0] if asked else "tools"


def _asks(body: GenerationBody, name: str) -> bool:
    value = getattr(body, name)
    return value is not None and getattr(value, "type", None) != "text"


def call_schema(tools: Sequence[Tool]) -> dict[str, Any]:
    """A JSON schema of one call of one of the tools, as it stands between the markers."""
    places = [f"/anyOf/{number}" if len(tools) > 1 else "" for number in range(len(tools))]
    calls = [_call(tool, f"#{place}/properties/arguments") for tool, place in zip(tools, places, strict=True)]
    return {"anyOf": calls} if len(calls) > 1 else calls[0]


def _call(tool: Tool, place: str) -> dict[str, Any]:
    own = tool.function.parameters or {"type": "object"}
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "arguments": _moved(own, place)},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    """With its references into itself, given that it now lies at this place of another schema."""
    if isinstance(schema, list):
        return [_moved(entry, place) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _moved(value, place) for key, value in schema.items()}
    reference = found.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        found["$ref"] = place + reference.removeprefix("#")
    return found
