"""Between the event loop and the one thread that steps the engine.

Calls go over as functions that the thread runs between two steps; what a step committed comes back in one call to the
loop. The thread sleeps while there is nothing to do.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from alula.config import AlulaError
from alula.engine.compiling import wanted_of
from alula.engine.engine import Engine
from alula.engine.recovery import SafeSteps
from alula.engine.request import Request, RequestOutput
from alula.sequence import TokenEvent
from alula.server.errors import ApiError, busy, refused, unavailable
from alula.server.ticket import Delivery, Message, PromptScores, Ticket

CHECK_EVERY_S = 10.0
"""The cache's books are checked when the engine falls idle, no more often than this."""
_REMEMBERED = 32
_TOO_SLOW = "structured_outputs took longer to compile than the request may take: simplify it"


class Observer(Protocol):
    """Is told, in the engine's thread, what happens."""

    def stepped(self, events: Sequence[TokenEvent]) -> None: ...

    def finished(self, ticket: Ticket, request: Request, output: RequestOutput) -> None: ...


class Bridge:
    """Admits requests to an engine and carries their tokens back.

    capacity: samples that may run or wait at once. stall_s: seconds after which a step counts as stuck.
    Its async methods and properties belong to the event loop that `start` was called from.
    """

    def __init__(self, engine: Engine, observer: Observer, *, capacity: int, stall_s: float) -> None:
        self.engine = engine
        self.steps = SafeSteps(engine)
        self.draining = False
        self._observer = observer
        self._capacity = capacity
        self._stall_s = stall_s
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="alula-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        self._dead: str | None = None
        self._busy_since: float | None = None
        self._checked = 0.0
        self._tickets: dict[str, Ticket] = {}
        self._places: dict[int, tuple[Ticket, int]] = {}
        self._timed: set[Ticket] = set()
        self._samples = 0
        self._latencies: deque[float] = deque(maxlen=_REMEMBERED)
        self._log = logging.getLogger("alula.server")

    # On the event loop.

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Ends everything that still runs, then the thread."""
        self._post(self._shut_down)
        await asyncio.to_thread(self._thread.join)

    @property
    def unhealthy(self) -> str | None:
        """Why the engine is not making progress; None while it is, or has nothing to do."""
        if self._dead is not None:
            return self._dead
        if not self._thread.is_alive():
            return "the engine's thread does not run"
        since = self._busy_since
        if since is not None and time.monotonic() - since > self._stall_s:
            return f"the engine has been in one step for {time.monotonic() - since:.0f} s"
        return None

    @property
    def samples(self) -> int:
        """Samples that run or wait."""
        return self._samples

    async def open(self, ticket: Ticket) -> None:
        """Hand the ticket to the engine. Raises ApiError where it is not accepted; otherwise messages follow."""
        try:
            self._admit(ticket)
        except ApiError as error:
            _end_span(ticket, error)
            raise
        self._samples += ticket.samples
        for key in ticket.keys:
            self._tickets[key] = ticket
        try:
            await self._compile(ticket)
            self._post(partial(self._add, ticket))
            if ticket.closing is not None:
                self._post(partial(self._end, ticket, ticket.closing))
            await asyncio.shield(ticket.accepted)
        except asyncio.CancelledError:
            ticket.accepted.add_done_callback(lambda future: future.cancelled() or future.exception())
            self.close(ticket)
            raise

    def close(self, ticket: Ticket, reason: str = "abort") -> None:
        """Whoever waited for it has gone, or somebody asked: it ends with what it has, before the next step."""
        if not ticket.ended:
            ticket.closing = reason
            self._post(partial(self._end, ticket, reason))

    def abort(self, key: str) -> bool:
        """Whether there was such a request."""
        ticket = self._tickets.get(key)
        if ticket is not None:
            self.close(ticket)
        return ticket is not None

    def close_all(self, reason: str) -> None:
        for ticket in set(self._tickets.values()):
            self.close(ticket, reason)

    async def _compile(self, ticket: Ticket) -> None:
        """Waits for the grammars its requests want, so that a bad one is known before a stream opens."""
        grammars, tokenizer = self.engine.grammars, self.engine.model.tokenizer
        for request in ticket.requests:
            wanted = request.params.structured_outputs
            if wanted is None:
                continue
            left = None if ticket.deadline is None else ticket.deadline - time.perf_counter()
            future = grammars.submit(wanted_of(tokenizer, request.prompt_token_ids, wanted))
            try:
                await asyncio.wait_for(asyncio.wrap_future(future), left)
            except TimeoutError:
                raise self._lost(ticket, ApiError(400, _TOO_SLOW, code="deadline_exceeded")) from None
            except AlulaError as error:
                raise self._lost(ticket, refused(error)) from None
            except asyncio.CancelledError:
                self._forget(ticket)
                raise

    def _lost(self, ticket: Ticket, error: ApiError) -> ApiError:
        self._forget(ticket, error)
        return error

    def _admit(self, ticket: Ticket) -> None:
        if (reason := self.unhealthy) is not None:
            raise unavailable(reason, "engine_dead")
        if self.draining:
            raise unavailable("the server is shutting down", "shutting_down")
        for key in ticket.keys:
            if key in self._tickets:
                raise ApiError(409, f"request_id {key!r} is in use: give another", code="request_id_in_use")
        if self._samples + ticket.samples > self._capacity:
            raise busy(self._retry_after_s(), self._samples)

    def _retry_after_s(self) -> int:
        """About how long until a place is free, by what requests took lately."""
        if not self._latencies:
            return 1
        mean = sum(self._latencies) / len(self._latencies)
        rounds = self._samples / self.engine.config.max_num_seqs
        return min(max(1, math.ceil(mean / max(rounds, 1.0))), 60)

    def _hand_out(self, letters: Sequence[tuple[Ticket, Message]]) -> None:
        for ticket, message in letters:
            if ticket.ended:
                continue
            if message is None:
                self._latencies.append(time.perf_counter() - ticket.created)
            if message is None or isinstance(message, ApiError):
                self._forget(ticket, message)
            if isinstance(message, ApiError) and not ticket.accepted.done():
                ticket.accepted.set_exception(message)
            else:
                ticket.messages.put_nowait(message)

    def _forget(self, ticket: Ticket, error: ApiError | None = None) -> None:
        ticket.ended = True
        _end_span(ticket, error)
        self._samples -= ticket.samples
        for key in ticket.keys:
            self._tickets.pop(key, None)

    def _accept(self, ticket: Ticket) -> None:
        if not ticket.accepted.done():
            ticket.accepted.set_result(None)

    # Either side.

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    # In the engine's thread.

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_commands()
                self._end_overdue()
                if self.engine.has_work:
                    self._deliver(self.steps.step())
        except BaseException as error:  # noqa: BLE001 (nothing may end this thread unseen)
            self._die(error)

    def _take_commands(self) -> None:
        if not self._commands and not self.engine.has_work:
            self._check_books()
            self._busy_since = None
            with self._wake:
                self._wake.wait_for(lambda: bool(self._commands))
        self._busy_since = time.monotonic()
        while self._commands:
            self._commands.popleft()()

    def _check_books(self) -> None:
        if time.monotonic() - self._checked > CHECK_EVERY_S:
            self.engine.cache.check_integrity()
            self._checked = time.monotonic()

    def _send(self, letters: Sequence[tuple[Ticket, Message]]) -> None:
        if letters:
            self._call(partial(self._hand_out, letters))

    def _call(self, function: Callable[[], None]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop has closed: nobody is left to tell
            self._stopping = True

    def _add(self, ticket: Ticket) -> None:
        """All of its requests, or none."""
        try:
            for request in ticket.requests:
                ticket.request_ids.append(self.engine.add(request))
        except AlulaError as error:
            self._withdraw(ticket)
            self._send([(ticket, refused(error))])
            return
        choice = 0
        for request_id, request in zip(ticket.request_ids, ticket.requests, strict=True):
            for sample in range(request.params.n):
                self._places[request_id + sample] = (ticket, choice)
                choice += 1
        ticket.open.update(ticket.request_ids)
        if ticket.deadline is not None:
            self._timed.add(ticket)
        self._call(partial(self._accept, ticket))

    def _withdraw(self, ticket: Ticket) -> None:
        for request_id in ticket.request_ids:
            self.engine.abort(request_id)
        ticket.request_ids.clear()

    def _end(self, ticket: Ticket, reason: str) -> None:
        self._deliver([event for request_id in sorted(ticket.open) for event in self.engine.end(request_id, reason)])

    def _end_overdue(self) -> None:
        now = time.perf_counter()
        for ticket in [ticket for ticket in self._timed if ticket.deadline is not None and now >= ticket.deadline]:
            self._end(ticket, "deadline")

    def _deliver(self, events: Sequence[TokenEvent]) -> None:
        self._observer.stepped(events)
        letters: list[tuple[Ticket, Message]] = []
        for event in events:
            ticket, choice = self._places[event.sequence_id]
            letters += self._scores(ticket, event)
            letters.append((ticket, Delivery(choice, event)))
        # Not before all deliveries: one call may end several samples of a ticket.
        for event in events:
            if event.finish_reason is not None:
                letters += self._finish(event.sequence_id)
        self._send(letters)

    def _scores(self, ticket: Ticket, event: TokenEvent) -> list[tuple[Ticket, Message]]:
        """Before a prompt's first token, where it was asked for."""
        for prompt, (request_id, request) in enumerate(zip(ticket.request_ids, ticket.requests, strict=True)):
            if request.params.prompt_logprobs is not None and event.sequence_id == request_id:
                output = self.engine.output(request_id)
                scores = output.prompt_logprobs or ()
                # A request that ends while its prompt is read has some of them only.
                whole = len(scores) == len(request.prompt_token_ids)
                if whole and len(output.outputs[0].token_ids) == len(event.tokens):
                    return [(ticket, PromptScores(prompt, tuple(scores)))]
        return []

    def _finish(self, sequence_id: int) -> list[tuple[Ticket, Message]]:
        """One sample has ended: the request when it was its last, the ticket when that was its last."""
        ticket, _ = self._places.pop(sequence_id)
        place = max(place for place, first in enumerate(ticket.request_ids) if first <= sequence_id)
        request_id, request = ticket.request_ids[place], ticket.requests[place]
        if request_id not in ticket.open or not self.engine.output(request_id).finished:
            return []
        ticket.open.discard(request_id)
        output = self.engine.pop(request_id)
        ticket.outputs.append(output)
        self._observer.finished(ticket, request, output)
        if ticket.open:
            return []
        self._timed.discard(ticket)
        ticket.outputs.sort(key=lambda output: output.request_id)
        return [(ticket, None)]

    def _shut_down(self) -> None:
        for ticket in {ticket for ticket, _ in self._places.values()}:
            self._end(ticket, "shutdown")
        self._stopping = True

    def _die(self, error: BaseException) -> None:
        """Everybody is told; /health says it from now on."""
        self._log.critical("the engine has died: %s", error, exc_info=error)
        self._dead = f"the engine has died ({type(error).__name__})"
        self._call(self._bury)

    def _bury(self) -> None:
        reason = unavailable(self._dead or "", "engine_dead")
        self._hand_out([(ticket, reason) for ticket in set(self._tickets.values())])


def _end_span(ticket: Ticket, error: ApiError | None) -> None:
    if ticket.span is not None:
        ticket.span.end(ticket, error)
