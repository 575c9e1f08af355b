"""/v1/chat/completions through OpenAI's own client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from alula.model.load import LoadedModel
from tests.server.conftest import CALL
from tests.server.test_completions import offline

HELLO = [{"role": "user", "content": "hello"}]
NGRAM = {"drafter": "ngram"}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def create(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(**({"model": "tiny", "messages": HELLO} | options))


def streamed(client: openai.OpenAI, **options: Any) -> dict[int, dict[str, Any]]:
    """Per choice, the message, logprobs and end that the chunks add up to."""
    found: dict[int, dict[str, Any]] = {}
    for event in create(client, stream=True, **options):
        for choice in event.choices:
            start = {"content": "", "calls": {}, "tokens": [], "end": None, "roles": []}
            entry = found.setdefault(choice.index, start)
            entry["content"] += choice.delta.content or ""
            entry["roles"] += [choice.delta.role] if choice.delta.role else []
            entry["end"] = choice.finish_reason or entry["end"]
            if choice.logprobs is not None:
                entry["tokens"] += [token.token for token in choice.logprobs.content]
            for call in choice.delta.tool_calls or ():
                known = entry["calls"].setdefault(call.index, {"id": call.id, "name": call.function.name, "text": ""})
                known["text"] += call.function.arguments or ""
    return found


def test_the_text_is_that_of_the_offline_engine(client: openai.OpenAI, tiny: LoadedModel) -> None:
    prompt = tiny.tokenizer.render_chat(HELLO)
    plain = offline(tiny, prompt, temperature=0.7, seed=4, n=3, max_tokens=24)
    options = {"temperature": 0.7, "seed": 4, "n": 3, "max_completion_tokens": 24, "extra_body": {"ignore_eos": True}}
    whole, pieces = create(client, **options), streamed(client, **options)
    texts = [sample.text for sample in plain.outputs]
    assert len(set(texts)) == 3
    assert [choice.message.content for choice in whole.choices] == texts
    assert [pieces[choice]["content"] for choice in range(3)] == texts
    assert all(pieces[choice]["roles"] == ["assistant"] for choice in range(3))
    assert whole.usage.prompt_tokens == len(plain.prompt_token_ids)


def test_logprobs(client: openai.OpenAI, tiny: LoadedModel) -> None:
    prompt, shown = tiny.tokenizer.render_chat(HELLO), {"skip_special_tokens": False}
    plain = offline(tiny, prompt, logprobs=3, max_tokens=16, **shown).outputs[0]
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "logprobs": True, "top_logprobs": 3}
    options["extra_body"] = {"ignore_eos": True} | shown
    whole = create(client, **options).choices[0]
    assert plain.logprobs is not None
    assert [entry.logprob for entry in whole.logprobs.content] == pytest.approx([e.logprob for e in plain.logprobs])
    assert all(len(entry.top_logprobs) == 3 for entry in whole.logprobs.content)
    spelled = b"".join(bytes(entry.bytes) for entry in whole.logprobs.content)
    assert spelled.decode("utf-8", "replace") == plain.text
    assert streamed(client, **options)[0]["tokens"] == [entry.token for entry in whole.logprobs.content]


@pytest.mark.parametrize("processor", ["call", "two calls"])
def test_tool_calls(client: openai.OpenAI, processor: str) -> None:
    options = {"tools": [LOOK], "extra_body": {"logits_processors": [processor], "speculation": NGRAM}}
    choice, pieces = create(client, **options).choices[0], streamed(client, **options)[0]
    calls = choice.message.tool_calls
    assert choice.finish_reason == pieces["end"] == "tool_calls"
    assert choice.message.content == ("Let me see." if processor == "call" else None)
    assert pieces["content"] == (choice.message.content or "")
    assert [call.function.name for call in calls] == (["look"] if processor == "call" else ["look", "rest"])
    assert json.loads(calls[0].function.arguments) == {"at": 'a "bird"', "times": [1, 2]}
    assert [(call["name"], call["text"]) for call in pieces["calls"].values()] == [
        (call.function.name, call.function.arguments) for call in calls
    ]
    ids = [call.id for call in calls] + [call["id"] for call in pieces["calls"].values()]
    assert len(set(ids)) == len(ids) and all(ids)


def test_parallel_calls_can_be_refused(client: openai.OpenAI) -> None:
    options = {
        "tools": [LOOK],
        "parallel_tool_calls": False,
        "extra_body": {"logits_processors": ["two calls"], "speculation": NGRAM},
    }
    assert len(create(client, **options).choices[0].message.tool_calls) == 1
    assert list(streamed(client, **options)[0]["calls"]) == [0]


def test_without_tools_a_call_is_text(client: openai.OpenAI) -> None:
    for options in ({}, {"tools": [LOOK], "tool_choice": "none"}):
        choice = create(client, **options, extra_body={"logits_processors": ["call"], "speculation": NGRAM}).choices[0]
        assert choice.message.content == f"Let me see. {CALL}"
        assert (choice.message.tool_calls, choice.finish_reason) == (None, "stop")


def test_tools_and_their_answers_reach_a_template_that_knows_none(client: openai.OpenAI) -> None:
    """Offered in the system message, called and answered in the text."""
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "a bird"},
    ]
    asked = {"messages": messages, "tools": [LOOK], "max_tokens": 1, "extra_body": {"return_token_ids": True}}
    ids = create(client, **asked).prompt_token_ids
    text = client.post("/../detokenize", body={"tokens": ids}, cast_to=object)["prompt"]  # type: ignore[index]
    assert '"name": "look"' in text.split("<|user|>")[0]
    assert '<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>' in text
    assert "<tool_response>\na bird\n</tool_response>" in text
    assert text.endswith("<|assistant|>")


def test_the_last_message_can_be_continued(client: openai.OpenAI, tiny: LoadedModel) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "one, two"}]
    body = {"continue_final_message": True, "return_token_ids": True, "ignore_eos": True}
    found = create(client, messages=messages, temperature=0, max_tokens=6, extra_body=body)
    prompt = "<|user|>hello<|end|><|assistant|>one, two"
    assert found.prompt_token_ids == tiny.tokenizer.encode(prompt)
    assert found.choices[0].message.content == offline(tiny, prompt, max_tokens=6).outputs[0].text
    with pytest.raises(openai.BadRequestError, match="continue_final_message"):
        create(client, messages=messages, extra_body={"continue_final_message": True, "add_generation_prompt": True})


def test_text_parts_and_the_developer_role(client: openai.OpenAI, tiny: LoadedModel) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    found = create(client, messages=messages, max_tokens=1, extra_body={"return_token_ids": True})
    prompt = "<|system|>be brief<|end|><|user|>hello<|end|><|assistant|>"
    assert found.prompt_token_ids == tiny.tokenizer.encode(prompt)


def test_without_a_limit_the_answer_fills_the_context(client: openai.OpenAI) -> None:
    found = create(client, messages=[{"role": "user", "content": "x" * 480}], extra_body={"ignore_eos": True})
    assert found.choices[0].finish_reason == "length"
    assert found.usage.total_tokens == 512
