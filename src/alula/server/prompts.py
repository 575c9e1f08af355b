"""From messages and texts to token ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from alula.config import AlulaError
from alula.server.errors import ApiError
from alula.server.protocol import ChatBody, Message, Prompt, TokenizeBody, Tool, is_deep
from alula.server.tools import CLOSE, OPEN
from alula.text import Tokenizer

_RESERVED = {
    *("messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message", "documents"),
    *("self", "conversations", "return_assistant_tokens_mask"),
}
"""What the functions that render templates call their own parameters."""


def chat_prompt(tokenizer: Tokenizer, body: ChatBody | TokenizeBody, tools: Sequence[Tool]) -> list[int]:
    """Token ids of the conversation in the model's template. Raises ApiError for what the template cannot say."""
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise ApiError(
            400,
            "continue_final_message goes on with the last message, and add_generation_prompt begins a new one: set one",
            param="continue_final_message",
        )
    variables = _variables(tokenizer, body)
    messages = [_plain(message) for message in body.messages or ()]
    functions = [tool.model_dump(exclude_none=True) for tool in tools]
    if not _knows_tools(tokenizer):
        messages = _without_tools(messages, functions)
        functions = []
    generate = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    try:
        return tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=generate,
            tools=functions or None,
            continue_final_message=continues,
            **variables,
        )
    except AlulaError as error:
        told = str(error)
        message = told if told.startswith("message") else f"messages: {told}"
        raise ApiError(400, message, param="messages") from None


def text_prompts(tokenizer: Tokenizer, prompt: Prompt, *, add_special_tokens: bool) -> list[list[int]]:
    """Token ids of each prompt of a completions request."""
    try:
        if isinstance(prompt, str):
            return [tokenizer.encode(prompt, add_special_tokens=add_special_tokens)]
        if isinstance(prompt[0], int):
            return [[token for token in prompt if isinstance(token, int)]]
        return [
            tokenizer.encode(entry, add_special_tokens=add_special_tokens) if isinstance(entry, str) else list(entry)
            for entry in prompt
        ]
    except AlulaError as error:
        raise ApiError(400, f"prompt: {error}", param="prompt") from None


def _variables(tokenizer: Tokenizer, body: ChatBody | TokenizeBody) -> dict[str, Any]:
    variables = dict(body.chat_template_kwargs or {})
    if taken := sorted(_RESERVED & variables.keys()):
        raise ApiError(
            400, f"chat_template_kwargs sets {taken[0]!r}, which is not the client's: leave it out", param=taken[0]
        )
    if isinstance(body, ChatBody) and body.reasoning_effort is not None:
        if "reasoning_effort" not in (tokenizer.chat_template or ""):
            raise ApiError(
                400,
                "reasoning_effort is not known to this model's chat template: leave it out",
                param="reasoning_effort",
            )
        variables["reasoning_effort"] = body.reasoning_effort
    return variables


def _plain(message: Message) -> dict[str, Any]:
    """As templates want it: text in one piece, arguments of calls as objects."""
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    plain: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": content or "",
    }
    for name in ("name", "tool_call_id"):
        if getattr(message, name) is not None:
            plain[name] = getattr(message, name)
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return plain


def _arguments(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if is_deep(value) else value


def _knows_tools(tokenizer: Tokenizer) -> bool:
    return "tools" in (tokenizer.chat_template or "")


def _without_tools(messages: list[dict[str, Any]], functions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For templates that know no tools: offered in the system message, called and answered in the text."""
    told = [_as_text(message) for message in messages]
    if not functions:
        return told
    offer = "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
    system = (
        f"You can call functions. Their signatures:\n<tools>\n{offer}\n</tools>\n"
        f'To call one, write {OPEN}{{"name": ..., "arguments": {{...}}}}{CLOSE} and nothing else.'
    )
    if told and told[0]["role"] == "system":
        return [told[0] | {"content": f"{told[0]['content']}\n\n{system}"}, *told[1:]]
    return [{"role": "system", "content": system}, *told]


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [
        f"{OPEN}{json.dumps(call['function'], ensure_ascii=False)}{CLOSE}" for call in message.get("tool_calls", ())
    ]
    return {"role": message["role"], "content": "\n".join([content, *calls] if content else calls or [content])}
