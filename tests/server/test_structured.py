"""Answers of a given form, over HTTP."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import openai
import pytest

from alula.model.load import LoadedModel
from alula.sequence import SamplingParams
from alula.server.protocol import Tool
from alula.server.structure import call_schema
from alula.structured import StructuredOutputsParams
from tests.server.running import Running, build_engine, serving
from tests.server.test_cancel import BYSTANDER, Leaver, post, wait_for
from tests.server.test_chat import HELLO, create, streamed
from tests.server.test_completions import offline

SCHEMA = {
    "type": "object",
    "properties": {"bird": {"enum": ["alula", "swift"]}, "wings": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["bird", "wings"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "bird", "schema": SCHEMA, "strict": True}}


def test_json_schema(client: openai.OpenAI, tiny: LoadedModel) -> None:
    wanted = StructuredOutputsParams(json=SCHEMA)
    for seed in range(3):
        options = {"response_format": FORMAT, "seed": seed, "max_tokens": 120}
        whole, pieces = create(client, **options).choices[0], streamed(client, **options)[0]
        params = SamplingParams(max_tokens=120, seed=seed, temperature=1.0, structured_outputs=wanted)
        plain = offline(tiny, tiny.tokenizer.render_chat(HELLO), **vars(params)).outputs[0]
        assert whole.message.content == pieces["content"] == plain.text
        if whole.finish_reason == "stop":
            found = json.loads(whole.message.content)
            assert found["bird"] in ("alula", "swift") and 0 <= found["wings"] <= 9


@pytest.mark.parametrize(
    ("form", "fits"),
    [
        ({"choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"regex": "[0-9]{3}-[a-f]{2}"}, lambda text: len(text) == 6 and text[3] == "-"),
        ({"grammar": 'root ::= "a" | "b" root'}, lambda text: text == "b" * (len(text) - 1) + "a"),
        ({"json": SCHEMA, "disable_any_whitespace": True}, lambda text: set(json.loads(text)) == {"bird", "wings"}),
    ],
)
def test_structured_outputs(server: Running, form: dict[str, Any], fits: Any) -> None:
    body = {"prompt": "x", "max_tokens": 100, "seed": 1, "logit_bias": {"65": 5}, "structured_outputs": form}
    found = post(server, body).json()
    assert found["choices"][0]["finish_reason"] == "stop"
    assert fits(found["choices"][0]["text"])
    off = post(server, body | {"speculation": {"off": True}}).json()
    assert off["choices"][0]["text"] == found["choices"][0]["text"]


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_before_a_response_format_is_free(client: openai.OpenAI, tiny: LoadedModel, stream: bool) -> None:
    """Anything up to the marker, the schema from the next character on, and the text of the offline engine."""
    marker, most = "e", 100
    bias = {tiny.tokenizer.encode(marker)[0]: 5.0}
    wanted = StructuredOutputsParams(json=SCHEMA, free_until=marker)
    finished = 0
    for seed in range(4):
        options = {"response_format": FORMAT, "seed": seed, "max_tokens": most, "extra_body": {"free_until": marker}}
        options["logit_bias"] = {str(token): value for token, value in bias.items()}
        if stream:
            text, end = (lambda found: (found["content"], found["end"]))(streamed(client, **options)[0])
        else:
            choice = create(client, **options).choices[0]
            text, end = choice.message.content, choice.finish_reason
        params = SamplingParams(max_tokens=most, seed=seed, temperature=1.0, structured_outputs=wanted, logit_bias=bias)
        plain = offline(tiny, tiny.tokenizer.render_chat(HELLO), **vars(params)).outputs[0]
        assert text == plain.text
        free, _, form = text.partition(marker)
        if end == "stop" and form:
            assert not free.startswith("{")
            assert json.loads(form)["bird"] in ("alula", "swift")
            finished += 1
    assert finished >= 2


def test_json_object_and_text(client: openai.OpenAI) -> None:
    found = create(client, response_format={"type": "json_object"}, max_tokens=60, seed=2).choices[0]
    assert found.message.content.lstrip().startswith("{")
    plain = [
        create(client, max_tokens=8, seed=2, **more).choices[0] for more in ({}, {"response_format": {"type": "text"}})
    ]
    assert plain[0].message.content == plain[1].message.content


@pytest.mark.parametrize(
    ("extra", "param", "word"),
    [
        ({"response_format": FORMAT, "structured_outputs": {"regex": "a"}}, "response_format", "both"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format", "xml"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "choice"),
        ({"structured_outputs": {"grammar": "root ::= nothing"}}, "structured_outputs", "compiled"),
        ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs", "look-around"),
        ({"structured_outputs": {"colour": "red"}}, "structured_outputs", "colour"),
        ({"free_until": "</think>"}, "free_until", "response_format"),
        ({"free_until": "", "response_format": FORMAT}, "free_until", "at least 1"),
        ({"free_until": 3, "response_format": FORMAT}, "free_until", "string"),
        ({"free_until": "x", "response_format": {"type": "text"}}, "free_until", "response_format"),
        ({"free_until": "x", "structured_outputs": {"regex": "a"}}, "free_until", "response_format"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_form_that_cannot_be_is_a_400_before_any_stream(
    server: Running, extra: dict[str, Any], param: str, word: str, stream: bool
) -> None:
    reply = post(server, {"prompt": "x", "stream": stream} | extra)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == param
    assert word in error["message"]


def test_a_schema_that_cannot_be_compiled_is_told_in_the_clients_words(server: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    error = post(server, {"messages": HELLO, "response_format": named}, "/v1/chat/completions").json()["error"]
    assert error["param"] == "response_format"
    assert "nowhere" in error["message"] and "structured_outputs" not in error["message"]


LOOK = {"type": "function", "function": {"name": "look", "strict": True, "parameters": SCHEMA}}
REST = {
    "type": "function",
    "function": {
        "name": "rest",
        "parameters": {
            "type": "object",
            "properties": {"how": {"$ref": "#/$defs/how"}},
            "required": ["how"],
            "$defs": {"how": {"enum": ["long", "well"]}},
        },
    },
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "rest"}}])
def test_calls_can_be_forced(client: openai.OpenAI, choice: Any) -> None:
    names = set()
    for seed in range(3):
        options = {"tools": [LOOK, REST], "tool_choice": choice, "seed": seed, "max_tokens": 150}
        options["extra_body"] = {"truncate_prompt_tokens": 40}
        whole, pieces = create(client, **options).choices[0], streamed(client, **options)[0]
        if whole.finish_reason == "length":
            continue
        assert whole.finish_reason == pieces["end"] == "tool_calls"
        assert whole.message.content is None
        call = whole.message.tool_calls[0].function
        assert [(found["name"], found["text"]) for found in pieces["calls"].values()] == [(call.name, call.arguments)]
        arguments = json.loads(call.arguments)
        assert arguments["how"] in ("long", "well") if call.name == "rest" else set(arguments) == {"bird", "wings"}
        names.add(call.name)
    assert names and (choice == "required" or names == {"rest"})


def test_references_of_several_tools_stay_their_own() -> None:
    other = {"type": "function", "function": REST["function"] | {"name": "other"}}
    schema = call_schema([Tool.model_validate(REST), Tool.model_validate(other)])
    found = [call["properties"]["arguments"]["properties"]["how"]["$ref"] for call in schema["anyOf"]]
    assert found == [f"#/anyOf/{place}/properties/arguments/$defs/how" for place in (0, 1)]


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"tools": [LOOK]}, "tools"),
        ({"tools": [REST], "response_format": FORMAT}, "tools"),
        ({"tools": [REST], "tool_choice": "required", "response_format": FORMAT}, "response_format"),
        ({"tools": [REST], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_what_tools_cannot_promise_is_refused(server: Running, extra: dict[str, Any], param: str) -> None:
    reply = post(server, {"messages": HELLO} | extra, "/v1/chat/completions")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_a_grammar_that_never_accepts_ends_at_max_tokens_and_harms_nobody(server: Running, tiny: LoadedModel) -> None:
    replies: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: replies.append(post(server, BYSTANDER)))
    thread.start()
    form = {"grammar": 'root ::= "a" root'}
    found = post(server, {"prompt": "x", "max_tokens": 40, "structured_outputs": form}).json()
    thread.join()
    assert found["choices"][0]["finish_reason"] == "length"
    assert found["choices"][0]["text"] == "a" * 40
    assert replies[0].json()["choices"][0]["text"] == offline(tiny, "by", max_tokens=60).outputs[0].text


def test_forms_that_nobody_waits_for_any_more_are_bounded(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alula.server.bridge.MOST_FORMS", 2)
    engine, go = build_engine(tiny), threading.Event()
    compiled = engine.grammars._compile
    monkeypatch.setattr(engine.grammars, "_compile", lambda wanted: go.wait(30) and compiled(wanted))
    bodies = [{"prompt": "x", "max_tokens": 9, "structured_outputs": {"choice": [text]}} for text in ("a", "b", "c")]
    with serving(engine) as server:
        late = [post(server, body | {"timeout_s": 0.05}) for body in bodies]
        assert [reply.status_code for reply in late] == [400, 400, 429]
        assert int(late[2].headers["retry-after"]) >= 1 and server.bridge.samples == 0
        go.set()
        wait_for(lambda: post(server, bodies[2]).status_code == 200)
        server.idle()


def test_whoever_waits_for_a_grammar_can_leave_or_run_out_of_time(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, go = build_engine(tiny), threading.Event()
    compiled = engine.grammars._compile
    monkeypatch.setattr(engine.grammars, "_compile", lambda wanted: go.wait(30) and compiled(wanted))
    body = {"prompt": "x", "max_tokens": 9, "structured_outputs": {"choice": ["yes", "no"]}}
    with serving(engine) as server:
        leaver = Leaver(server, body | {"stream": True})
        wait_for(lambda: server.bridge.samples == 1)
        assert post(server, BYSTANDER | {"max_tokens": 2}).status_code == 200, "nobody else waits"
        late = post(server, body | {"timeout_s": 0.1})
        assert (late.status_code, late.json()["error"]["code"]) == (400, "deadline_exceeded")
        named = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}}
        late = post(server, {"prompt": "x", "timeout_s": 0.1} | named)
        assert late.json()["error"]["param"] == "response_format"
        assert late.json()["error"]["message"].startswith("response_format took longer")
        leaver.leave()
        wait_for(lambda: server.bridge.samples == 0)
        go.set()
        assert post(server, body).json()["choices"][0]["text"] in ("yes", "no")
        server.idle()
