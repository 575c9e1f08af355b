"""What cannot be served is a 400 in OpenAI's shape that names the field, before any stream opens; never a 500."""

from __future__ import annotations

import inspect
import json
from typing import Any

import httpx
import pytest

from alula.model.load import LoadedModel
from alula.text import Tokenizer
from tests.server.running import Running, build_engine, serving
from tests.server.test_cancel import post

MESSAGES = [{"role": "user", "content": "x"}]
TOOL = {"type": "function", "function": {"name": "look"}}

COMMON: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 2.5}, "temperature"),
    ({"temperature": "0.5"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"frequency_penalty": 3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty"),
    ({"n": 0}, "n"),
    ({"n": 65}, "n"),
    ({"n": True}, "n"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
    ({"seed": 2**63}, "seed"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": "x" * 1025}, "stop"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"300": 1}}, "logit_bias"),
    ({"logit_bias": {" 1_0 ": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 1, "01": 2}}, "logit_bias"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"a": "\ud800"}}}},
        "response_format",
    ),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [300]}, "allowed_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"logits_processors": ["unheard of"]}, "logits_processors"),
    ({"speculation": {"nodes": 0}}, "speculation"),
    ({"speculation": {"nodes": 65}}, "speculation"),
    ({"speculation": {"depth": 33}}, "speculation"),
    ({"speculation": {"floor": 1}}, "speculation"),
    ({"speculation": {"floor": -0.1}}, "speculation"),
    ({"speculation": {"floor": "0.1"}}, "speculation"),
    ({"speculation": {"drafter": "unheard of"}}, "speculation"),
    ({"speculation": {"speed": 9}}, "speculation"),
    ({"speculation": True}, "speculation"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"timeout_s": 0}, "timeout_s"),
    ({"request_id": "no spaces"}, "request_id"),
    ({"bad_words": ["\ud800"]}, "bad_words"),
    ({"user": 3}, "user"),
    ({"best_of": 2}, "best_of"),
    ({"store": True}, "store"),
]
COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1, "x"]}, "prompt"),
    ({"prompt": [300]}, "prompt"),
    ({"prompt": ["x", ""]}, "prompt"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"suffix": "x"}, "suffix"),
    ({"messages": MESSAGES}, "messages"),
]
CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x", "weight": 1}]}, "messages"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
    ({"max_tokens": 4, "max_completion_tokens": 4}, "max_completion_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tools": []}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"chat_template_kwargs": {"messages": []}}, "messages"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"functions": []}, "functions"),
]


def _bodies() -> list[Any]:
    paths = {
        "/v1/completions": ({"prompt": "x"}, COMMON + COMPLETIONS),
        "/v1/chat/completions": ({"messages": MESSAGES}, COMMON + CHAT),
    }
    return [
        pytest.param(path, base | extra, param, id=f"{path.split('/')[2]}-{json.dumps(extra)[:60]}")
        for path, (base, cases) in paths.items()
        for extra, param in cases
    ]


@pytest.mark.parametrize(("path", "body", "param"), _bodies())
def test_each_is_a_400_that_names_the_field(server: Running, path: str, body: dict[str, Any], param: str) -> None:
    stream = {} if "stream_options" in body or body.get("stream") else {"stream": True}
    data = json.dumps(body | stream).encode()
    reply = httpx.post(f"{server.url}{path}", content=data, headers={"content-type": "application/json"}, timeout=60)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert param in error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff", b"[" * 100_000, b'{"prompt": NaN}'])
def test_what_is_no_object(server: Running, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        reply = httpx.post(f"{server.url}{path}", content=body, headers={"content-type": "application/json"})
        assert reply.status_code == 400
        assert reply.json()["error"]["message"]


def test_unknown_places(server: Running) -> None:
    assert post(server, {"prompt": "x", "model": "other"}).json()["error"]["code"] == "model_not_found"
    for path, method, status in (
        ("/nothing", "GET", 404),
        ("/v1/completions", "GET", 405),
        ("/v1/models/x", "GET", 404),
    ):
        reply = httpx.request(method, f"{server.url}{path}")
        assert reply.status_code == status
        assert reply.json()["error"]["message"]


def test_prompts_at_the_limit(server: Running) -> None:
    """d7, d9: a prompt may leave as little room as it likes; what does not fit is refused, alone."""
    for room in range(13):
        reply = post(server, {"prompt": "x" * (512 - room), "max_tokens": 4, "ignore_eos": True, "temperature": 0})
        if room < 4:
            error = reply.json()["error"]
            assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
            assert f"{512 - room} tokens" in error["message"] and "512" in error["message"]
        else:
            assert reply.json()["usage"]["completion_tokens"] == 4
    for room in (1, 2, 5):
        reply = post(server, {"prompt": "x" * (512 - room), "ignore_eos": True, "temperature": 0})
        assert reply.json()["usage"]["completion_tokens"] == room
    cut = post(server, {"prompt": "x" * 2000, "truncate_prompt_tokens": 8, "max_tokens": 2, "ignore_eos": True})
    assert cut.json()["usage"]["prompt_tokens"] == 8


def test_limits_of_the_server(tiny: LoadedModel) -> None:
    with serving(build_engine(tiny), max_prompt_tokens=10, max_output_tokens=6, max_samples=2) as server:
        assert post(server, {"prompt": "x" * 11}).json()["error"]["code"] == "context_length_exceeded"
        assert post(server, {"prompt": "x", "max_tokens": 7}).json()["error"]["param"] == "max_tokens"
        assert post(server, {"prompt": ["a", "b"], "n": 2}).json()["error"]["param"] == "n"
        found = post(server, {"prompt": "x", "ignore_eos": True}).json()
        assert found["usage"]["completion_tokens"] == 6
        long = [{"role": "user", "content": "x" * 9}]
        chat = post(server, {"messages": long}, "/v1/chat/completions").json()
        assert chat["error"]["code"] == "context_length_exceeded"


def test_tokenize_and_back(server: Running, tiny: LoadedModel) -> None:
    found = post(server, {"prompt": "hëllo", "return_token_strs": True}, "/tokenize").json()
    assert found["tokens"] == tiny.tokenizer.encode("hëllo")
    assert (found["count"], found["max_model_len"]) == (6, 512)
    assert found["token_strs"][:3] == ["h", "bytes:\\xc3", "bytes:\\xab"]
    assert post(server, {"tokens": found["tokens"]}, "/detokenize").json() == {"prompt": "hëllo"}
    chat = post(server, {"messages": MESSAGES, "add_generation_prompt": False}, "/tokenize").json()
    assert chat["tokens"] == tiny.tokenizer.encode("<|user|>x<|end|>")
    for body in ({}, {"prompt": "x", "messages": MESSAGES}):
        assert post(server, body, "/tokenize").status_code == 400
    assert post(server, {"tokens": [300]}, "/detokenize").status_code == 400


def test_models_and_version(server: Running) -> None:
    card = httpx.get(f"{server.url}/v1/models").json()["data"][0]
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 512)
    assert card == httpx.get(f"{server.url}/v1/models/tiny").json()
    assert set(card["drafters"]) == {"lm", "ngram", "none"}
    assert httpx.get(f"{server.url}/version").json()["version"]
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}


