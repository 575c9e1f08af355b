"""A checkpoint folder or a head with a value of a wrong kind: one sentence that names it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from alula.config import AlulaError
from alula.draft.dialects import read_head, save_official
from alula.draft.head_config import read_head_config
from alula.model.hf_config import config_from_hf
from alula.model.load import load_model
from alula.text import Tokenizer
from tests.draft.heads import head_config, random_weights
from tests.engine.tiny import save_tiny_llama

DEEP = "[" * 100_000


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "model"))


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"rope_scaling": "abc"}, "rope_scaling"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_theta": "abc"}, "rope_theta"),
        ({"layer_types": 5}, "layer_types"),
        ({"layer_types": [[1]]}, "layer_types"),
        ({"bos_token_id": "x"}, "bos_token_id"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": "a", "low_freq_factor": 1, "high_freq_factor": 4}},
            "factor",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": "a"}}, "factor"),
        ({"model_type": "mistral", "sliding_window": "x"}, "sliding_window"),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": "x"}, "max_window_layers"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 0, "hidden_act": None}, "sliding_window_pattern"),
        ({"model_type": "gemma3_text", "query_pre_attn_scalar": 0, "hidden_act": None}, "query_pre_attn_scalar"),
    ],
)
def test_config_json(tiny: Path, values: dict[str, Any], named: str) -> None:
    whole = json.loads((tiny / "config.json").read_text())
    with pytest.raises(AlulaError, match=named):
        config_from_hf({**whole, "sliding_window": 8, **values})


def test_json_nested_without_end(folder: Path) -> None:
    for name in ("tokenizer_config.json", "config.json"):
        (folder / name).write_text(DEEP)
        with pytest.raises(AlulaError, match=f"{name} is not valid JSON"):
            load_model(folder, dtype="float32")
        shutil.copy(folder / "generation_config.json", folder / name)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_no_numbers(folder: Path, value: float) -> None:
    path, name = folder / "model.safetensors", "model.layers.0.self_attn.q_proj.weight"
    weights = load_file(path)
    weights[name][3, 4] = value
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(AlulaError, match=f"tensor '{name}' holds NaN or infinity"):
        load_model(folder, dtype="float32")


def test_a_template_that_fails(tiny: Path) -> None:
    tokenizer = Tokenizer.from_folder(tiny)
    tokenizer.chat_template = "{{ 1 / 0 }}"
    with pytest.raises(AlulaError, match=r"chat template .division by zero"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rms_norm_eps", "x"),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", -1),
        ("rope_theta", "x"),
        ("rope_scaling", [1]),
        ("rope_parameters", "x"),
        ("eagle_config", [1]),
        ("transformer_layer_config", [1]),
    ],
)
def test_config_json_of_a_head(key: str, value: object) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 9}
    with pytest.raises(AlulaError, match=f"^{key} is"):
        read_head_config({**sizes, key: value}, "eagle3")


def test_files_of_a_head(tmp_path: Path) -> None:
    config = head_config()
    weights = random_weights(config)
    save_official(tmp_path / "head", config, weights)
    tensors = tmp_path / "head" / "model.safetensors"
    save_file({**load_file(tensors), "fc.weight": torch.zeros_like(weights["fc.weight"], dtype=torch.int32)}, tensors)
    with pytest.raises(AlulaError, match=r"fc\.weight is stored as torch\.int32"):
        read_head(tmp_path / "head")
    tensors.unlink()
    for content in (b"junk", b""):
        (tmp_path / "head" / "pytorch_model.bin").write_bytes(content)
        with pytest.raises(AlulaError, match=r"pytorch_model\.bin"):
            read_head(tmp_path / "head")
    torch.save([1], tmp_path / "head" / "pytorch_model.bin")
    with pytest.raises(AlulaError, match="no dictionary of tensors"):
        read_head(tmp_path / "head")


def test_a_full_disk_is_met_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from alula.model import gguf

    def full(*arguments: object) -> None:
        raise AlulaError("the disk is full")

    class Source:
        path = tmp_path / "file.gguf"
        metadata: ClassVar[dict[str, object]] = {}

        def names(self) -> list[str]:
            return []

    monkeypatch.setattr(gguf, "check_space", full)
    monkeypatch.setattr(gguf, "hf_config", lambda *arguments: {})
    with pytest.raises(AlulaError, match="the disk is full"):
        gguf._convert(Source(), tmp_path, torch.float32, False)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
