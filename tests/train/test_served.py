"""Served evaluation: the engine's figures, and beside them what training expects of the same drafter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from alula.config import AlulaError
from alula.draft.drafter import NoDrafter
from alula.draft.load import target_provenance
from alula.engine.config import EngineConfig
from alula.engine.engine import Engine
from alula.model.load import LoadedModel, load_model
from alula.sequence import SamplingParams
from alula.train.config import Served
from alula.train.data import Conversation
from alula.train.features import FeatureStore
from alula.train.generate import engine_generate
from alula.train.methods.method import Method, Setting
from alula.train.methods.options import Eagle1Options, Eagle3Options, MedusaOptions, MethodOptions
from alula.train.methods.select import maker
from alula.train.served import ServedEvaluation
from alula.train.target import DecoderTarget
from tests.engine.tiny import prompt_of, save_tiny_llama

SERVED = Served(held_out=4, prompts=0, tokens=40, nodes=8, depth=4, branch=3, kv_cache_mib=16)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = save_tiny_llama(tmp_path_factory.mktemp("tiny") / "model", layers=3)
    return load_model(str(folder), dtype="float32")


@pytest.fixture(scope="module")
def data(model: LoadedModel) -> list[Conversation]:
    """Greedy answers of the model to random prompts."""
    prompts = [prompt_of(5, seed) for seed in range(40)]
    engine = Engine(model, NoDrafter(), EngineConfig(kv_cache_mib=16))
    answers = engine_generate(engine)(prompts, [SamplingParams(max_tokens=40)] * len(prompts))
    return [
        Conversation((*prompt, *answer), (False,) * len(prompt) + (True,) * len(answer))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def made(options: MethodOptions, model: LoadedModel, data: list[Conversation]) -> tuple[Method, FeatureStore]:
    """A method with start values, in numbers that its export keeps exactly."""
    making = maker(options)
    store = FeatureStore(DecoderTarget(model), taps=making.taps(model.config.num_layers), dtype=torch.float32)
    method = making.fresh(Setting(model, store, data, 0))
    with torch.no_grad():
        for name, tensor in method.module.state_dict().items():
            if tensor.is_floating_point():
                tensor.copy_(torch.ones_like(tensor) if name == "tap_scale_F" else tensor.bfloat16())
    return method, store


def evaluated(
    method: Method,
    store: FeatureStore,
    model: LoadedModel,
    held: list[Conversation],
    folder: Path,
    served: Served = SERVED,
) -> Any:
    method.export(folder, {"target": target_provenance(model)})
    return ServedEvaluation(model, held, served).run(folder, method, store)


METHODS = (
    Eagle3Options(draft_vocab_size=200),
    Eagle3Options(draft_vocab_size=259, norm_output=True),
    Eagle1Options(),
    MedusaOptions(),
)


@pytest.mark.parametrize("options", METHODS, ids=lambda options: options.name)
def test_training_expects_what_is_served(
    options: MethodOptions, model: LoadedModel, data: list[Conversation], tmp_path: Path
) -> None:
    """The same trees from two implementations: the paged drafter in the engine, and the training-time test."""
    figures = evaluated(*made(options, model, data), model, data[:4], tmp_path / "drafter")
    assert figures["prompts"] == 4 and figures["tokens"] == 40
    assert figures["tau"] > 1.01, "nothing is accepted, so nothing is compared"
    if options.name == "eagle3":
        for name in ("tau", "acceptance_rate", "accepted_per_drafted", "acceptance_by_depth"):
            assert figures["estimate"][name] == figures[name], name
    assert abs(figures["served_over_estimate"]) < 0.01


def test_a_floor_is_served_and_expected_alike(model: LoadedModel, data: list[Conversation], tmp_path: Path) -> None:
    parts = made(METHODS[0], model, data)
    free = evaluated(*parts, model, data[:4], tmp_path / "free")
    found = evaluated(*parts, model, data[:4], tmp_path / "floored", replace(SERVED, floor=0.05))
    assert "floor" not in free["tree"] and found["tree"] == free["tree"] | {"floor": 0.05}
    assert found["accepted_per_drafted"] > free["accepted_per_drafted"]
    for name in ("tau", "acceptance_rate", "accepted_per_drafted", "acceptance_by_depth"):
        assert found["estimate"][name] == found[name], name


def test_a_head_that_serving_feeds_otherwise_shows(
    model: LoadedModel, data: list[Conversation], tmp_path: Path
) -> None:
    method, store = made(Eagle3Options(draft_vocab_size=200), model, data)
    method.export(tmp_path / "drafter", {"target": target_provenance(model)})
    with torch.no_grad():
        method.module.get_parameter("fc.weight").neg_()
    figures = ServedEvaluation(model, data[:4], SERVED).run(tmp_path / "drafter", method, store)
    assert figures["served_over_estimate"] > 0.05


def test_prompts_come_from_conversations_and_sets(model: LoadedModel, data: list[Conversation], tmp_path: Path) -> None:
    held = [Conversation((1, 2, 3, 4), (True,) * 4), data[0], data[1]]
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\n{"turns": ["two", "more"]}\n{"prompt": "three"}\n')
    found = ServedEvaluation(model, held, Served(held_out=1, prompts=2, sets=(str(file),), tokens=8))
    texts = [model.tokenizer.decode(list(prompt)) for prompt in found.prompts[1:]]
    assert found.prompts[0] == data[0].tokens[:5]
    others = ServedEvaluation(model, held, Served(held_out=2, prompts=1, sets=(str(file),), tokens=8))
    assert len(others.prompts) == len(found.prompts) and others.settings() != found.settings()
    assert "one" in texts[0] and "two" in texts[1] and len(texts) == 2
    with pytest.raises(AlulaError, match=r"served: no prompt leaves room for 4000 tokens: lower served\.tokens"):
        ServedEvaluation(model, held, Served(tokens=4000))