def test_messages_name_what_the_client_sent(server: Running) -> None:
    """Not the names that a validator has for alternatives, and all that the field may be."""
    for body, message in (
        ({"prompt": [1, "x"]}, "prompt.1: input should be a valid integer, or input should be a valid list"),
        ({"prompt": {}}, "prompt: input should be a valid string, or input should be a valid list"),
        ({"prompt": "x", "stop": 5}, "stop: input should be a valid string, or input should be a valid list"),
        ({"prompt": "x", "speculation": {"depth": "2"}}, "speculation.depth: input should be a valid integer"),
    ):
        assert post(server, body).json()["error"]["message"] == message


@pytest.mark.parametrize(
    ("body", "headers", "words"),
    [
        (b'{"prompt": ', {}, ["valid JSON", "character 11"]),
        (b'{"prompt": "\xff"}', {}, ["valid JSON", "UTF-8"]),
        (b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}", {}, ["valid JSON"]),
        (b"\x1f\x8b", {"content-encoding": "gzip"}, ["Content-Encoding"]),
        (b'{"prompt": "x"}', {"content-type": "application/x-www-form-urlencoded"}, ["urlencoded", "application/json"]),
    ],
)
def test_bodies_that_are_not_read_say_why(
    server: Running, body: bytes, headers: dict[str, str], words: list[str]
) -> None:
    sent = {"content-type": "application/json"} | headers
    reply = httpx.post(f"{server.url}/v1/completions", content=body, headers=sent)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] is None
    assert all(word in reply.json()["error"]["message"] for word in words)


def test_bodies_nest_only_so_deep(server: Running) -> None:
    """Deeper ones reached the end of Python's stack where they were walked, and were a 500."""
    schema: dict[str, Any] = {}
    for _ in range(600):
        schema = {"a": schema}
    tools = [{"type": "function", "function": {"name": "look", "parameters": schema}}]
    for extra in ({"tools": tools, "tool_choice": "required"}, {"chat_template_kwargs": schema}):
        reply = post(server, {"messages": MESSAGES} | extra, "/v1/chat/completions")
        assert reply.status_code == 400
        assert "deep" in reply.json()["error"]["message"]
    called = [{"id": "a", "function": {"name": "x", "arguments": "[" * 980 + "]" * 980}}]
    reply = post(server, {"messages": [{"role": "assistant", "tool_calls": called}]}, "/v1/chat/completions")
    assert reply.json()["error"]["code"] == "context_length_exceeded"


def test_template_variables_do_not_take_names_of_parameters(server: Running) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    functions = (Tokenizer.apply_chat_template, Tokenizer.render_chat, render_jinja_template)
    names = {name for function in functions for name in inspect.signature(function).parameters}
    for name in sorted(names - {"options", "variables", "kwargs"}):
        reply = post(server, {"messages": MESSAGES, "chat_template_kwargs": {name: 5}}, "/v1/chat/completions")
        assert reply.status_code == 400, name
        assert name in reply.json()["error"]["message"]


def test_a_prompt_that_was_not_read_to_its_end_has_no_scores(server: Running) -> None:
    body = {"prompt": "hello " * 60, "echo": True, "logprobs": 1, "timeout_s": 1e-9, "max_tokens": 2}
    choice = post(server, body).json()["choices"][0]
    assert (choice["stop_reason"], choice["text"]) == ("deadline", "hello " * 60)
    assert not choice["logprobs"] or choice["logprobs"]["tokens"] == []
