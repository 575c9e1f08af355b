"""`speculation.trace`: which step committed which token, and the tree it was chosen from."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import openai
import pytest

from tests.server.running import Running
from tests.server.test_cancel import post
from tests.server.test_streaming import WINGS, raw_events

MESSAGES: Any = [{"role": "user", "content": "fly"}]
BODY: dict[str, Any] = {"messages": MESSAGES, "temperature": 0, "max_tokens": 40, "return_token_ids": True}
TRACED: dict[str, Any] = BODY | {"ignore_eos": True, "speculation": {"trace": True}}


def check(tokens: list[dict[str, Any]], steps: list[dict[str, Any]], text: str, ids: list[int]) -> None:
    """Trees and paths say of every token where it comes from, in order and without a gap."""
    assert "".join(token["text"] for token in tokens) == text
    assert [token["id"] for token in tokens] == ids
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    place = 0
    for step in steps:
        tree, path = step["tree"], step["path"]
        assert {len(column) for column in tree.values()} == {len(tree["tokens"])}
        assert tree["parents"][0] == -1 and tree["depths"][0] == 0
        assert tree["depths"][1:] == [tree["depths"][parent] + 1 for parent in tree["parents"][1:]]
        assert [tree["parents"][node] for node in path] == [0, *path][: len(path)]
        assert step["checked"] == sum(parent in (0, *path) for parent in tree["parents"])
        own = tokens[place : place + step["committed"]]
        place += step["committed"]
        assert {token["step"] for token in own} == {step["step"]}
        assert [token["id"] for token in own][: len(path)] == [tree["tokens"][node] for node in path]
        assert [token["drafted"] for token in own] == [True] * len(path) + [False] * (len(own) - len(path))
        if place < len(ids):
            assert len(own) == len(path) + 1
            assert steps[step["step"]]["tree"]["tokens"][0] == own[-1]["id"]
    assert place == len(ids)


def gathered(found: list[Any]) -> dict[int, dict[str, Any]]:
    """Choices of a raw stream, put together."""
    choices: dict[int, dict[str, Any]] = defaultdict(lambda: {"tokens": [], "steps": [], "text": "", "ids": []})
    for event in found:
        for choice in event["choices"]:
            own, trace = choices[choice["index"]], choice.get("speculation", {"tokens": [], "steps": []})
            text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            assert "".join(token["text"] for token in trace["tokens"]) == text
            own["text"] += text
            own["tokens"] += trace["tokens"]
            own["steps"] += trace["steps"]
            own["ids"] += choice.get("token_ids", [])
    return choices


def test_a_stream_read_with_openais_client(client: openai.OpenAI) -> None:
    tokens, steps, text = [], [], ""
    extra = {"ignore_eos": True, "speculation": {"trace": True}}
    for chunk in client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, max_tokens=40, stream=True, extra_body=extra
    ):
        text += chunk.choices[0].delta.content or ""
        if trace := (chunk.choices[0].model_extra or {}).get("speculation"):
            tokens += trace["tokens"]
            steps += trace["steps"]
    check(tokens, steps, text, [token["id"] for token in tokens])
    assert len(tokens) == 40
    assert max(len(step["path"]) for step in steps) > 2, "the target drafts for itself"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("extra", [{}, {"stream_single_tokens": True}, {"n": 3, "temperature": 1, "seed": 5}])
def test_streams(server: Running, path: str, extra: dict[str, Any]) -> None:
    body = TRACED | extra
    if path == "/v1/completions":
        body = {name: value for name, value in body.items() if name != "messages"} | {"prompt": ["fly", "by"]}
    choices = gathered(raw_events(server, path, body)[:-1])
    assert len(choices) == extra.get("n", 1) * (2 if path == "/v1/completions" else 1)
    for own in choices.values():
        check(own["tokens"], own["steps"], own["text"], own["ids"])


def test_whole_replies_hold_the_same(server: Running) -> None:
    streamed = gathered(raw_events(server, "/v1/chat/completions", TRACED)[:-1])[0]
    choice = post(server, TRACED, "/v1/chat/completions").json()["choices"][0]
    assert choice["speculation"] == {"tokens": streamed["tokens"], "steps": streamed["steps"]}
    assert choice["message"]["content"] == streamed["text"]


def test_letters_of_several_tokens(server: Running) -> None:
    """A letter belongs to the token that completes it, and is never cut."""
    own = gathered(raw_events(server, "/v1/chat/completions", TRACED | {"logits_processors": ["wings"]})[:-1])[0]
    assert own["text"].startswith(WINGS)
    assert {token["text"] for token in own["tokens"]} >= {"ü", "翼", "🪽", ""}
    assert "\ufffd" not in "".join(token["text"] for token in own["tokens"])


def test_stop_strings_take_their_letters_from_the_tokens(server: Running) -> None:
    body = TRACED | {"logits_processors": ["listing"], "stop": ["e, t"]}
    own = gathered(raw_events(server, "/v1/chat/completions", body)[:-1])[0]
    assert own["text"] == "on"
    check(own["tokens"], own["steps"], "on", own["ids"])


def test_speculation_off_has_roots_only(server: Running) -> None:
    on = post(server, TRACED, "/v1/chat/completions").json()["choices"][0]
    off = post(server, TRACED | {"speculation": {"off": True, "trace": True}}, "/v1/chat/completions").json()
    tokens, steps = (off["choices"][0]["speculation"][name] for name in ("tokens", "steps"))
    check(tokens, steps, on["message"]["content"], on["token_ids"])
    assert {len(step["tree"]["tokens"]) for step in steps} == {1}
    assert not any(token["drafted"] for token in tokens)


def test_a_requests_floor_bounds_its_trees(server: Running) -> None:
    """No node is less likely, as its score says (to four places), and a floor of 0 is none."""
    depths = []
    for floor in (None, 0.0, 0.5, 0.999):
        body = TRACED | {"speculation": {"trace": True, "floor": floor}}
        choice = post(server, body, "/v1/chat/completions").json()["choices"][0]
        steps = choice["speculation"]["steps"]
        check(choice["speculation"]["tokens"], steps, choice["message"]["content"], choice["token_ids"])
        assert all(score >= math.log(floor or 1e-99) - 1e-4 for step in steps for score in step["tree"]["scores"])
        depths.append(sum(max(step["tree"]["depths"]) for step in steps))
    assert depths[0] == depths[1] > depths[2] > 0


def test_usage_agrees(server: Running) -> None:
    reply = post(server, TRACED, "/v1/chat/completions").json()
    steps = reply["choices"][0]["speculation"]["steps"]
    details = reply["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == sum(len(step["path"]) for step in steps)
    drafted = sum(len(step["tree"]["tokens"]) - 1 for step in steps)
    assert details["rejected_prediction_tokens"] == drafted - details["accepted_prediction_tokens"]


def test_with_tools_the_text_is_the_one_before_parsing(server: Running) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    body = TRACED | {"ignore_eos": False, "max_tokens": 120, "tools": [tool], "logits_processors": ["call"]}
    found = raw_events(server, "/v1/chat/completions", body)[:-1]
    traces = [event["choices"][0].get("speculation", {"tokens": []}) for event in found]
    assert "".join(token["text"] for trace in traces for token in trace["tokens"]).startswith("Let me see. <tool_call>")


def test_not_there_unless_asked_for(server: Running) -> None:
    for extra in ({}, {"speculation": {}}, {"speculation": {"trace": False}}):
        for event in raw_events(server, "/v1/chat/completions", BODY | extra)[:-1]:
            assert "speculation" not in event["choices"][0]
    assert "speculation" not in post(server, BODY, "/v1/chat/completions").json()["choices"][0]


@pytest.mark.parametrize(
    ("extra", "word"),
    [
        ({"speculation": {"trace": 1}}, "speculation.trace"),
        ({"speculation": {"traced": True}}, "speculation.traced is not supported"),
        ({"speculation": {"trace": True}, "max_tokens": 0, "echo": True}, "speculation.trace needs output"),
    ],
)
def test_bad_values(server: Running, extra: dict[str, Any], word: str) -> None:
    reply = post(server, {"prompt": "x"} | extra)
    assert reply.status_code == 400
    assert word in reply.json()["error"]["message"]
