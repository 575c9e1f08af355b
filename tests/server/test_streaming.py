"""What a chunk may hold: whole characters, nothing a stop string takes back, logprobs that belong to its text."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alula.sequence import FinishReason, SamplingParams, TokenEvent, TokenLogprobs
from alula.server.chunks import Aligner, Chunk, merged
from alula.text import TextStream, Tokenizer
from tests.server.running import Running
from tests.text.conftest import TOKENIZERS

WINGS = "Flügel, 翼 🪽 wings"


def events(tokenizer: Tokenizer, tokens: list[int], runs: list[int], stop: tuple[str, ...]) -> list[TokenEvent]:
    """What commits of so many tokens each would say."""
    stream, found, place = TextStream(tokenizer, SamplingParams(stop=stop)), [], 0
    while place < len(tokens):
        run = tokens[place : place + (runs.pop() if runs else 1)]
        place += len(run)
        text, ends, stopped = "", [], None
        for count, token in enumerate(run, start=1):
            delta, stopped = stream.feed(token)
            text += delta
            ends.append(len(stream.text))
            if stopped is not None:
                run = run[:count]
                break
        end = FinishReason.STOP if stopped is not None else FinishReason.LENGTH if place >= len(tokens) else None
        text += stream.finish() if end else ""
        logprobs = tuple(TokenLogprobs(token, -1.0, 1, ()) for token in run)
        found.append(TokenEvent(0, tuple(run), text, tuple(ends), logprobs, end, stopped))
        if end is not None:
            break
    return found


def chunks(found: list[TokenEvent], *, single: bool = False) -> list[Chunk]:
    aligner = Aligner(single=single)
    return [chunk for event in found for chunk in aligner.feed(event)]


tokens = st.lists(st.sampled_from([*b"hello<|", 0xE7, 0xBF, 0xBC, 0xC3]), min_size=1, max_size=30)
runs = st.lists(st.integers(1, 6), max_size=30)
stops = st.sampled_from([(), ("llo",), ("l<|", "eh"), ("hello",)])


@settings(max_examples=200, deadline=None)
@given(tokens, runs, runs, stops, st.booleans())
def test_the_message_does_not_depend_on_how_it_was_cut(
    data: list[int], first: list[int], second: list[int], stop: tuple[str, ...], single: bool
) -> None:
    tokenizer = TOKENIZERS["bytes"]
    ids = [_id(tokenizer, byte) for byte in data]
    one, other = (chunks(events(tokenizer, ids, list(cut), stop), single=single) for cut in (first, second))
    assert merged(one) == merged(other)
    for chunk in one:
        assert chunk.logprobs is not None
        assert [entry.token for entry in chunk.logprobs] == list(chunk.tokens)
        assert len(chunk.ends) == len(chunk.tokens)
        if chunk.tokens:
            assert chunk.ends[-1] <= chunk.start + len(chunk.text)
            assert chunk.ends[-1] == chunk.start + len(chunk.text) or chunk.finish_reason is not None
    starts = [chunk.start for chunk in one]
    assert starts == [sum(len(chunk.text) for chunk in one[:place]) for place in range(len(one))]
    if single:
        assert all(len(chunk.tokens) <= 1 for chunk in one)
    text = "".join(chunk.text for chunk in one)
    assert not any(word in text for word in stop)


def _id(tokenizer: Tokenizer, byte: int) -> int:
    return next(token for token in range(256) if tokenizer.token_bytes(token) == bytes([byte]))


def raw_events(server: Running, path: str, body: dict[str, Any]) -> list[Any]:
    """The stream as it is sent."""
    with httpx.stream("POST", f"{server.url}{path}", json=body | {"stream": True}, timeout=60) as reply:
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith("text/event-stream")
        text = reply.read().decode()
    assert text.endswith("\n\n")
    lines = [event.removeprefix("data: ") for event in text.split("\n\n")[:-1]]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def test_the_form_of_a_chat_stream(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "logits_processors": ["wings"]}
    *found, done = raw_events(server, "/v1/chat/completions", body)
    assert done == "[DONE]"
    deltas = [event["choices"][0]["delta"] for event in found]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    assert "".join(delta.get("content", "") for delta in deltas) == WINGS
    assert not any("\ufffd" in delta.get("content", "") for delta in deltas)
    assert [event["choices"][0]["finish_reason"] for event in found] == [None] * (len(found) - 1) + ["stop"]
    assert len({event["id"] for event in found}) == 1


def test_h12_tokens_one_by_one(server: Running) -> None:
    """vLLM #45678: clients that want each token for itself."""
    body = {"prompt": "hello", "temperature": 0, "max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
    several = raw_events(server, "/v1/completions", body)[:-1]
    single = raw_events(server, "/v1/completions", body | {"stream_single_tokens": True})[:-1]
    counts = [[len(event["choices"][0]["token_ids"]) for event in found] for found in (several, single)]
    assert max(counts[0]) > 2
    assert counts[1] == [1] * 24
    texts = ["".join(event["choices"][0]["text"] for event in found) for found in (several, single)]
    assert texts[0] == texts[1]


def test_no_beginning_of_a_stop_string_is_sent(server: Running) -> None:
    body = {"prompt": [258], "max_tokens": 40, "logits_processors": ["listing"], "stop": [", three, five", "four"]}
    found = [event["choices"][0] for event in raw_events(server, "/v1/completions", body | {"logprobs": 0})[:-1]]
    texts = [choice["text"] for choice in found]
    assert "".join(texts) == "one, two, three, "
    for place, choice in enumerate(found[:-1], start=1):
        text = "".join(texts[:place])
        assert not text.endswith((", thr", ", thre", ", three", ", th", "fo", "f"))
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert "".join(token for choice in found for token in choice["logprobs"]["tokens"]) == "one, two, three, four"


@pytest.mark.parametrize("include", [True, False])
def test_c5_nothing_past_a_stop_string_is_returned(client: openai.OpenAI, include: bool) -> None:
    """vLLM #47616, over HTTP: text, logprobs, offsets and usage end together."""
    found = client.completions.create(
        model="tiny",
        prompt=[258],
        max_tokens=40,
        logprobs=2,
        stop=["two"],
        extra_body={"logits_processors": ["listing"], "include_stop_str_in_output": include},
    )
    choice = found.choices[0]
    assert choice.text == ("one, two" if include else "one, ")
    assert choice.logprobs is not None and found.usage is not None
    assert choice.logprobs.tokens == list("one, two")
    assert choice.logprobs.text_offset == [0, 1, 2, 3, 4, 5, *((6, 7) if include else (5, 5))]
    assert found.usage.completion_tokens == 8
