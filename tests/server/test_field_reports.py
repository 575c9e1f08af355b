"""Faults reported of other engines, over HTTP."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

from alula.model.load import LoadedModel
from tests.server.running import Running
from tests.server.test_cancel import post
from tests.server.test_completions import offline

BODY: dict[str, Any] = {"prompt": "hello", "max_tokens": 40, "ignore_eos": True, "seed": 7}


@pytest.mark.parametrize(
    "extra", [{"min_p": 0.1, "logit_bias": {"65": -100}}, {"min_p": 0.1, "logit_bias": {"66": 100}}]
)
def test_b6_min_p_and_logit_bias_are_neither_refused_nor_lost(
    server: Running, tiny: LoadedModel, extra: dict[str, Any]
) -> None:
    """vLLM #42744: refused with speculation, or applied to the bonus token alone."""
    params = {"min_p": 0.1, "logit_bias": {int(token): bias for token, bias in extra["logit_bias"].items()}}
    plain = offline(tiny, "hello", temperature=1.0, seed=7, max_tokens=40, **params).outputs[0]
    found = post(server, BODY | extra | {"return_token_ids": True}).json()["choices"][0]
    assert found["token_ids"] == plain.token_ids
    assert (65 not in plain.token_ids) if "65" in extra["logit_bias"] else set(plain.token_ids) == {66}


def test_b8_min_tokens_outlasts_stop_strings_and_eos(server: Running) -> None:
    """vLLM #21987: a stop string ended the text before min_tokens."""
    body = BODY | {"logit_bias": {"10": 100}, "ignore_eos": False, "stop": ["+"], "max_tokens": 40}
    for least, count in ((0, 1), (25, 25)):
        found = post(server, body | {"min_tokens": least}).json()
        assert found["choices"][0]["finish_reason"] == "stop"
        assert found["usage"]["completion_tokens"] == count


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_b12_no_penalty_is_silently_ignored(server: Running, tiny: LoadedModel, penalty: str) -> None:
    """TRT-LLM #17701."""
    plain = offline(tiny, "hello", seed=7, temperature=0.0, max_tokens=40, **{penalty: 1.9}).outputs[0].text
    found = post(server, BODY | {"temperature": 0, penalty: 1.9}).json()["choices"][0]["text"]
    without = post(server, BODY | {"temperature": 0}).json()["choices"][0]["text"]
    assert found == plain != without


def test_c7_logprobs_are_the_models_own_whatever_the_sampling(server: Running, tiny: LoadedModel) -> None:
    body = BODY | {"temperature": 0, "logprobs": 1, "max_tokens": 8}
    tokens = post(server, body).json()["choices"][0]["logprobs"]
    params = {"logprobs": 1, "frequency_penalty": 1.5, "max_tokens": 8}
    plain = offline(tiny, "hello", **params).outputs[0].logprobs
    penalised = post(server, body | {"frequency_penalty": 1.5}).json()["choices"][0]["logprobs"]
    assert plain is not None
    assert penalised["token_logprobs"] == pytest.approx([entry.logprob for entry in plain])
    assert penalised["token_logprobs"][0] == tokens["token_logprobs"][0]


def test_d9_a_request_over_the_limit_errs_alone(server: Running, tiny: LoadedModel) -> None:
    """vLLM #6294: such requests stayed in the engine as zombies."""
    good: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: good.append(post(server, BODY)))
    thread.start()
    bad = [post(server, BODY | {"prompt": "x" * length}) for length in (473, 512, 5000)]
    thread.join()
    assert [reply.status_code for reply in bad] == [400] * 3
    plain = offline(tiny, "hello", temperature=1.0, seed=7, max_tokens=40).outputs[0]
    assert good[0].json()["choices"][0]["text"] == plain.text


def test_h15_a_last_token_is_not_drafted_for(server: Running) -> None:
    """One token asked for is one plain forward."""
    drafted = server.engine.totals.drafted
    usage = post(server, BODY | {"max_tokens": 1}).json()["usage"]
    assert server.engine.totals.drafted == drafted
    assert usage["completion_tokens_details"]["rejected_prediction_tokens"] == 0
