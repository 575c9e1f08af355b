"""From a request's body to what the engine takes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from alula.config import AlulaError
from alula.engine.request import Request, Speculation, resolve_seed
from alula.sequence import LogitsProcessor, SamplingParams
from alula.server.errors import ApiError, refused, too_long
from alula.server.protocol import GenerationBody
from alula.server.service import Service
from alula.structured import StructuredOutputsParams

_SAME = (
    "frequency_penalty",
    "presence_penalty",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "prompt_logprobs",
)
"""Fields whose absence means SamplingParams' own default."""
_DEFAULTED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_LISTS = ("stop_token_ids", "allowed_token_ids", "bad_words")


@dataclass(frozen=True)
class Wanted:
    """Most output tokens (None: as many as fit), top logprobs of the output, and its form."""

    max_tokens: int | None
    logprobs: int | None
    form: StructuredOutputsParams | None = None


def requests(service: Service, body: GenerationBody, prompts: Sequence[list[int]], wanted: Wanted) -> list[Request]:
    """One per prompt. Raises ApiError, naming the field, for what cannot be served."""
    prompts = [_truncated(prompt, body.truncate_prompt_tokens) for prompt in prompts]
    n = body.n or 1
    if n * len(prompts) > service.config.max_samples:
        limit = service.config.max_samples
        raise ApiError(400, f"n is {n} for {len(prompts)} prompts: ask for at most {limit} samples", param="n")
    for prompt in prompts:
        _check_length(service, prompt, wanted.max_tokens)
    speculation = _speculation(service, body)
    fields = _fields(service, body, wanted)
    return [_request(service, prompt, wanted, fields, speculation, body.priority or 0) for prompt in prompts]


def _request(
    service: Service,
    prompt: list[int],
    wanted: Wanted,
    fields: dict[str, Any],
    speculation: Speculation,
    priority: int,
) -> Request:
    room = service.max_len - len(prompt)
    most = min(room, service.config.max_output_tokens or room)
    try:
        params = SamplingParams(max_tokens=most if wanted.max_tokens is None else wanted.max_tokens, **fields)
    except ValueError as error:
        raise refused(error) from None
    return Request(tuple(prompt), params, speculation, priority)


def _fields(service: Service, body: GenerationBody, wanted: Wanted) -> dict[str, Any]:
    _check_logprobs(service, body, wanted)
    fields: dict[str, Any] = {"temperature": 1.0} | dict(service.defaults)
    for name in (*_SAME, *_DEFAULTED):
        if (value := getattr(body, name)) is not None:
            fields[name] = value
    for name in _LISTS:
        if (values := getattr(body, name)) is not None:
            fields[name] = tuple(values)
    if body.stop is not None:
        fields["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    return fields | {
        "n": body.n or 1,
        "seed": resolve_seed(body.seed),
        "logit_bias": _bias(body),
        "logprobs": wanted.logprobs,
        "structured_outputs": wanted.form,
        "logits_processors": _processors(service, body),
    }


def _truncated(prompt: list[int], most: int | None) -> list[int]:
    return prompt if most is None else prompt[-most:]


def _check_length(service: Service, prompt: list[int], max_tokens: int | None) -> None:
    config, wanted = service.config, 1 if max_tokens is None else max_tokens
    if config.max_prompt_tokens is not None and len(prompt) > config.max_prompt_tokens:
        raise too_long(len(prompt), 0, config.max_prompt_tokens)
    if config.max_output_tokens is not None and wanted > config.max_output_tokens:
        most = config.max_output_tokens
        raise ApiError(400, f"max_tokens is {max_tokens}: ask for at most {most}", param="max_tokens")
    if len(prompt) + wanted > service.max_len:
        raise too_long(len(prompt), 0 if max_tokens is None else max_tokens, service.max_len)


def _check_logprobs(service: Service, body: GenerationBody, wanted: Wanted) -> None:
    most = service.config.max_logprobs
    for name, value in (("logprobs", wanted.logprobs), ("prompt_logprobs", body.prompt_logprobs)):
        if value is not None and value > most:
            raise ApiError(400, f"{name} is {value}: ask for at most {most}", param=name)


def _bias(body: GenerationBody) -> dict[int, float]:
    """Ids in plain digits only: other spellings of a number could name a token twice."""
    given = body.logit_bias or {}
    if not all(re.fullmatch(r"0|-?[1-9][0-9]{0,18}", token) for token in given):
        raise ApiError(400, "logit_bias has a key that is no token id: give whole numbers", param="logit_bias")
    return {int(token): bias for token, bias in given.items()}


def _processors(service: Service, body: GenerationBody) -> tuple[LogitsProcessor, ...]:
    for name in body.logits_processors or ():
        if name not in service.processors:
            known = ", ".join(sorted(service.processors)) or "none: it was started without --logits-processor"
            raise ApiError(
                400, f"logits_processors names {name!r}: this server knows {known}", param="logits_processors"
            )
    return tuple(service.processors[name] for name in body.logits_processors or ())


def _speculation(service: Service, body: GenerationBody) -> Speculation:
    asked, most = body.speculation, service.config.max_speculation_nodes
    if asked is None:
        return Speculation()
    if asked.nodes is not None and asked.nodes > most:
        raise ApiError(400, f"speculation.nodes is {asked.nodes}: ask for at most {most}", param="speculation")
    try:
        return Speculation(asked.off, asked.nodes, asked.depth, asked.drafter, asked.trace, asked.floor)
    except AlulaError as error:
        raise refused(error) from None
