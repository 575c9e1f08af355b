"""The HTTP interface: routes, and errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from alula.engine.engine import Engine
from alula.sequence import LogitsProcessor
from alula.server.bridge import Bridge
from alula.server.config import ServerConfig
from alula.server.engine_metrics import EngineCollector
from alula.server.errors import ApiError
from alula.server.gate import REQUEST_ID, Gate, Keys
from alula.server.invalid import invalid_body, plain_error
from alula.server.metrics import Metrics
from alula.server.page import add_page, page_paths
from alula.server.routes import add_routes
from alula.server.service import (
    Service,
    fingerprint,
    import_what_requests_use,
    load_processors,
    read_defaults,
)
from alula.server.traces import Traces, open_traces
from alula.version import alula_version


def build_app(
    engine: Engine,
    config: ServerConfig,
    *,
    processors: Mapping[str, LogitsProcessor] | None = None,
    traces: Traces | None = None,
) -> FastAPI:
    """An app that serves the engine; its thread starts and ends with the app. `app.state.service` is what it runs on.

    processors: by name, besides those that `config.logits_processor` names. traces: None opens those of the config.
    Raises AlulaError for settings that cannot be met.
    """
    import_what_requests_use()
    traces = traces or open_traces(config.otlp_traces_endpoint, alula_version())
    names = config.served_model_name or (engine.model.name,)
    metrics = Metrics(names[0], max_tags=config.max_tags)
    capacity = engine.config.max_num_seqs + config.max_waiting
    bridge = Bridge(engine, metrics, capacity=capacity, stall_s=config.stall_s)
    metrics.watch(EngineCollector(bridge, names[0]))
    service = Service(
        bridge=bridge,
        config=config,
        names=names,
        defaults=read_defaults(engine.model.checkpoint.folder) if config.generation_config else {},
        processors=load_processors(config.logits_processor) | dict(processors or {}),
        fingerprint=fingerprint(engine),
        created=int(time.time()),
        traces=traces,
    )
    app = App(
        title="alula",
        version=alula_version(),
        lifespan=partial(_lifespan, bridge, traces),
        middleware=_middleware(config, metrics),
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    add_routes(app, service, metrics)
    if not config.no_page:
        add_page(app)
    _add_errors(app, keep_prompts=config.log_prompts)
    return app


class App(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """Without FastAPI's own 422: here a body that does not fit is a 400."""
        document = super().openapi()
        for operations in document["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        return document


@asynccontextmanager
async def _lifespan(bridge: Bridge, traces: Traces | None, app: FastAPI) -> AsyncIterator[None]:
    bridge.start()
    yield
    await bridge.stop()
    if traces is not None:
        await asyncio.to_thread(traces.close)


def _middleware(config: ServerConfig, metrics: Metrics) -> list[Middleware]:
    gate = Middleware(
        Gate,
        Keys(config.keys()),
        metrics.answered,
        max_body=1024 * config.max_body_kib,
        open_paths=_open_paths(config),
    )
    if not config.cors_origins:
        return [gate]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(config.cors_origins),
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=[REQUEST_ID],
    )
    return [cors, gate]


def _open_paths(config: ServerConfig) -> list[str]:
    """What wants no key: the page asks for one, so it must be there before."""
    metrics = ["/metrics"] if config.metrics_without_key else []
    return ["/health", *metrics, *([] if config.no_page else page_paths())]


def _add_errors(app: FastAPI, *, keep_prompts: bool) -> None:
    @app.exception_handler(ApiError)
    async def refused(http: HttpRequest, error: ApiError) -> Response:
        quotes = error.param in ("messages", "prompt")  # as a template's own complaints do
        http.state.facts["error"] = f"{error.param} refused" if quotes and not keep_prompts else error.message
        return JSONResponse(error.body(), error.status, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(http: HttpRequest, error: RequestValidationError) -> Response:
        return await refused(http, invalid_body(http, error))

    @app.exception_handler(HTTPException)
    async def plain(http: HttpRequest, error: HTTPException) -> Response:
        return await refused(http, plain_error(http, error))
