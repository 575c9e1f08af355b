"""Strict loading: every fault of a checkpoint is one AlulaError that names the tensor or the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from alula.config import AlulaError, ModelConfig
from alula.model.layers import EMBEDDING, LM_HEAD, expected_shapes
from alula.model.weights import INDEX, SINGLE, TensorFolder, hash_files, hash_tensor

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 20,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from alula.model.hf_config import config_from_hf

    random = torch.Generator().manual_seed(0)
    shapes = expected_shapes(config_from_hf(CONFIG))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file({name: torch.randn(shape, generator=random) for name, shape in shapes.items()}, tmp_path / SINGLE)
    return tmp_path


def change(folder: Path, **edits: torch.Tensor | None) -> None:
    """Replace (or drop) tensors; dots in names are written as two underscores."""
    tensors = load_file(folder / SINGLE)
    for key, tensor in edits.items():
        name = key.replace("__", ".")
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / SINGLE)


def test_a_good_folder_loads(folder: Path, load_folder: Callable[..., Any]) -> None:
    assert load_folder(folder).kv_shapes[1].head_dim == 4


@pytest.mark.parametrize(
    ("edits", "words"),
    [
        ({"model__norm__weight": None}, r"'model\.norm\.weight' is missing"),
        ({"model__layers__1__mlp__up_proj__weight": None}, r"'model\.layers\.1\.mlp\.up_proj\.weight' is missing"),
        ({"model__layers__2__mlp__up_proj__weight": torch.ones(12, 8)}, r"layers\.2\.mlp.* does not belong"),
        ({"model__layers__0__self_attn__q_proj__bias": torch.ones(8)}, r"q_proj\.bias' .* does not belong"),
        ({"model__norm__weight": torch.ones(9)}, r"'model\.norm\.weight' has shape \[9\] .* \[8\]"),
        ({"model__norm__weight": torch.ones(8, dtype=torch.int8)}, "stored as I8"),
        ({"lm_head__weight": torch.ones(20, 8)}, r"'lm_head\.weight' .* does not belong"),
    ],
)
def test_faulty_tensors_are_named(
    folder: Path, load_folder: Callable[..., Any], edits: dict[str, torch.Tensor | None], words: str
) -> None:
    change(folder, **edits)
    with pytest.raises(AlulaError, match=words):
        load_folder(folder)


def test_harmless_extras_pass(folder: Path, load_folder: Callable[..., Any]) -> None:
    embedding = load_file(folder / SINGLE)[EMBEDDING]
    change(folder, lm_head__weight=embedding, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(2))
    load_folder(folder)


def test_missing_head_hints_at_the_flag(folder: Path, load_folder: Callable[..., Any]) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": False}))
    with pytest.raises(AlulaError, match="tie_word_embeddings"):
        load_folder(folder)


def shard(folder: Path) -> None:
    tensors = load_file(folder / SINGLE)
    names = sorted(tensors)
    files = {name: f"part-{index % 2}.safetensors" for index, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    (folder / SINGLE).unlink()


def test_sharded_equals_single(folder: Path, load_folder: Callable[..., Any], dense: Callable[..., Any]) -> None:
    single = dense(load_folder(folder), [1, 2, 3]).final_TD
    shard(folder)
    assert torch.equal(dense(load_folder(folder), [1, 2, 3]).final_TD, single)


def test_faults_of_sharded_folders(folder: Path) -> None:
    shard(folder)
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({"weight_map": {**index["weight_map"], "ghost": "part-0.safetensors"}}))
    with pytest.raises(AlulaError, match=r"'ghost' .* in no file"):
        TensorFolder(folder)
    del index["weight_map"][EMBEDDING]
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(AlulaError, match="not in the index"):
        TensorFolder(folder)
    (folder / INDEX).write_text("{}")
    with pytest.raises(AlulaError, match="no weight_map"):
        TensorFolder(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "part-7.safetensors"}}))
    with pytest.raises(AlulaError, match=r"part-7\.safetensors is missing"):
        TensorFolder(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_file(folder: Path, keep: int) -> None:
    data = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(data[:keep])
    with pytest.raises(AlulaError, match="truncated"):
        TensorFolder(folder)


def test_folder_without_safetensors(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(AlulaError, match=r"no model\.safetensors"):
        TensorFolder(tmp_path)


def test_weights_outlive_their_file(folder: Path, load_folder: Callable[..., Any], dense: Callable[..., Any]) -> None:
    decoder = load_folder(folder)
    before = dense(decoder, [1, 2, 3]).final_TD
    (folder / SINGLE).write_bytes(bytes((folder / SINGLE).stat().st_size))
    assert torch.equal(dense(decoder, [1, 2, 3]).final_TD, before)


def test_hashes(folder: Path) -> None:
    weights = TensorFolder(folder).get(EMBEDDING).bfloat16()
    assert hash_tensor(weights) == hash_tensor(weights.float())
    changed = weights.clone()
    changed[3, 3] += 1
    assert hash_tensor(changed) != hash_tensor(weights)
    before = hash_files([folder / SINGLE])
    change(folder, model__norm__weight=torch.zeros(8))
    assert hash_files([folder / SINGLE]) != before


def test_untied_models_expect_a_head() -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1}
    config = ModelConfig("llama", 5, **sizes, head_dim=8, max_position_embeddings=8)
    assert expected_shapes(config)[LM_HEAD] == (5, 8)
