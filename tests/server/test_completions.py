"""/v1/completions through OpenAI's own client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from alula.engine.request import Request, RequestOutput
from alula.model.load import LoadedModel
from alula.sequence import SamplingParams
from tests.engine.tiny import EOS, engine_for, run
from tests.server.running import Running

LONG = {"ignore_eos": True}


def offline(model: LoadedModel, prompt: str, **params: Any) -> RequestOutput:
    """What plain decoding writes without a server."""
    wanted = SamplingParams(**({"ignore_eos": True} | params))
    return run(engine_for(model), [Request(tuple(model.tokenizer.encode(prompt)), wanted)])[0]


def streamed(stream: Any) -> dict[int, dict[str, Any]]:
    """Per choice, the text, logprobs and end that the chunks add up to."""
    found: dict[int, dict[str, Any]] = {}
    for event in stream:
        for choice in event.choices:
            entry = found.setdefault(choice.index, {"text": "", "tokens": [], "offsets": [], "end": None, "chunks": 0})
            entry["text"] += choice.text
            entry["chunks"] += 1
            entry["end"] = choice.finish_reason or entry["end"]
            if choice.logprobs is not None:
                entry["tokens"] += choice.logprobs.tokens
                entry["offsets"] += choice.logprobs.text_offset
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_that_of_the_offline_engine(client: openai.OpenAI, tiny: LoadedModel, temperature: float) -> None:
    for seed in range(3):
        plain = offline(tiny, f"hello {seed}", temperature=temperature, seed=seed, max_tokens=40).outputs[0]
        options = {"prompt": f"hello {seed}", "seed": seed, "temperature": temperature, "max_tokens": 40}
        whole = client.completions.create(model="tiny", **options, extra_body=LONG)  # type: ignore[call-overload]
        stream = client.completions.create(model="tiny", **options, stream=True, extra_body=LONG)  # type: ignore[call-overload]
        pieces = streamed(stream)[0]
        assert whole.choices[0].text == plain.text == pieces["text"]
        assert whole.choices[0].finish_reason == pieces["end"] == "length"
        assert pieces["chunks"] < 30, "several tokens at a time"
        assert whole.usage.completion_tokens == 40


def test_samples_of_several_prompts_come_in_order(client: openai.OpenAI, tiny: LoadedModel) -> None:
    prompts = ["one", "two"]
    options: dict[str, Any] = {
        "model": "tiny",
        "prompt": prompts,
        "n": 3,
        "seed": 5,
        "max_tokens": 12,
        "extra_body": LONG,
    }
    whole = client.completions.create(**options)
    pieces = streamed(client.completions.create(**options, stream=True))
    expected = [
        sample.text
        for prompt in prompts
        for sample in offline(tiny, prompt, n=3, seed=5, max_tokens=12, temperature=1.0).outputs
    ]
    assert len(set(expected)) == 6
    assert [choice.index for choice in whole.choices] == list(range(6))
    assert [choice.text for choice in whole.choices] == expected
    assert [pieces[choice]["text"] for choice in range(6)] == expected
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (6, 72)


def test_token_ids_as_prompts(client: openai.OpenAI, tiny: LoadedModel) -> None:
    ids = tiny.tokenizer.encode("hello")
    texts = [
        client.completions.create(model="tiny", prompt=prompt, temperature=0, max_tokens=8, extra_body=LONG)
        .choices[0]
        .text
        for prompt in ("hello", ids, [ids])
    ]
    assert len(set(texts)) == 1
    two = client.completions.create(model="tiny", prompt=[ids, ids[:2]], temperature=0, max_tokens=8, extra_body=LONG)
    assert two.choices[0].text == texts[0] != two.choices[1].text


def test_logprobs_are_those_of_the_offline_engine(client: openai.OpenAI, tiny: LoadedModel) -> None:
    plain = offline(tiny, "hello", max_tokens=20, logprobs=2).outputs[0]
    options: dict[str, Any] = {"model": "tiny", "prompt": "hello", "temperature": 0, "max_tokens": 20, "logprobs": 2}
    whole = client.completions.create(**options, extra_body=LONG | {"return_token_ids": True}).choices[0]
    pieces = streamed(client.completions.create(**options, stream=True, extra_body=LONG))[0]
    assert whole.token_ids == plain.token_ids  # type: ignore[attr-defined]
    assert whole.logprobs is not None
    assert plain.logprobs is not None
    assert whole.logprobs.token_logprobs == pytest.approx([entry.logprob for entry in plain.logprobs])
    assert whole.logprobs.tokens == pieces["tokens"]
    assert whole.logprobs.text_offset == pieces["offsets"]
    assert all(len(top) in (2, 3) for top in whole.logprobs.top_logprobs or ())
    assert len(pieces["tokens"]) == 20


def test_stop_strings(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 60, "stop": [", three", "never"]}
    names = {"logits_processors": ["listing"]}
    whole = client.completions.create(**options | {"prompt": [[258]]}, extra_body=names)
    pieces = streamed(client.completions.create(**options | {"prompt": [[258]]}, stream=True, extra_body=names))[0]
    assert whole.choices[0].text == pieces["text"] == "one, two"
    assert whole.choices[0].finish_reason == pieces["end"] == "stop"
    assert whole.choices[0].stop_reason == ", three"  # type: ignore[attr-defined]
    kept = client.completions.create(
        **options | {"prompt": [[258]]}, extra_body=names | {"include_stop_str_in_output": True}
    )
    assert kept.choices[0].text == "one, two, three"


def test_echo(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": ["hello", "bye"], "echo": True, "temperature": 0, "n": 2}
    whole = client.completions.create(**options, max_tokens=4, extra_body=LONG)
    pieces = streamed(client.completions.create(**options, max_tokens=4, stream=True, extra_body=LONG))
    assert [choice.text[:3] for choice in whole.choices] == ["hel", "hel", "bye", "bye"]
    assert [pieces[choice]["text"] for choice in range(4)] == [choice.text for choice in whole.choices]


def test_prompts_are_scored(client: openai.OpenAI, tiny: LoadedModel) -> None:
    """max_tokens 0 with echo: the prompt's logprobs and not one token more."""
    plain = offline(tiny, "hello", max_tokens=1, prompt_logprobs=1)
    assert plain.prompt_logprobs is not None
    expected = [entry.logprob for entry in plain.prompt_logprobs if entry is not None]
    options: dict[str, Any] = {"model": "tiny", "prompt": "hello", "echo": True, "logprobs": 1, "max_tokens": 0}
    whole = client.completions.create(**options)
    choice = whole.choices[0]
    assert choice.text == "hello"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == list("hello")
    assert choice.logprobs.text_offset == [0, 1, 2, 3, 4]
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 0
    pieces = streamed(client.completions.create(**options, stream=True))[0]
    assert (pieces["text"], pieces["tokens"], pieces["end"]) == ("hello", list("hello"), "length")


