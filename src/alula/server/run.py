"""Runs an app until it is told to stop, and then lets running requests finish, for a while."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from alula.config import AlulaError
from alula.server.bridge import Bridge
from alula.server.config import ServerConfig

_LAST_WORDS_S = 5.0
"""After the drain limit, seconds for ended requests to be written out."""


def bind(config: ServerConfig) -> socket.socket:
    """Takes the port before a model is loaded. Raises AlulaError where that is not possible."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    taken = socket.socket(family, socket.SOCK_STREAM)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind((config.host, config.port))
    except OSError as error:
        taken.close()
        reason = error.strerror or str(error)
        raise AlulaError(f"port {config.port} of host {config.host!r} cannot be had ({reason}): give others") from None
    return taken


def serve(app: FastAPI, config: ServerConfig, taken: socket.socket, ready: Callable[[], None]) -> None:
    """Calls `ready` once requests are taken. Returns after SIGTERM or SIGINT, when the running requests have ended; a
    second signal ends them at once."""
    settings = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(config.drain_s + _LAST_WORDS_S) + 1,
    )
    DrainingServer(settings, app.state.service.bridge, config.drain_s, ready).run([taken])


class DrainingServer(uvicorn.Server):
    """New requests get 503 from the first signal on, and running ones end with what they have after drain_s."""

    def __init__(
        self, settings: uvicorn.Config, bridge: Bridge, drain_s: float, ready: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(settings)
        self._ready = ready
        self._bridge = bridge
        self._drain_s = drain_s

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._bridge.draining:
            asyncio.get_running_loop().call_soon_threadsafe(self._bridge.close_all, "shutdown")
        self._bridge.draining = True
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._bridge.draining = True
        limit = asyncio.get_running_loop().call_later(self._drain_s, self._bridge.close_all, "shutdown")
        try:
            await super().shutdown(sockets)
        finally:
            limit.cancel()
