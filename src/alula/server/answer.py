"""From the deliveries of a ticket to an HTTP reply, at once or as a stream, for whatever kind of answer."""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from alula.server.bridge import Bridge
from alula.server.chunks import Aligner, Chunk, merged
from alula.server.errors import ApiError
from alula.server.protocol import StreamOptions
from alula.server.replies import failed, usage
from alula.server.structure import in_clients_words
from alula.server.ticket import Delivery, PromptScores, Ticket

CLIENT_GONE = 499
T = TypeVar("T")


class Answer(Protocol):
    """How one kind of endpoint writes chunks. Methods return objects of the stream, or the whole reply."""

    def opening(self) -> list[dict[str, Any]]: ...

    def scored(self, scores: PromptScores) -> list[dict[str, Any]]: ...

    def chunk(self, choice: int, chunk: Chunk) -> list[dict[str, Any]]: ...

    def whole(self, chunks: list[Chunk], ticket: Ticket) -> dict[str, Any]: ...


@dataclass
class Exchange:
    """One request being answered.

    envelope: what every object of the reply begins with. facts: what the log says of the request. single: one token
    per chunk. counted: whether the tokens belong to the reply. keep_texts: the log says what was answered. form_field:
    the field that asked for a form of the answer.
    """

    bridge: Bridge
    ticket: Ticket
    answer: Answer
    envelope: dict[str, Any]
    facts: dict[str, Any]
    single: bool = False
    counted: bool = True
    keep_texts: bool = False
    form_field: str = "structured_outputs"
    _texts: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    _counts: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    async def reply(self, http: HttpRequest, *, stream: bool, options: StreamOptions | None) -> Response:
        """Raises ApiError for whatever is known before the first byte is sent."""
        try:
            if not await _race(_left(http.receive), _done(self.bridge.open(self.ticket))):
                return Response(status_code=CLIENT_GONE)
        except ApiError as error:
            raise self._in_clients_words(error) from None
        if stream:
            return EventStream(self._events(options or StreamOptions()), self._gone)
        return await _while_there(http.receive, self._whole(), self._gone)

    def _in_clients_words(self, error: ApiError) -> ApiError:
        if error.param != "structured_outputs":
            return error
        message = in_clients_words(error.message, self.form_field)
        return ApiError(error.status, message, code=error.code, param=self.form_field)

    @property
    def _prompt_tokens(self) -> int:
        return sum(len(request.prompt_token_ids) for request in self.ticket.requests)

    def _gone(self) -> None:
        self.bridge.close(self.ticket)

    def _aligners(self) -> list[Aligner]:
        return [Aligner(single=self.single) for _ in range(self.ticket.samples)]

    async def _whole(self) -> Response:
        aligners, chunks = self._aligners(), defaultdict[int, list[Chunk]](list)
        async for message in self.ticket:
            if isinstance(message, Delivery):
                chunks[message.choice] += aligners[message.choice].feed(message.event)
            else:
                self.answer.scored(message)
        each = [merged(chunks[choice]) for choice in range(self.ticket.samples)]
        if all(map(failed, each)):
            raise _error_of(each[0])
        for choice, chunk in enumerate(each):
            self._take(choice, chunk)
        body = self.envelope | self.answer.whole(each, self.ticket) | {"usage": self._usage(complete=True)}
        self._note(each)
        return JSONResponse(body)

    async def _events(self, options: StreamOptions) -> AsyncIterator[bytes]:
        """Server-sent events: the answer's chunks, usage where asked for, and the end, or what went wrong."""
        aligners, last = self._aligners(), list[Chunk]()
        try:
            for part in self.answer.opening():
                yield self._event(part, options)
            async for message in self.ticket:
                if isinstance(message, PromptScores):
                    for part in self.answer.scored(message):
                        yield self._event(part, options)
                    continue
                for chunk in aligners[message.choice].feed(message.event):
                    self._take(message.choice, chunk)
                    last += [chunk] if chunk.finish_reason is not None else []
                    for part in self.answer.chunk(message.choice, chunk):
                        yield self._event(part, options)
            self._note(last)
            if any(map(failed, last)):
                raise _error_of(next(filter(failed, last)))
        except ApiError as error:
            self.facts["error"] = error.message
            yield _data(error.body())
            return
        if options.include_usage:
            yield _data(self.envelope | {"choices": [], "usage": self._usage(complete=True)})
        yield b"data: [DONE]\n\n"

    def _take(self, choice: int, chunk: Chunk) -> None:
        self._counts[choice] += len(chunk.tokens)
        if self.keep_texts:
            self._texts[choice] += chunk.text

    def _event(self, part: dict[str, Any], options: StreamOptions) -> bytes:
        if options.include_usage:
            part = part | {"usage": self._usage() if options.continuous_usage_stats else None}
        return _data(self.envelope | part)

    def _usage(self, *, complete: bool = False) -> dict[str, Any]:
        count = sum(self._counts.values()) if self.counted else 0
        return usage(self._prompt_tokens, count, self.ticket.outputs if complete else None)

    def _note(self, last: list[Chunk]) -> None:
        stats = [sample.stats for output in self.ticket.outputs for sample in output.outputs]
        forwards = sum(each.target_forwards for each in stats)
        self.facts |= {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": sum(self._counts.values()) if self.counted else 0,
            "finish": [chunk.finish_reason.value for chunk in last if chunk.finish_reason],
            "tau": round(sum(each.committed for each in stats) / forwards, 3) if forwards else 0.0,
        }
        if self.keep_texts:
            self.facts["answers"] = [self._texts[choice] for choice in range(self.ticket.samples)]


class EventStream(Response):
    """Sends events as they come, and notices at once when the client leaves, also while there is nothing to send."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], gone: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._gone = gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _race(_left(receive), self._send(send))
        except OSError:
            pass  # the client left while something was being sent
        finally:
            self._gone()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _while_there(receive: Receive, work: Awaitable[Response], gone: Callable[[], None]) -> Response:
    """The work's result; it is given up when the client leaves."""
    try:
        return await _race(_left(receive), work) or Response(status_code=CLIENT_GONE)
    finally:
        gone()


async def _done(work: Awaitable[None]) -> bool:
    await work
    return True


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _race(watch: Awaitable[None], work: Awaitable[T]) -> T | None:
    """What the work returns, or None when the watch ends before it. Neither outlives this."""
    tasks = [asyncio.ensure_future(watch), asyncio.ensure_future(work)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[1].result() if tasks[1].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _data(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _error_of(chunk: Chunk) -> ApiError:
    return ApiError(500 if chunk.fault else 400, chunk.error or "the request failed", code="generation_failed")


def deadline(asked: float | None, limit: float | None) -> float | None:
    """perf_counter time at which a request ends, by what it asks for and what the server allows."""
    seconds = min((value for value in (asked, limit) if value is not None), default=None)
    return None if seconds is None else time.perf_counter() + seconds