def test_usage_tells_what_speculation_did(client: openai.OpenAI, server: Running) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": "usage " * 8, "max_tokens": 30, "temperature": 0}
    first = client.completions.create(**options, extra_body=LONG).usage
    again = client.completions.create(**options, extra_body=LONG).usage
    off = client.completions.create(**options, extra_body=LONG | {"speculation": {"off": True}}).usage
    assert first is not None and again is not None and off is not None
    details, plain = first.completion_tokens_details, off.completion_tokens_details
    assert details is not None and plain is not None
    assert (details.accepted_prediction_tokens or 0) >= 20
    assert details.rejected_prediction_tokens is not None
    assert (plain.accepted_prediction_tokens, plain.rejected_prediction_tokens) == (0, 0)
    cached = [
        usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens for usage in (first, again, off)
    ]
    assert cached == [0, 40, 40]  # whole pages of 8, of a prompt of 48


def test_usage_in_streams(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": "hello", "max_tokens": 20, "stream": True, "extra_body": LONG}
    without = list(client.completions.create(**options))
    events = list(client.completions.create(**options, stream_options={"include_usage": True}))
    assert all(event.usage is None for event in [*without, *events[:-1]])
    assert all(event.choices for event in [*without, *events[:-1]])
    assert events[-1].choices == []
    assert events[-1].usage.completion_tokens == 20
    usage = {"include_usage": True, "continuous_usage_stats": True}
    counts = [event.usage.completion_tokens for event in client.completions.create(**options, stream_options=usage)]
    assert counts == sorted(counts)
    assert 0 < counts[0] < counts[-1] == 20


def test_the_seed_that_is_reported_gives_the_text_again(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": "hello", "max_tokens": 20, "extra_body": LONG}
    first = client.completions.create(**options)
    again = client.completions.create(**options, seed=first.seed)  # type: ignore[attr-defined]
    assert again.choices[0].text == first.choices[0].text
    other = client.completions.create(**options)
    assert other.choices[0].text != first.choices[0].text


@pytest.mark.parametrize(
    "speculation", [{"nodes": 3, "depth": 2}, {"floor": 0.3}, {"drafter": "ngram"}, {"off": True}, {"drafter": "none"}]
)
def test_speculation_leaves_the_text_alone(client: openai.OpenAI, speculation: dict[str, Any]) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": "ab" * 20, "max_tokens": 24, "seed": 3}
    texts = [
        client.completions.create(**options, extra_body=LONG | extra).choices[0].text
        for extra in ({}, {"speculation": speculation})
    ]
    assert texts[0] == texts[1]


def test_eos_ends_the_text(client: openai.OpenAI) -> None:
    found = client.completions.create(
        model="tiny", prompt="x", max_tokens=9, logit_bias={str(EOS): 100}, extra_body={"min_tokens": 3}
    )
    assert found.usage is not None
    assert (found.usage.completion_tokens, found.choices[0].finish_reason) == (4, "stop")
