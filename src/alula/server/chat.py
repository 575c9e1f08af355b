"""/v1/chat/completions: messages in the model's template, tool calls out."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

from alula.engine.request import Request
from alula.server.chunks import Chunk
from alula.server.errors import ApiError
from alula.server.params import Wanted, requests
from alula.server.prompts import chat_prompt
from alula.server.protocol import ChatBody, NamedTool, Tool
from alula.server.replies import chat_logprobs, finish_reason, prompt_logprobs, speculation
from alula.server.service import Service
from alula.server.structure import structured_outputs
from alula.server.ticket import PromptScores, Ticket
from alula.server.tools import Argued, Called, Part, Said, ToolParser


@dataclass
class ChatAnswer:
    """Writes messages. parsers: one per choice, where tools may be called."""

    service: Service
    body: ChatBody
    requests: list[Request]
    parsers: list[ToolParser] = field(default_factory=list)

    def opening(self) -> list[dict[str, Any]]:
        samples = range(self.body.n or 1)
        return [self._part(choice, {"role": "assistant", "content": ""}, Chunk()) for choice in samples]

    def scored(self, scores: PromptScores) -> list[dict[str, Any]]:
        return []

    def chunk(self, choice: int, chunk: Chunk) -> list[dict[str, Any]]:
        """One object per part, the chunk's logprobs with the first; the reason it ended in one of its own."""
        parts = [self._part(choice, delta, chunk) for delta in self._deltas(choice, chunk)]
        if not parts and (chunk.logprobs or chunk.origins or (chunk.tokens and self.body.return_token_ids)):
            parts = [self._part(choice, {}, chunk)]
        for part in parts[:1]:
            part["choices"][0]["logprobs"] = chat_logprobs(self.service.tokenizer, chunk)
            part["choices"][0] |= self._extras(chunk)
        if chunk.finish_reason is not None:
            last = self._part(choice, {}, chunk)
            last["choices"][0] |= self._ending(choice, chunk)
            parts.append(last)
        return parts

    def whole(self, chunks: list[Chunk], ticket: Ticket) -> dict[str, Any]:
        choices = []
        for choice, chunk in enumerate(chunks):
            entry: dict[str, Any] = {"index": choice, "message": self._message(choice, chunk)}
            entry["logprobs"] = chat_logprobs(self.service.tokenizer, chunk)
            choices.append(entry | self._ending(choice, chunk) | self._extras(chunk))
        body: dict[str, Any] = {"choices": choices}
        if self.body.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(self.service.tokenizer, ticket.outputs[0])
        if self.body.return_token_ids:
            body["prompt_token_ids"] = list(self.requests[0].prompt_token_ids)
        return body

    def _extras(self, chunk: Chunk) -> dict[str, Any]:
        token_ids = {"token_ids": list(chunk.tokens)} if self.body.return_token_ids else {}
        return token_ids | speculation(self.service.tokenizer, chunk)

    def _ending(self, choice: int, chunk: Chunk) -> dict[str, Any]:
        reason = finish_reason(chunk)
        if reason == "stop" and self.parsers and self.parsers[choice].calls:
            reason = "tool_calls"
        ending: dict[str, Any] = {"finish_reason": reason, "stop_reason": chunk.stop_reason}
        return ending if chunk.error is None else ending | {"error": chunk.error}

    def _parts(self, choice: int, chunk: Chunk) -> list[Part]:
        if not self.parsers:
            return [Said(chunk.text)] if chunk.text else []
        parser = self.parsers[choice]
        parts = parser.feed(chunk.text)
        return parts + parser.finish() if chunk.finish_reason is not None else parts

    def _deltas(self, choice: int, chunk: Chunk) -> list[dict[str, Any]]:
        return [_delta(part) for part in self._parts(choice, chunk)]

    def _message(self, choice: int, chunk: Chunk) -> dict[str, Any]:
        parts = self._parts(choice, chunk)
        text = "".join(part.text for part in parts if isinstance(part, Said))
        calls = [_delta(part)["tool_calls"][0] for part in parts if isinstance(part, Called)]
        for part in parts:
            if isinstance(part, Argued):
                calls[part.index]["function"]["arguments"] += part.text
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        if calls:
            message["tool_calls"] = [{name: call[name] for name in ("id", "type", "function")} for call in calls]
        return message

    def _part(self, choice: int, delta: dict[str, Any], chunk: Chunk) -> dict[str, Any]:
        return {"choices": [{"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}]}


def chat(service: Service, body: ChatBody) -> ChatAnswer:
    """Raises ApiError for what cannot be served."""
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError(400, "prompt_logprobs does not go with stream: leave one out", param="prompt_logprobs")
    tools, forced = _tools(body)
    prompt = chat_prompt(service.tokenizer, body, tools)
    wanted = Wanted(_max_tokens(body), _logprobs(body), structured_outputs(body, forced))
    most = 1 if body.parallel_tool_calls is False else None
    parsers = [ToolParser(most, inside=bool(forced)) for _ in range(body.n or 1)] if tools else []
    return ChatAnswer(service, body, requests(service, body, [prompt], wanted), parsers)


def _tools(body: ChatBody) -> tuple[list[Tool], list[Tool]]:
    """The tools that may be called, and those one of which must be."""
    choice, tools = body.tool_choice, list(body.tools or ())
    if choice is not None and choice != "none" and not tools:
        raise ApiError(400, "tool_choice is set without tools: give tools, or leave it out", param="tool_choice")
    if choice == "none":
        return [], []
    if any(tool.function.strict for tool in tools) and choice in (None, "auto"):
        raise ApiError(400, "tools: strict functions need tool_choice 'required' or a named one", param="tools")
    forced = tools if choice == "required" else []
    if isinstance(choice, NamedTool):
        forced = [tool for tool in tools if tool.function.name == choice.function.name]
        if not forced:
            name = choice.function.name
            raise ApiError(400, f"tool_choice names {name!r}, which is none of the tools", param="tool_choice")
    if tools and not forced and structured_outputs(body) is not None:
        raise ApiError(400, "tools: an answer of a given form calls none, so leave one out", param="tools")
    return tools, forced


def _max_tokens(body: ChatBody) -> int | None:
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise ApiError(
            400,
            "max_tokens and max_completion_tokens are both set: leave out max_tokens",
            param="max_completion_tokens",
        )
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if most == 0:
        raise ApiError(400, "max_tokens is 0: give at least 1", param="max_tokens")
    return most


def _logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: set it to true", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _delta(part: Part) -> dict[str, Any]:
    if isinstance(part, Said):
        return {"content": part.text}
    call: dict[str, Any] = {"index": part.index}
    if isinstance(part, Called):
        call |= {"id": f"call_{secrets.token_hex(12)}", "type": "function"}
        call["function"] = {"name": part.name, "arguments": ""}
    else:
        call["function"] = {"arguments": part.text}
    return {"tool_calls": [call]}
