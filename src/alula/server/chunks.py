"""From what steps commit to pieces of an answer: whole tokens with their whole text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from alula.sequence import FinishReason, StepTrace, TokenEvent, TokenLogprobs


@dataclass(frozen=True)
class Origin:
    """The step a token comes from, and its place among the tokens of that step."""

    trace: StepTrace
    place: int

    @property
    def drafted(self) -> bool:
        """Whether the token was drafted and accepted; otherwise the target chose it after the path."""
        return self.place < len(self.trace.path)


@dataclass(frozen=True)
class Chunk:
    """Tokens of one sample and exactly their text.

    start: characters of the sample's text before it. ends: where each token's text ends, counted from the beginning of
    the sample's text. logprobs, origins: one per token, where asked for. finish_reason: of the last chunk only.
    """

    text: str = ""
    tokens: tuple[int, ...] = ()
    start: int = 0
    ends: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    fault: bool = False
    origins: tuple[Origin, ...] = ()


class Aligner:
    """Cuts the events of one sample at ends of tokens whose text is out.

    Text that a stop string may yet take back, and half a code point, wait with all tokens that take part in them, so a
    chunk's tokens and logprobs always belong to its text. single: one token per chunk.
    """

    def __init__(self, *, single: bool = False) -> None:
        self._single = single
        self._text = ""
        self._start = 0
        self._tokens: list[int] = []
        self._ends: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._origins: list[Origin] = []
        self._has_logprobs = False

    def feed(self, event: TokenEvent) -> list[Chunk]:
        self._text += event.text
        self._tokens += event.tokens
        self._ends += event.ends
        if event.logprobs is not None:
            self._has_logprobs = True
            self._logprobs += event.logprobs
        if event.trace is not None:
            self._origins += [Origin(event.trace, place) for place in range(len(event.tokens))]
        if event.finish_reason is not None:
            return self._finish(event)
        count = self._complete()
        return [self._cut(size) for size in self._sizes(count)]

    def _finish(self, event: TokenEvent) -> list[Chunk]:
        sizes = self._sizes(len(self._tokens)) or [0]
        chunks = [self._cut(size) for size in sizes[:-1]]
        last = Chunk(
            self._text,
            tuple(self._tokens),
            self._start,
            tuple(min(end, self._start + len(self._text)) for end in self._ends),
            tuple(self._logprobs) if self._has_logprobs else None,
            event.finish_reason,
            event.stop_reason,
            event.error,
            event.fault,
            tuple(self._origins),
        )
        return [*chunks, last]

    def _complete(self) -> int:
        """How many tokens can go: all up to the last one that has text of its own, if that is out."""
        out, count, before = self._start + len(self._text), 0, self._start
        for place, end in enumerate(self._ends, start=1):
            if end > out:
                break
            count, before = (place if end > before else count), end
        return count

    def _sizes(self, count: int) -> list[int]:
        return [1] * count if self._single else [count] * bool(count)

    def _cut(self, count: int) -> Chunk:
        end = min(self._ends[count - 1], self._start + len(self._text))
        ends = tuple(min(own, end) for own in self._ends[:count])
        size = end - self._start
        logprobs = tuple(self._logprobs[:count]) if self._has_logprobs else None
        origins = tuple(self._origins[:count])
        chunk = Chunk(self._text[:size], tuple(self._tokens[:count]), self._start, ends, logprobs, origins=origins)
        self._text, self._start = self._text[size:], end
        del self._tokens[:count], self._ends[:count], self._logprobs[:count], self._origins[:count]
        return chunk


def merged(chunks: Iterable[Chunk]) -> Chunk:
    """All chunks of one sample as one."""
    parts = list(chunks)
    last = parts[-1]
    has_logprobs = any(part.logprobs is not None for part in parts)
    return Chunk(
        "".join(part.text for part in parts),
        tuple(token for part in parts for token in part.tokens),
        parts[0].start,
        tuple(end for part in parts for end in part.ends),
        tuple(entry for part in parts for entry in part.logprobs or ()) if has_logprobs else None,
        last.finish_reason,
        last.stop_reason,
        last.error,
        last.fault,
        tuple(origin for part in parts for origin in part.origins),
    )
