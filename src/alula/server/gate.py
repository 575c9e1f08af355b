"""What every request passes first: an id, a key, a limit on its size; and its line in the log."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Callable, Collection, Iterable
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from alula.server.errors import ApiError, broken

REQUEST_ID = "X-Request-Id"


class Keys:
    """Tells whether a key is among those let in, in a time that says nothing about them."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def admit(self, authorization: str | None) -> bool:
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip())
        fits = [hmac.compare_digest(given, known) for known in self._digests]
        return scheme.lower() == "bearer" and any(fits)


class Gate:
    """ASGI middleware around the app.

    answered: told method, path and status of every reply. open_paths: those that want no key.
    Handlers find the request's id in `scope["state"]["id"]`, and add to `scope["state"]["facts"]` what the log may say.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        answered: Callable[[str, str, int], None],
        *,
        max_body: int,
        open_paths: Collection[str],
    ) -> None:
        self._app = app
        self._keys = keys
        self._answered = answered
        self._max_body = max_body
        self._open_paths = frozenset(open_paths)
        self._log = logging.getLogger("alula.access")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, start = Headers(scope=scope), time.perf_counter()
        state = scope.setdefault("state", {})
        state |= {"id": _request_id(headers), "facts": {}}
        status = 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = state["id"]
            await send(message)

        try:
            await self._pass(scope, headers, receive, sending)
        except Exception as error:
            if status:
                raise
            await self._fail(error, scope, receive, sending)
        finally:
            self._report(scope, status, time.perf_counter() - start)

    async def _pass(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        try:
            self._check(scope["path"], headers)
        except ApiError as error:
            await _tell(error, scope, receive, send)
            return
        await self._app(scope, self._counting(receive), send)

    async def _fail(self, error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
        """Here and not further out, so that a fault has its request's id and leaves the connection open."""
        self._log.error("request %s failed", scope["state"]["id"], exc_info=error)
        told = broken(error)
        scope["state"]["facts"]["error"] = told.message
        await _tell(told, scope, receive, send)

    def _check(self, path: str, headers: Headers) -> None:
        if self._keys and path not in self._open_paths and not self._keys.admit(headers.get("authorization")):
            raise ApiError(
                401,
                "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_body:
            raise ApiError(413, self._too_large, code="body_too_large")

    @property
    def _too_large(self) -> str:
        return f"the body is larger than {self._max_body} bytes: send less"

    def _counting(self, receive: Receive) -> Receive:
        """For bodies that do not say how long they are."""
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_body:
                raise HTTPException(413, self._too_large)
            return message

        return counted

    def _report(self, scope: Scope, status: int, seconds: float) -> None:
        route = scope.get("route")
        path = getattr(route, "path", "other")
        self._answered(scope["method"], path, status)
        shown = quote(scope["path"], safe="/:@!$&'()*+,;=~")  # a path may hold line breaks
        facts: dict[str, Any] = {
            "request_id": scope["state"]["id"],
            "method": scope["method"],
            "path": shown,
            "status": status,
            "seconds": round(seconds, 4),
            **scope["state"]["facts"],
        }
        self._log.info("%s %s %d", scope["method"], shown, status, extra={"facts": facts})


async def _tell(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    await JSONResponse(error.body(), error.status, error.headers)(scope, receive, send)


def _request_id(headers: Headers) -> str:
    """The client's, where it is harmless to repeat."""
    given = headers.get(REQUEST_ID, "")
    return given if re.fullmatch(r"[\w.\-]{1,128}", given) else uuid.uuid4().hex


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
