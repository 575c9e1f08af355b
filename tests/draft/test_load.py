"""Drafters by name, beside a tiny target on disk."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from alula.config import AlulaError
from alula.draft import load
from alula.draft.drafter import NoDrafter
from alula.draft.load import find_shipped, is_unverified_head, load_drafter
from alula.draft.neural import NeuralDrafter
from alula.draft.ngram import NgramDrafter
from alula.model.load import LoadedModel, load_model
from alula.tree import TreeShape
from tests.draft.harness import Bench, entries
from tests.draft.heads import save_random_head
from tests.draft.medusas import save_random_medusa
from tests.engine.tiny import prompt_of, save_tiny_llama

SHAPE = TreeShape(nodes=8, depth=4, branch=2)
CHAIN = TreeShape(nodes=5, depth=4, branch=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("target"), layers=3)


@pytest.fixture(scope="module")
def target(folder: Path) -> LoadedModel:
    return load_model(folder, dtype="float32")


def test_names(target: LoadedModel) -> None:
    assert isinstance(load_drafter("none", target), NoDrafter)
    assert isinstance(load_drafter("ngram", target), NgramDrafter)
    assert isinstance(load_drafter("auto", target), NgramDrafter)
    for unknown in ("nonsense", "", "./missing"):
        with pytest.raises(AlulaError):
            load_drafter(unknown, target)


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_a_head_loads_by_its_folder(tmp_path: Path, target: LoadedModel, kind: str) -> None:
    drafter = load_drafter(save_random_head(tmp_path / "head", target, kind=kind), target)
    assert isinstance(drafter, NeuralDrafter) and drafter.name == kind
    assert drafter.taps == ((-1,) if kind == "eagle1" else (1, 2, 3))


def test_the_shipped_head_is_found_by_the_targets_weights(
    tmp_path: Path, target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = save_random_head(tmp_path / "heads" / "tiny", target)
    other = load_model(save_tiny_llama(tmp_path / "other", seed=1, layers=3), dtype="float32")
    assert find_shipped(target, tmp_path / "heads") == head
    assert find_shipped(other, tmp_path / "heads") is None
    monkeypatch.setattr(load, "SHIPPED", tmp_path / "heads")
    assert load_drafter("auto", target).name == "eagle3"
    assert load_drafter("auto", other).name == "ngram"


def test_a_head_for_another_target_is_refused(tmp_path: Path, target: LoadedModel) -> None:
    other = load_model(save_tiny_llama(tmp_path / "other", seed=1, layers=3), dtype="float32")
    head = save_random_head(tmp_path / "head", other)
    for allowed in (False, True):
        with pytest.raises(AlulaError, match="weights"):
            load_drafter(head, target, allow_unverified=allowed)


def test_a_head_without_provenance_needs_the_flag(tmp_path: Path, target: LoadedModel) -> None:
    head = save_random_head(tmp_path / "head", target)
    (head / "provenance.json").unlink()
    with pytest.raises(AlulaError, match=r"provenance\.json"):
        load_drafter(head, target)
    assert load_drafter(head, target, allow_unverified=True).name == "eagle3"


def test_features_of_another_format_are_warned_of(tmp_path: Path, target: LoadedModel) -> None:
    head = save_random_head(tmp_path / "head", target)
    provenance = json.loads((head / "provenance.json").read_text())
    provenance["target"]["dtype"] = "bfloat16"
    (head / "provenance.json").write_text(json.dumps(provenance))
    with pytest.warns(UserWarning, match="bfloat16"):
        load_drafter(head, target)


def test_a_head_serves_the_same_weights_in_int8(tmp_path: Path, folder: Path, target: LoadedModel) -> None:
    """What is compared is the file; that its features were made in another format is warned of."""
    head, int8 = save_random_head(tmp_path / "head", target), load_model(folder, dtype="int8")
    assert (int8.format, int8.identity.dtype, int8.dtype) == ("int8", "int8", torch.bfloat16)
    assert int8.feature_identity == {**target.feature_identity, "format": "int8"}
    with pytest.warns(UserWarning, match="float32, and the target runs in int8"):
        assert isinstance(load_drafter(head, int8), NeuralDrafter)


def test_int8_is_refused_where_it_is_not_there(folder: Path, target: LoadedModel) -> None:
    with pytest.raises(AlulaError, match="int8 is there in the native kernels on the CPU only"):
        load_model(folder, dtype="int8", kernels="torch")
    with pytest.raises(AlulaError, match="give kernels by name"):
        load_model(folder, dtype="int8", kernels=target.kernels)
    with pytest.raises(AlulaError, match="'float32', 'int8', 'file' or 'auto'"):
        load_model(folder, dtype="int4")


def lm_bench(drafter: NeuralDrafter, prompt: list[int], *, pages: int = 64, chunk: int | None = None) -> Bench:
    bench = Bench(drafter, pages=pages)
    bench.add(prompt)
    if chunk is not None:
        bench.prefill({0: None}, stop=chunk)
    bench.prefill({0: None})
    return bench


def greedy(folder: Path, prompt: list[int], count: int) -> list[int]:
    model = LlamaForCausalLM.from_pretrained(folder, torch_dtype=torch.float32)
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_G11_a_drafter_of_several_layers_keeps_all_of_them(folder: Path, target: LoadedModel) -> None:
    """A chain drafted by a model is its own greedy text, past the first token and after commits."""
    drafter = load_drafter(folder, target)
    assert isinstance(drafter, NeuralDrafter) and len(drafter.kv_shapes) == 3 and drafter.kv_first == 0
    prompt = prompt_of(17)
    expected = greedy(folder, prompt, 12)
    bench = lm_bench(drafter, prompt, chunk=6)
    done = 0
    for accepted in (4, 0, 2):
        tree = bench.draft({0: CHAIN})[0]
        assert tree.tokens_N[1:].tolist() == expected[done : done + 4]
        path = list(range(1, accepted + 1))
        bench.step({0: CHAIN}, {0: (path, expected[done + accepted])}, None)
        done += accepted + 1
        fresh = lm_bench(drafter, list(bench.sequences[0].tokens))
        fresh.draft({0: CHAIN})
        bench.draft({0: CHAIN})
        stop = 16 + done
        for ours, theirs in zip(entries(bench, 0, 0, stop), entries(fresh, 0, 0, stop), strict=True):
            assert torch.equal(ours, theirs)


def test_lm_drafts_of_a_prefix_hit_equal_a_cold_start(folder: Path, target: LoadedModel) -> None:
    drafter = load_drafter(folder, target)
    assert isinstance(drafter, NeuralDrafter)
    prompt = prompt_of(21)
    bench = lm_bench(drafter, prompt)
    bench.step({0: SHAPE}, {0: ([], 5)}, None)
    assert bench.add([*prompt, 9], id=1) == 20
    bench.prefill({1: None})
    warm, cold = bench.draft({1: SHAPE})[1], lm_bench(drafter, [*prompt, 9]).draft({0: SHAPE})[0]
    assert np.array_equal(warm.tokens_N, cold.tokens_N) and np.array_equal(warm.scores_N, cold.scores_N)


def test_D7_a_drafter_stops_at_its_own_context_limit(tmp_path: Path, target: LoadedModel) -> None:
    """Beyond it one sequence goes undrafted; the others, and the engine, go on."""
    short = load_drafter(save_tiny_llama(tmp_path / "short", layers=2, max_len=32), target)
    assert isinstance(short, NeuralDrafter)
    bench = lm_bench(short, prompt_of(120))
    bench.add(prompt_of(9), id=1)
    bench.prefill({1: None})
    trees = bench.draft({0: SHAPE, 1: SHAPE})
    assert len(trees[0]) == 1 and len(trees[1]) == SHAPE.nodes


def test_G13_a_model_with_another_tokenizer_is_refused(tmp_path: Path, folder: Path, target: LoadedModel) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace("<|user|>", "<|human|>"))
    with pytest.raises(AlulaError, match="tokenizer"):
        load_drafter(other, target)


def test_rules_reach_the_policy(folder: Path, target: LoadedModel) -> None:
    drafter = load_drafter(folder, target, rule="rejection")
    assert isinstance(drafter, NeuralDrafter) and drafter.policy.rule == "rejection"
    with pytest.raises(AlulaError, match="rule"):
        load_drafter(folder, target, rule="other")


def test_drafters_are_found_by_name(tmp_path: Path, target: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    save_random_head(first / "tiny-eagle1", target, kind="eagle1")
    save_random_medusa(second / "tiny-medusa", target)
    save_random_head(second / "tiny-eagle1", target)
    save_tiny_llama(second / "tiny-lm", layers=2)
    monkeypatch.setenv("ALULA_HEADS", f"{first}:{second}")
    for name, kind in (("tiny-eagle1", "eagle1"), ("tiny-medusa", "medusa"), ("tiny-lm", "lm")):
        assert load_drafter(name, target).name == kind
        assert not is_unverified_head(name, target.name)
        assert load_drafter(name.removeprefix("tiny-"), replace(target, name="tiny")).name == kind
    for unknown in ("tiny-eagle2", "medusa"):
        with pytest.raises(AlulaError) as refused:
            load_drafter(unknown, target)
        sentence = str(refused.value)
        assert sentence.startswith(f"drafter is {unknown!r}: give auto, none, ngram, smollm2-eagle3, tiny-eagle1")
        assert "tiny-lm, tiny-medusa" in sentence and "ALULA_HEADS" in sentence


def test_a_folder_of_a_drafters_name_is_reached_by_its_path(
    tmp_path: Path, target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_random_head(tmp_path / "shelf" / "tiny", target, kind="eagle1")
    save_random_head(tmp_path / "here" / "tiny", target)
    monkeypatch.setenv("ALULA_HEADS", str(tmp_path / "shelf"))
    monkeypatch.chdir(tmp_path / "here")
    assert load_drafter("tiny", target).name == "eagle1"
    assert load_drafter("./tiny", target).name == "eagle3"


def test_a_named_head_that_names_no_target_is_unverified(
    tmp_path: Path, target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = save_random_head(tmp_path / "tiny-eagle1", target, kind="eagle1")
    (head / "provenance.json").unlink()
    monkeypatch.setenv("ALULA_HEADS", str(tmp_path))
    assert is_unverified_head("tiny-eagle1", target.name)
    with pytest.raises(AlulaError, match="allow-unverified-head"):
        load_drafter("tiny-eagle1", target)
