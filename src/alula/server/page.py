"""The page at `/`: files of the package, sent as they are."""

from __future__ import annotations

import hashlib
from importlib.resources import files

from fastapi import FastAPI
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from alula.server.errors import ApiError

_FOLDER = "static"
_INDEX = "index.html"
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    # Nothing but the server's own files, no inline code, and nobody may put the page into a frame.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_paths() -> list[str]:
    """Every path of the page."""
    return ["/", *(f"/{_FOLDER}/{name}" for name in _read())]


def add_page(app: FastAPI) -> None:
    found = _read()

    @app.get("/", include_in_schema=False)
    async def page(http: HttpRequest) -> Response:
        return _reply(http, _INDEX, found[_INDEX])

    @app.get(f"/{_FOLDER}/{{name}}", include_in_schema=False)
    async def part(name: str, http: HttpRequest) -> Response:
        if name not in found:
            raise ApiError(404, f"the page has no file {name!r}")
        return _reply(http, name, found[name])


def _read() -> dict[str, bytes]:
    folder = files("alula.server") / _FOLDER
    return {entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.name.rpartition(".")[2] in _TYPES}


def _reply(http: HttpRequest, name: str, data: bytes) -> Response:
    """The file, or 304 where the client has it."""
    tag = f'"{hashlib.sha256(data).hexdigest()[:16]}"'
    headers = _HEADERS | {"ETag": tag}
    if http.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(data, headers=headers, media_type=_TYPES[name.rpartition(".")[2]])
