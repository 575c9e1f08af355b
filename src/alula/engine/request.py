"""Requests in, outputs out. Names follow vLLM's offline API."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from alula.config import AlulaError
from alula.engine.metrics import DraftStats
from alula.sequence import SamplingParams, TokenLogprobs


@dataclass(frozen=True)
class Request:
    """A prompt as token ids, and how to continue it."""

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)


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

    ttft_s: seconds from adding the request to its first token. latency_s: to its last. error: why the request was
    refused, in which case it has no outputs.
    """

    request_id: int
    prompt_token_ids: list[int]
    prompt: str | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    ttft_s: float | None = None
    latency_s: float | None = None
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
