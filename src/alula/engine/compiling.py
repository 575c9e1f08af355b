"""Requests whose grammar is still being compiled: they wait here, outside the scheduler's queue."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import TYPE_CHECKING

from alula.grammar import Grammars
from alula.sequence import Sequence
from alula.structured import StructuredOutputsParams
from alula.text import Tokenizer

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar

_ENDING = 64
"""Tokens of the prompt that are read for a marker at its end."""


class Compiling:
    """The samples of each request that waits, by request id."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._waiting: dict[int, tuple[Future[CompiledGrammar], list[Sequence]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request_id: int, sequences: Seq[Sequence], wanted: StructuredOutputsParams) -> None:
        self._waiting[request_id] = (self._grammars.submit(wanted), list(sequences))

    def remove(self, sequence: Sequence) -> None:
        """Forget an aborted sample; what is being compiled for it is kept for others."""
        request_id = sequence.id - sequence.sample
        if request_id in self._waiting:
            self._waiting[request_id][1].remove(sequence)
            if not self._waiting[request_id][1]:
                del self._waiting[request_id]

    def take(self) -> tuple[list[Sequence], dict[int, str]]:
        """Samples that can run now, their grammars at the beginning; and why requests cannot, by request id."""
        ready: list[Sequence] = []
        failed: dict[int, str] = {}
        for request_id in [key for key, (future, _) in self._waiting.items() if future.done()]:
            future, sequences = self._waiting.pop(request_id)
            error = future.exception()
            if error is None:
                for sequence in sequences:
                    sequence.grammar = self._grammars.state(future.result())
                ready += sequences
            else:
                failed[request_id] = str(error)
        return ready, failed

    def wait(self, seconds: float) -> None:
        """Until one is compiled, but no longer than this."""
        wait([future for future, _ in self._waiting.values()], seconds, "FIRST_COMPLETED")


def wanted_of(tokenizer: Tokenizer, prompt: Seq[int], wanted: StructuredOutputsParams) -> StructuredOutputsParams:
    """Without its free part where the prompt ends in the marker already, whitespace aside."""
    if wanted.free_until is None:
        return wanted
    ending, marker = tokenizer.decode(prompt[-_ENDING:], skip_special_tokens=False), wanted.free_until
    if marker.strip():
        ending, marker = ending.rstrip(), marker.rstrip()
    return replace(wanted, free_until=None) if ending.endswith(marker) else wanted
