"""Values of a wrong kind or out of range end as one sentence that names the field, wherever they come in."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alula.config import AlulaError
from alula.engine.config import EngineConfig
from alula.engine.llm import LLM
from alula.sequence import SamplingParams
from tests.engine.tiny import save_tiny_llama

SMALL = EngineConfig(kv_cache_mib=8, check_integrity=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_llama(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def llm(folder: str) -> LLM:
    return LLM(folder, "none", dtype="fp32", config=SMALL)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", 5),
        ("stop", "\ud800"),
        ("bad_words", ("\ud800",)),
        ("stop_token_ids", 5),
        ("allowed_token_ids", 5),
        ("logit_bias", [1]),
        ("logit_bias", {1: "x"}),
        ("logit_bias", {1: math.inf}),
        ("logit_bias", {1: 1e39}),
        ("logit_bias", {1: -1e39}),
        ("logits_processors", 5),
        ("logits_processors", (5,)),
        ("ignore_eos", "yes"),
    ],
)
def test_sampling_parameters(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{field} "):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_num_seqs", "x"), ("max_num_seqs", True), ("page_size", 2.5), ("max_model_len", 1.5), ("shape", 5)],
)
def test_engine_settings(field: str, value: object) -> None:
    with pytest.raises(AlulaError, match=f"^{field} is"):
        EngineConfig(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"model": 5}, "model is 5"),
        ({"model": ""}, "model is ''"),
        ({"drafter": None}, "drafter is None"),
        ({"drafter": "no/where"}, "drafter 'no/where': model"),
        ({"device": "moon"}, "device is 'moon'"),
        ({"device": "meta"}, "device is 'meta'"),
        ({"threads": 0}, "threads is 0"),
        ({"threads": 10**8}, "threads is 100000000"),
        ({"config": EngineConfig(kv_cache_mib=10**8)}, "kv_cache_mib is 100000000"),
    ],
)
def test_settings_of_llm(
    folder: str, options: dict[str, Any], field: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AlulaError, match=f"^{field}"):
        LLM(**{"model": folder, "drafter": "none", "dtype": "fp32", "config": SMALL, **options})


@pytest.mark.parametrize("prompts", [None, 5, {"a": 1}, 5.5])
def test_what_is_no_prompt(llm: LLM, prompts: Any) -> None:
    with pytest.raises(AlulaError, match=r"^prompts is a"):
        llm.generate(prompts)


def test_arrays_and_iterators_are_prompts(llm: LLM) -> None:
    wanted = llm.generate([1, 2], SamplingParams(max_tokens=2))[0].outputs[0].token_ids
    for prompts in (np.array([1, 2]), (token for token in (1, 2)), [np.array([1, 2])]):
        assert llm.generate(prompts, SamplingParams(max_tokens=2))[0].outputs[0].token_ids == wanted  # type: ignore[arg-type]


def test_a_faulty_entry_fails_alone(llm: LLM) -> None:
    entries: Any = ["hello", None, 5.5, [1.5], "hello"]
    params: Any = [SamplingParams(max_tokens=2)] * 4 + [5]
    first, *others = llm.generate(entries, params)
    assert first.error is None and len(first.outputs[0].token_ids) == 2
    reasons = [str(other.error) for other in others]
    assert all(reason.startswith("prompt") for reason in reasons[:3])
    assert reasons[3].startswith("sampling_params is 5")
    assert llm.engine.cache.free_pages == llm.engine.cache.total_pages


def test_what_is_no_conversation(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    for messages in (5, "hi", None, []):
        with pytest.raises(AlulaError, match=r"^messages"):
            llm.chat(messages)  # type: ignore[arg-type]
    good, bad = llm.chat([conversation, 5], SamplingParams(max_tokens=2))  # type: ignore[list-item]
    assert good.error is None and str(bad.error).startswith("messages")


def test_an_error_of_a_processor_is_one_line(llm: LLM) -> None:
    def broken(tokens: list[int], logits: Any) -> Any:
        raise RuntimeError("first\nsecond")

    output = llm.generate("hello", SamplingParams(logits_processors=(broken,)))[0].outputs[0]
    assert output.error == "logits_processors raised RuntimeError (first second): mend the processor"
