"""What is wrong with a body that does not fit, as a sentence about its field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest

from alula.server.errors import ApiError

_BODY = "the body"
_NO_JSON = f"{_BODY} is not valid JSON in UTF-8"
_KNOWN = {404: "there is no {path} here: see /openapi.json", 405: "{path} takes no {method}: see /openapi.json"}


def invalid_body(http: HttpRequest, error: RequestValidationError) -> ApiError:
    """Names the field that a client sent, not the names that pydantic has for the alternatives of a union."""
    errors = error.errors()
    if errors[0]["type"] == "json_invalid":
        reason = errors[0]["ctx"]["error"]
        return ApiError(400, f"{_NO_JSON} ({reason} at character {errors[0]['loc'][-1]}): correct it")
    if isinstance(error.body, bytes):
        kind = http.headers.get("content-type", "none")[:80]
        return ApiError(400, f"{_BODY} has Content-Type {kind!r}: send JSON, as Content-Type: application/json")
    places = [_place(entry, error.body) for entry in errors]
    # Of several alternatives that fail, the one that went furthest is what the client meant.
    where = max(places, key=len)
    first = errors[places.index(where)]
    name, param = ".".join(map(str, where)) or _BODY, str(where[0]) if where else None
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{name} is not supported here: leave it out", param=param)
    reasons = dict.fromkeys(_reason(entry) for entry, place in zip(errors, places, strict=True) if place == where)
    return ApiError(400, f"{name}: {', or '.join(reasons)}", param=param)


def plain_error(http: HttpRequest, error: HTTPException) -> ApiError:
    """What the framework says, in more words where it says little."""
    detail, path = str(error.detail), repr(http.url.path[:200])
    if error.status_code in _KNOWN:
        detail = _KNOWN[error.status_code].format(path=path, method=http.method)
    elif error.status_code == 400:
        packed = http.headers.get("content-encoding")
        detail = f"{_NO_JSON}: " + ("send it without Content-Encoding" if packed else "correct it")
    return ApiError(error.status_code, detail, headers=error.headers)


def _place(entry: Any, body: Any) -> tuple[str | int, ...]:
    """Steps from the body to the fault: pydantic's location without the names of alternatives."""
    steps: list[str | int] = []
    at, location = body, _inside(entry["loc"])
    for number, step in enumerate(location):
        last = number == len(location) - 1
        if isinstance(at, dict) and (step in at or (last and entry["type"] == "missing")):
            at = at.get(step)
        elif isinstance(at, list) and isinstance(step, int) and step < len(at):
            at = at[step]
        else:
            continue
        steps.append(step)
    return tuple(steps)


def _inside(location: Sequence[str | int]) -> Sequence[str | int]:
    return location[1:] if location[:1] == ("body",) else location


def _reason(entry: Any) -> str:
    message: str = entry["msg"]
    return message[:1].lower() + message[1:]
