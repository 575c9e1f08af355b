"""A mix of requests, always the same for a seed: lengths, temperatures, schemas, penalties, samples."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from alula.bench.tasks import read_prompts

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LENGTHS = {"short": 0.5, "medium": 0.35, "long": 0.15}
"""Shares of prompts as they are, of 300 to 1,000 characters, and of 1,500 to 3,500."""
SCHEMA_SHARE = 0.25
JSON_TOKENS = 120
"""Least `max_tokens` of an answer that is JSON, so that most of them end."""


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_TEXT = {"type": "string", "maxLength": 24}
_COUNT = {"type": "integer", "minimum": 0, "maximum": 999}
SCHEMAS: dict[str, dict[str, Any]] = {
    "bird": _object(name=_TEXT, wings=_COUNT, flies={"type": "boolean"}),
    "verdict": _object(
        answer={"enum": ["yes", "no", "unknown"]}, certainty={"type": "integer", "maximum": 5, "minimum": 0}
    ),
    "list": _object(items={"type": "array", "items": _TEXT, "minItems": 1, "maxItems": 3}),
    "nested": _object(who=_object(first=_TEXT, last=_TEXT), age={"anyOf": [_COUNT, {"type": "null"}]}),
    "code": _object(id={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}, kind={"const": "part"}),
}


@dataclass(frozen=True)
class Job:
    """schema: what its answers must fit, where they are JSON."""

    number: int
    path: str
    body: Mapping[str, Any]
    schema: Mapping[str, Any] | None = None


def mix(count: int, *, seed: int = 0, max_tokens: int = 64) -> list[Job]:
    """The same jobs for the same arguments, on any machine; the first ones do not depend on how many there are."""
    return [_job(number, random.Random(f"{seed}/{number}"), max_tokens) for number in range(count)]


def without_speculation(job: Job) -> Job:
    return Job(job.number, job.path, {**job.body, "speculation": {"off": True}}, job.schema)


def _job(number: int, rng: random.Random, max_tokens: int) -> Job:
    text = _prompt(rng)
    body: dict[str, Any] = {
        "seed": rng.randrange(2**31),
        "max_tokens": rng.randint(min(8, max_tokens), max_tokens),
        "temperature": rng.choice([0.0, 0.0, 0.5, 0.8, 1.0, 1.3]),
        "n": rng.choice([1, 1, 1, 1, 2, 3]),
        "stream": True,
        "return_token_ids": True,
        **rng.choice(_CUTS),
        **rng.choice(_PENALTIES),
    }
    chat = rng.random() < 0.7
    body |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    schema = None
    if rng.random() < SCHEMA_SHARE:
        schema, form = _form(rng)
        body |= {"response_format": form, "max_tokens": max(body["max_tokens"], JSON_TOKENS)}
    return Job(number, CHAT if chat else COMPLETIONS, body, schema)


_CUTS: list[dict[str, Any]] = [{}, {}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.95}]
_PENALTIES: list[dict[str, Any]] = [
    {},
    {},
    {},
    {"frequency_penalty": 0.6},
    {"presence_penalty": 0.8},
    {"repetition_penalty": 1.15},
    {"frequency_penalty": 0.3, "repetition_penalty": 1.05},
]


def _form(rng: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """A schema, and the response_format that asks for it."""
    if rng.random() < 0.15:
        return {"type": "object"}, {"type": "json_object"}
    name = rng.choice(sorted(SCHEMAS))
    return SCHEMAS[name], {"type": "json_schema", "json_schema": {"name": name, "schema": SCHEMAS[name]}}


def _prompt(rng: random.Random) -> str:
    kind = rng.choices(list(LENGTHS), list(LENGTHS.values()))[0]
    if kind == "short":
        return rng.choice(_texts("default") + _texts("forms"))
    text = rng.choice(_texts("summaries"))
    size = rng.randint(300, 1000) if kind == "medium" else rng.randint(1500, 3500)
    start = rng.choice([0, 0, rng.randrange(max(len(text) - size, 1))])
    return f"{text[start : start + size]}\n\nWhat is this about?"


@cache
def _texts(name: str) -> list[str]:
    return read_prompts(name)
