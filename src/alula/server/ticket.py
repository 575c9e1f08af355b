"""One HTTP request's share of the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from alula.engine.request import Request, RequestOutput
from alula.sequence import TokenEvent, TokenLogprobs
from alula.server.errors import ApiError


@dataclass(frozen=True)
class Delivery:
    """What one step committed for one sample. choice: prompt number * n + sample number."""

    choice: int
    event: TokenEvent


@dataclass(frozen=True)
class PromptScores:
    """Logprobs of a prompt's tokens, complete; delivered before the first token of its samples."""

    prompt: int
    logprobs: tuple[TokenLogprobs | None, ...]


class Span(Protocol):
    """Is told once that the ticket has ended, and why where that was an error."""

    def end(self, ticket: Ticket, error: ApiError | None = None) -> None: ...


Message = Delivery | PromptScores | ApiError | None
"""None: nothing more follows. ApiError: neither does anything, for this reason."""


@dataclass(eq=False)
class Ticket:
    """Requests of one HTTP request, one per prompt, and what comes back.

    keys: names by which it can be aborted. deadline: perf_counter time at which it ends with what it has. tag: prompt
    type for metrics. closing: why it is to end early, once somebody wants that. outputs: one per prompt, complete once
    the messages have ended. span: its trace, where there are traces.
    The engine's thread reads and writes `request_ids`, `open` and `outputs`; messages arrive on the event loop.
    """

    keys: tuple[str, ...]
    requests: Sequence[Request]
    deadline: float | None = None
    tag: str | None = None
    created: float = field(default_factory=time.perf_counter)
    request_ids: list[int] = field(default_factory=list)
    open: set[int] = field(default_factory=set)
    outputs: list[RequestOutput] = field(default_factory=list)
    messages: asyncio.Queue[Message] = field(default_factory=asyncio.Queue)
    accepted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    closing: str | None = None
    span: Span | None = None
    ended: bool = False

    @property
    def samples(self) -> int:
        return sum(request.params.n for request in self.requests)

    async def __aiter__(self) -> AsyncIterator[Delivery | PromptScores]:
        """Raises ApiError where the engine gave the request up."""
        while (message := await self.messages.get()) is not None:
            if isinstance(message, ApiError):
                raise message
            yield message
