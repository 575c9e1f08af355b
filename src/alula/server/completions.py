"""/v1/completions: prompts as text or token ids, several at once, echoed where asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from alula.engine.request import Request
from alula.sequence import FinishReason
from alula.server.chunks import Chunk
from alula.server.errors import ApiError
from alula.server.params import Wanted, requests
from alula.server.prompts import text_prompts
from alula.server.protocol import CompletionBody
from alula.server.replies import (
    finish_reason,
    joined_logprobs,
    prompt_logprobs,
    prompt_text_logprobs,
    speculation,
    text_logprobs,
)
from alula.server.service import Service
from alula.server.structure import structured_outputs
from alula.server.ticket import PromptScores, Ticket

DEFAULT_TOKENS = 16
"""What OpenAI's API writes where max_tokens is left out."""


@dataclass
class CompletionAnswer:
    """Writes text completions. silent: the prompt is only scored, and the token computed after it is left out."""

    service: Service
    body: CompletionBody
    requests: list[Request]
    silent: bool
    _scores: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def n(self) -> int:
        return self.body.n or 1

    def opening(self) -> list[dict[str, Any]]:
        """Echoed prompts, unless their logprobs are to come with them."""
        if not self.body.echo or self.body.logprobs is not None:
            return []
        samples = range(len(self.requests) * self.n)
        return [self._part(choice, Chunk(self._echo(choice)), None) for choice in samples]

    def scored(self, scores: PromptScores) -> list[dict[str, Any]]:
        if not self.body.echo or self.body.logprobs is None:
            return []
        tokens = self.requests[scores.prompt].prompt_token_ids
        found = prompt_text_logprobs(self.service.tokenizer, tokens, scores.logprobs)
        self._scores[scores.prompt] = found
        samples = range(scores.prompt * self.n, (scores.prompt + 1) * self.n)
        return [self._part(choice, Chunk(self._echo(choice)), found) for choice in samples]

    def chunk(self, choice: int, chunk: Chunk) -> list[dict[str, Any]]:
        chunk = self._said(chunk)
        return [self._part(choice, chunk, self._logprobs(choice, chunk))]

    def whole(self, chunks: list[Chunk], ticket: Ticket) -> dict[str, Any]:
        choices = []
        for choice, chunk in enumerate(map(self._said, chunks)):
            scores = joined_logprobs(self._scores.get(choice // self.n), self._logprobs(choice, chunk))
            entry = self._choice(choice, chunk, scores)
            entry["text"] = (self._echo(choice) if self.body.echo else "") + chunk.text
            output = ticket.outputs[choice // self.n]
            if self.body.prompt_logprobs is not None:
                entry["prompt_logprobs"] = prompt_logprobs(self.service.tokenizer, output)
            if self.body.return_token_ids:
                entry["prompt_token_ids"] = output.prompt_token_ids
            choices.append(entry)
        return {"choices": choices}

    def _said(self, chunk: Chunk) -> Chunk:
        if not self.silent or chunk.finish_reason is FinishReason.ERROR:
            return chunk
        return Chunk(finish_reason=chunk.finish_reason and FinishReason.LENGTH)

    def _logprobs(self, choice: int, chunk: Chunk) -> dict[str, Any] | None:
        shift = len(self._echo(choice)) if self.body.echo else 0
        return text_logprobs(self.service.tokenizer, chunk, shift)

    def _echo(self, choice: int) -> str:
        """As it was given where it was text; a truncated one as it was read."""
        place, prompt = choice // self.n, self.body.prompt
        if self.body.truncate_prompt_tokens is None and self.body.logprobs is None:
            given = prompt if isinstance(prompt, str) else prompt[place]
            if isinstance(given, str):
                return given
        ids = self.requests[place].prompt_token_ids
        return self.service.tokenizer.decode(ids, skip_special_tokens=False)

    def _part(self, choice: int, chunk: Chunk, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {"choices": [self._choice(choice, chunk, logprobs)]}

    def _choice(self, choice: int, chunk: Chunk, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "index": choice,
            "text": chunk.text,
            "logprobs": logprobs,
            "finish_reason": finish_reason(chunk),
            "stop_reason": chunk.stop_reason,
        }
        if chunk.error is not None:
            entry["error"] = chunk.error
        if self.body.return_token_ids:
            entry["token_ids"] = list(chunk.tokens)
        return entry | speculation(self.service.tokenizer, chunk)


def completion(service: Service, body: CompletionBody) -> CompletionAnswer:
    """Raises ApiError for what cannot be served."""
    silent = body.max_tokens == 0
    if silent and not body.echo:
        raise ApiError(400, "max_tokens is 0: give at least 1, or echo the prompt", param="max_tokens")
    if silent and body.speculation is not None and body.speculation.trace:
        raise ApiError(400, "speculation.trace needs output, and max_tokens is 0: leave it out", param="speculation")
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError(400, "prompt_logprobs does not go with stream: leave one out", param="prompt_logprobs")
    if body.echo and body.logprobs is not None:
        body = body.model_copy(update={"prompt_logprobs": body.logprobs})
    tokenizer, special = service.tokenizer, body.add_special_tokens is not False
    prompts = text_prompts(tokenizer, body.prompt, add_special_tokens=special)
    most = _default_tokens(service, body, prompts) if body.max_tokens is None else max(body.max_tokens, 1)
    wanted = Wanted(most, body.logprobs, structured_outputs(body))
    return CompletionAnswer(service, body, requests(service, body, prompts, wanted), silent)


def _default_tokens(service: Service, body: CompletionBody, prompts: list[list[int]]) -> int:
    """OpenAI's, as far as the context and min_tokens allow."""
    longest = max(len(prompt) for prompt in prompts)
    room = service.max_len - min(longest, body.truncate_prompt_tokens or longest)
    most = min(max(DEFAULT_TOKENS, body.min_tokens or 0), room, service.config.max_output_tokens or room)
    return max(most, 1)
