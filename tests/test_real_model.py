"""SmolLM2 itself, against transformers with the same weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files

import pytest
import torch

from alula.draft.load import load_drafter
from alula.engine.config import EngineConfig
from alula.engine.engine import Engine
from alula.engine.request import Request
from alula.model.load import LoadedModel, load_model
from alula.sequence import SamplingParams
from alula.tree import TreeShape

pytestmark = pytest.mark.real
PROMPTS = 20
LENGTH = 64


def _prompts(model: LoadedModel) -> list[list[int]]:
    lines = files("alula").joinpath("prompts/default.jsonl").read_text(encoding="utf-8").splitlines()
    turns = [json.loads(line)["turns"][0] for line in lines][:PROMPTS]
    return [model.tokenizer.apply_chat_template([{"role": "user", "content": turn}]) for turn in turns]


def _generate(
    model: LoadedModel,
    drafter: str,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | None = None,
    floor: float = 0.0,
) -> tuple[list[list[int]], Engine]:
    config = EngineConfig(max_num_seqs=8, shape=TreeShape(8, 4, 3, floor), kv_cache_mib=256)
    engine = Engine(model, load_drafter(drafter, model), config)
    params = params or SamplingParams(max_tokens=LENGTH)
    ids = [engine.add(Request(tuple(prompt), params)) for prompt in prompts]
    while engine.has_work:
        engine.step()
    return [engine.pop(request_id).outputs[0].token_ids for request_id in ids], engine


@torch.inference_mode()
def _transformers(model: LoadedModel, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model.checkpoint.folder, dtype=torch.float32).eval()
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        generated = reference.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=LENGTH, pad_token_id=0
        )
        outputs.append(generated[0, len(prompt) :].tolist())
    return outputs


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_floor_leaves_the_text_and_takes_drafts(temperature: float) -> None:
    """The shipped head, whose probabilities are those that a floor is meant for."""
    model = load_model("smollm2")
    prompts, params = _prompts(model)[:6], SamplingParams(temperature, seed=1, max_tokens=LENGTH)
    plain, _ = _generate(model, "none", prompts, params)
    free, without = _generate(model, "auto", prompts, params)
    found, bound = _generate(model, "auto", prompts, params, floor=0.3)
    assert found == free == plain
    assert 0 < bound.totals.drafted < without.totals.drafted
    assert bound.totals.accepted > 0


def test_greedy_text_equals_transformers_in_fp32() -> None:
    """The same 20 prompts x 64 tokens, plain and through the shipped head."""
    model = load_model("smollm2", dtype="float32")
    prompts = _prompts(model)
    expected = _transformers(model, prompts)
    assert _generate(model, "none", prompts)[0] == expected
    drafted, engine = _generate(model, "auto", prompts)
    assert drafted == expected
    assert engine.drafter.name == "eagle3"
    assert engine.totals.tau > 1.5


@pytest.mark.parametrize(("dtype", "count"), [("bfloat16", 6), ("int8", 2), ("file", 2)])
def test_text_does_not_depend_on_the_drafter(dtype: str, count: int) -> None:
    model = load_model("smollm2", dtype=dtype)
    prompts = _prompts(model)[:count]
    plain, _ = _generate(model, "none", prompts)
    for drafter in ("ngram", "auto"):
        drafted, engine = _generate(model, drafter, prompts)
        assert drafted == plain
        assert engine.totals.accepted > 0
