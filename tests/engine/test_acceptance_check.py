"""A head without provenance is measured on the way in: good ones pass in silence, misfits are called by name."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch

from alula.draft.dialects import HeadFiles, read_head, save_official
from alula.draft.head_config import HeadConfig
from alula.draft.load import load_drafter
from alula.draft.names import SHIPPED
from alula.engine.acceptance_check import PROMPTS, TOKENS, measure_acceptance
from alula.engine.config import EngineConfig
from alula.engine.llm import LLM
from alula.model.load import LoadedModel, load_model
from tests.draft.heads import head_config, save_random_head
from tests.engine.tiny import save_tiny_llama

SMALL = EngineConfig(kv_cache_mib=16)


@pytest.fixture(scope="module")
def flat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers add nothing: its next token is a function of the last one, which a head can know."""
    from transformers import LlamaForCausalLM

    folder = save_tiny_llama(tmp_path_factory.mktemp("flat"), layers=3)
    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        ids = torch.arange(len(model.model.embed_tokens.weight))
        model.lm_head.weight = torch.nn.Parameter(model.model.embed_tokens.weight[(ids * 7 + 3) % len(ids)].clone())
    model.config.tie_word_embeddings = False
    model.save_pretrained(folder)
    return folder


def knowing_head(folder: Path, target: LoadedModel) -> Path:
    """An EAGLE-1 head that hands the embedding of the last token to the target's LM head."""
    size = target.config.hidden_size
    config = head_config(
        "eagle1",
        hidden_size=size,
        target_hidden_size=size,
        vocab_size=target.config.vocab_size,
        draft_vocab_size=target.config.vocab_size,
        head_dim=target.config.head_dim,
    )
    save_official(folder, config, _weights(config))
    return folder


def _weights(config: HeadConfig) -> dict[str, torch.Tensor]:
    from alula.draft.head_tensors import expected_shapes

    weights = {name: torch.zeros(shape) for name, shape in expected_shapes(config, 1).items()}
    return weights | {"fc.weight": torch.eye(config.hidden_size, 2 * config.hidden_size)}


def test_a_head_that_knows_the_target_passes_in_silence(tmp_path: Path, flat_folder: Path) -> None:
    target = load_model(flat_folder, dtype="float32")
    head = knowing_head(tmp_path / "head", target)
    found = measure_acceptance(target, load_drafter(head, target, allow_unverified=True), SMALL)
    assert found.right == found.guesses > 30
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LLM(str(flat_folder), str(head), dtype="float32", config=SMALL, allow_unverified_head=True)


def test_a_misfit_is_warned_of(tmp_path: Path, flat_folder: Path) -> None:
    target = load_model(flat_folder, dtype="float32")
    head = save_random_head(tmp_path / "head", target)
    (head / "provenance.json").unlink()
    with pytest.warns(UserWarning, match=r"only \d+ of \d+ cases; .*d2t"):
        LLM(str(flat_folder), str(head), dtype="float32", config=SMALL, allow_unverified_head=True)


def test_a_head_that_names_its_target_is_not_measured(tmp_path: Path, flat_folder: Path) -> None:
    head = save_random_head(tmp_path / "head", load_model(flat_folder, dtype="float32"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LLM(str(flat_folder), str(head), dtype="float32", config=SMALL, allow_unverified_head=True)


def test_bench_and_prove_measure_it_too(tmp_path: Path, flat_folder: Path) -> None:
    from alula.bench.session import Session

    target = load_model(flat_folder, dtype="float32")
    head = save_random_head(tmp_path / "head", target)
    (head / "provenance.json").unlink()
    session = Session(target, "coupled", allow_unverified=True)
    with pytest.warns(UserWarning, match="its first guess"):
        session.drafter(str(head))


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_a_short_context_shortens_the_prompts(tmp_path: Path, rule: str) -> None:
    folder = save_tiny_llama(tmp_path / "short", layers=3, max_len=24)
    target = load_model(folder, dtype="float32")
    drafter = load_drafter(save_random_head(tmp_path / "head", target), target, rule=rule)
    found = measure_acceptance(target, drafter, EngineConfig(rule=rule, kv_cache_mib=16))
    assert PROMPTS * 4 <= found.guesses < PROMPTS * TOKENS


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    return load_model("smollm2")


def published(folder: Path, head: HeadFiles) -> Path:
    save_official(folder, head.config, head.weights)
    assert not (folder / "provenance.json").exists()
    return folder


@pytest.mark.real
def test_the_shipped_head_is_told_from_itself_with_swapped_taps(tmp_path: Path, smollm2: LoadedModel) -> None:
    head = read_head(SHIPPED / "smollm2")
    low, mid, high = head.weights["fc.weight"].split(smollm2.config.hidden_size, 1)
    swapped = {**head.weights, "fc.weight": torch.cat([high, mid, low], 1)}
    folders = [
        published(tmp_path / "good", head),
        published(tmp_path / "swapped", HeadFiles(head.config, swapped, None)),
    ]
    good, bad = (
        measure_acceptance(smollm2, load_drafter(folder, smollm2, allow_unverified=True), EngineConfig())
        for folder in folders
    )
    assert not good.near_chance and bad.near_chance
    assert bad.right < 0.1 * bad.guesses


@pytest.mark.real
def test_the_shipped_head_says_what_it_reads() -> None:
    found = json.loads((SHIPPED / "smollm2" / "provenance.json").read_text())
    assert found["head"]["taps"] == [2, 15, 27]
