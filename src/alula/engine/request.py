"""Requests in, outputs out. Names follow vLLM's offline API."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from typing import Any

from alula.config import AlulaError, check_floor
from alula.engine.metrics import DraftStats, StepTimes
from alula.sequence import SamplingParams, TokenLogprobs
from alula.tree import ROOT_ONLY, TreeShape

DEEPEST = 32
"""Levels that one request may ask for."""


@dataclass(frozen=True)
class Speculation:
    """How one request is drafted for; None leaves it to the engine. Raises AlulaError for a value out of range."""

    off: bool = False
    """Decode plainly."""
    nodes: int | None = None
    """Rows verified per step: the draft tree with its root."""
    depth: int | None = None
    """Levels of the draft tree."""
    drafter: str | None = None
    """One of the engine's drafters by name, or `none`."""
    trace: bool = False
    """Let events carry the tree of their step, and what became of it."""
    floor: float | None = None
    """Least probability of a path of the draft tree."""

    def __post_init__(self) -> None:
        for name, most in (("nodes", None), ("depth", DEEPEST)):
            value, least = getattr(self, name), 1 if name == "nodes" else 0
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least or (most and value > most):
                limits = f"of at least {least}" + (f" and at most {most}" if most else "")
                raise AlulaError(f"speculation.{name} is {value!r}: give a whole number {limits}")
        if self.floor is not None:
            check_floor("speculation.floor", self.floor)

    def shape(self, default: TreeShape) -> TreeShape:
        """Limits of the request's trees, given the engine's."""
        if self.off or self.drafter == "none":
            return ROOT_ONLY
        asked: dict[str, Any] = {"nodes": self.nodes, "depth": self.depth, "floor": self.floor}
        return replace(default, **{name: value for name, value in asked.items() if value is not None})


@dataclass(frozen=True)
class Request:
    """A prompt as token ids, and how to continue it.

    priority: waiting requests with a lower one run earlier.
    """

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    speculation: Speculation = field(default_factory=Speculation)
    priority: int = 0


@dataclass
class CompletionOutput:
    """One sample of a request.

    text and token_ids end where the output was cut; logprobs has an entry per token id. seed reproduces the sample.
    """

    index: int
    seed: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    stats: DraftStats = field(default_factory=DraftStats)


@dataclass
class RequestOutput:
    """Everything a request produced. prompt_logprobs[0] is None: nothing precedes the first token.

    ttft_s: seconds from adding the request to its first token. latency_s: to its last. queue_s: until it first ran.
    cached_tokens: prompt tokens that were in the cache then. times: the engine's steps from then to the last token,
    whoever else took part in them. error: why the request was refused, in which case it has no outputs.
    """

    request_id: int
    prompt_token_ids: list[int]
    prompt: str | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    ttft_s: float | None = None
    latency_s: float | None = None
    queue_s: float | None = None
    cached_tokens: int = 0
    times: StepTimes | None = None
    error: str | None = None

    @property
    def finished(self) -> bool:
        return self.error is not None or all(output.finish_reason is not None for output in self.outputs)


def check_request(request: Request, *, vocab_size: int, max_len: int, max_slots: int) -> None:
    """Raises AlulaError where the request could never be served."""
    prompt, params = request.prompt_token_ids, request.params
    if not isinstance(params, SamplingParams):
        raise AlulaError(f"sampling_params is {params!r}: give SamplingParams, or None for the defaults")
    if not prompt:
        raise AlulaError("prompt is empty: give at least one token")
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise AlulaError(f"prompt holds token id {token!r}: give whole numbers from 0 to {vocab_size - 1}")
    if len(prompt) >= max_len:
        raise AlulaError(f"prompt has {len(prompt)} tokens and the context limit is {max_len}: shorten the prompt")
    longest = min(len(prompt) + params.max_tokens, max_len)
    if longest > max_slots:
        raise AlulaError(
            f"prompt plus max_tokens needs {longest} cache slots and the pool has {max_slots}: "
            "lower max_tokens or raise kv_cache_mib"
        )
    for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
        for token in getattr(params, name) or ():
            if not isinstance(token, int) or not 0 <= token < vocab_size:
                raise AlulaError(f"{name} names token id {token!r}: give ids from 0 to {vocab_size - 1}")


def resolve_seed(seed: int | None) -> int:
    """A given seed, or a fresh one of 63 bits."""
    return secrets.randbits(63) if seed is None else seed
