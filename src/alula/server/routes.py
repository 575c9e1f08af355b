"""Which path does what."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from alula.server.answer import Answer, Exchange, deadline
from alula.server.chat import chat
from alula.server.completions import completion
from alula.server.errors import ApiError
from alula.server.metrics import CONTENT_TYPE, Metrics
from alula.server.prompts import chat_prompt, text_prompts
from alula.server.protocol import ChatBody, CompletionBody, DetokenizeBody, GenerationBody, TokenizeBody
from alula.server.replies import spelled
from alula.server.service import Service
from alula.server.structure import form_field
from alula.server.ticket import Ticket
from alula.version import alula_version

TAG = "X-Alula-Tag"
_ERROR = {"description": "An error in OpenAI's shape: {error: {message, type, param, code}}"}
_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "A JSON object, or server-sent events with `stream`"},
    **dict.fromkeys((400, 401, 404, 409, 413, 429, 500, 503), _ERROR),
}


def add_routes(app: FastAPI, service: Service, metrics: Metrics) -> None:
    _add_generation(app, service)
    _add_tokens(app, service)
    _add_operations(app, service, metrics)


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", responses=_RESPONSES, response_model=None)
    async def completions(body: CompletionBody, http: HttpRequest) -> Response:
        service.check_model(body.model)
        answer = await asyncio.to_thread(completion, service, body)
        exchange = _exchange(service, http, body, answer, answer.requests, ("cmpl", "text_completion"))
        exchange.counted = not answer.silent
        return await exchange.reply(http, stream=bool(body.stream), options=body.stream_options)

    @app.post("/v1/chat/completions", responses=_RESPONSES, response_model=None)
    async def chat_completions(body: ChatBody, http: HttpRequest) -> Response:
        service.check_model(body.model)
        answer = await asyncio.to_thread(chat, service, body)
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        exchange = _exchange(service, http, body, answer, answer.requests, ("chatcmpl", kind))
        return await exchange.reply(http, stream=bool(body.stream), options=body.stream_options)

    async def abort(request_id: str) -> Response:
        if not service.bridge.abort(request_id):
            raise ApiError(404, f"request {request_id!r} is not running here", code="request_not_found")
        return JSONResponse({"id": request_id, "aborted": True})

    app.add_api_route("/v1/requests/{request_id}", abort, methods=["DELETE"], responses=_RESPONSES)
    app.add_api_route("/v1/requests/{request_id}/abort", abort, methods=["POST"], responses=_RESPONSES)


def _exchange(
    service: Service,
    http: HttpRequest,
    body: GenerationBody,
    answer: Answer,
    requests: list[Any],
    names: tuple[str, str],
) -> Exchange:
    """names: prefix of the id, and the kind of object."""
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: set it to true", param="stream_options")
    http.state.id = body.request_id or http.state.id
    reply_id = f"{names[0]}-{http.state.id}"
    limit = deadline(body.timeout_s, service.config.request_timeout_s)
    ticket = Ticket((http.state.id, reply_id), requests, limit, http.headers.get(TAG))
    if service.traces is not None:
        ticket.span = service.traces.begin(http.headers, names[1], service.names[0])
    envelope = {
        "id": reply_id,
        "object": names[1],
        "created": service.now(),
        "model": body.model or service.names[0],
        "system_fingerprint": service.fingerprint,
        "seed": requests[0].params.seed,
    }
    facts, keep = http.state.facts, service.config.log_prompts
    if keep:
        facts["prompts"] = [service.tokenizer.decode(each.prompt_token_ids) for each in requests]
    single = bool(body.stream_single_tokens)
    field = form_field(body)
    return Exchange(service.bridge, ticket, answer, envelope, facts, single=single, keep_texts=keep, form_field=field)


def _add_tokens(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", responses=_RESPONSES)
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        service.check_model(body.model)
        return await asyncio.to_thread(_tokenized, service, body)

    @app.post("/detokenize", responses=_RESPONSES)
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        service.check_model(body.model)
        size = service.engine.model.config.vocab_size
        if any(token >= size for token in body.tokens):
            raise ApiError(400, f"tokens holds {max(body.tokens)}: give ids from 0 to {size - 1}", param="tokens")
        decode = service.tokenizer.decode
        return {"prompt": await asyncio.to_thread(decode, body.tokens, skip_special_tokens=False)}


def _tokenized(service: Service, body: TokenizeBody) -> dict[str, Any]:
    tokens = _tokens(service, body)
    found: dict[str, Any] = {"count": len(tokens), "max_model_len": service.max_len, "tokens": tokens}
    if body.return_token_strs:
        found["token_strs"] = [spelled(service.tokenizer, token) for token in tokens]
    return found


def _tokens(service: Service, body: TokenizeBody) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "prompt or messages: give one of the two", param="prompt")
    special = body.add_special_tokens is not False
    if body.prompt is not None:
        return text_prompts(service.tokenizer, body.prompt, add_special_tokens=special)[0]
    return chat_prompt(service.tokenizer, body, body.tools or ())


def _add_operations(app: FastAPI, service: Service, metrics: Metrics) -> None:
    @app.get("/v1/models", responses=_RESPONSES)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.card(name) for name in service.names]}

    @app.get("/v1/models/{name:path}", responses=_RESPONSES)
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return service.card(name)

    @app.get("/health", responses={503: _ERROR})
    async def health() -> dict[str, str]:
        """200 while the engine makes progress and new requests are taken."""
        reason = "the server is shutting down" if service.bridge.draining else service.bridge.unhealthy
        if reason is not None:
            raise ApiError(503, reason, code="unhealthy")
        return {"status": "ok"}

    @app.get("/version")
    async def tell_version() -> dict[str, str]:
        return {"version": alula_version()}

    @app.get("/metrics", response_model=None)
    async def exposition() -> Response:
        return Response(metrics.exposition(), media_type=CONTENT_TYPE)
