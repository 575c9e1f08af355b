"""A client that times what it is sent. Chunks may hold several tokens; what it keeps are token ids."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from mix import Job

TIMEOUT_S = 900.0


@dataclass
class Choice:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None


@dataclass
class Answer:
    """Of one job. sent, first and last: perf_counter times of the request, of its first token and of its last."""

    number: int
    sent: float
    status: int = 0
    error: str | None = None
    choices: dict[int, Choice] = field(default_factory=dict)
    first: float | None = None
    last: float | None = None

    @property
    def tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices.values())

    @property
    def ttft_s(self) -> float | None:
        return None if self.first is None else self.first - self.sent

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first, of the longest sample; None for a single token."""
        longest = max((len(choice.token_ids) for choice in self.choices.values()), default=0)
        if self.first is None or self.last is None or longest < 2:
            return None
        return (self.last - self.first) / (longest - 1)

    def take(self, event: dict[str, Any], now: float) -> None:
        if "error" in event:
            self.error = event["error"]["message"]
            return
        for part in event["choices"]:
            choice = self.choices.setdefault(part["index"], Choice())
            choice.text += part["text"] if "text" in part else part["delta"].get("content") or ""
            choice.finish_reason = part["finish_reason"] or choice.finish_reason
            if ids := part.get("token_ids"):
                choice.token_ids += ids
                self.first = now if self.first is None else self.first
                self.last = now


def client(url: str, key: str | None = None) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits, headers=headers)


async def ask(web: httpx.AsyncClient, job: Job) -> Answer:
    """Never raises for what the server or the network does: that is the answer's error."""
    answer = Answer(job.number, time.perf_counter())
    try:
        async with web.stream("POST", job.path, json=dict(job.body)) as reply:
            answer.status = reply.status_code
            if reply.status_code != 200:
                answer.error = (await reply.aread()).decode(errors="replace")[:500]
                return answer
            await _read(reply, answer)
    except httpx.HTTPError as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


async def _read(reply: httpx.Response, answer: Answer) -> None:
    done = False
    async for line in reply.aiter_lines():
        data = line.removeprefix("data: ")
        done = done or data == "[DONE]"
        if line and not done:
            answer.take(json.loads(data), time.perf_counter())
    if not done and answer.error is None:
        answer.error = "the stream ended without [DONE]"


async def ask_all(
    web: httpx.AsyncClient, jobs: Sequence[Job], concurrency: int, tick: Callable[[], None] = lambda: None
) -> list[Answer]:
    """In the order of the jobs; so many at a time, the next one as soon as one ends."""
    waiting, answers = list(reversed(jobs)), dict[int, Answer]()

    async def work() -> None:
        while waiting:
            job = waiting.pop()
            answers[job.number] = await ask(web, job)
            tick()

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return [answers[job.number] for job in jobs]
