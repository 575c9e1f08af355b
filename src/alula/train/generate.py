"""Many prompts through one engine, as wide as it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from alula.config import AlulaError
from alula.train.dialogue import Generate

if TYPE_CHECKING:
    from alula.engine.engine import Engine
    from alula.sequence import SamplingParams


def engine_generate(engine: Engine, on_tokens: Callable[[int], None] = lambda count: None) -> Generate:
    """A `Generate` on an engine; ``on_tokens`` hears of every step's tokens.

    Nothing of it stays in the engine, however it ends.
    """

    def generate(prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
        requests: list[int | None] = []
        try:
            requests += (_add(engine, prompt, wanted) for prompt, wanted in zip(prompts, params, strict=True))
            while engine.has_work:
                on_tokens(sum(len(event.tokens) for event in engine.step()))
            return [[] if request is None else engine.pop(request).outputs[0].token_ids for request in requests]
        finally:
            for request in requests:
                if request is not None and engine.knows(request):
                    engine.abort(request)

    return generate


def _add(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> int | None:
    """The request's id; None where the engine refuses it, most often as too long."""
    from alula.engine.request import Request

    try:
        return engine.add(Request(tuple(prompt), params))
    except AlulaError:
        return None
