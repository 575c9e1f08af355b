"""config.json is read strictly: every key that matters is understood or named in an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from alula.config import AlulaError, ModelConfig, Rope
from alula.model.hf_config import config_from_hf, read_hf_config

BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
}


def test_defaults_of_a_family() -> None:
    config = config_from_hf({**BASE, "eos_token_id": 2, "torch_dtype": "bfloat16", "architectures": ["X"]})
    assert (config.head_dim, config.num_kv_heads, config.eos_ids, config.windows) == (16, 4, (2,), ())
    assert (config.scale, config.tied_head, config.activation, config.rope) == (0.25, False, "silu", Rope(10_000.0))


def test_old_and_new_rope_spellings_agree() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
    old = {**BASE, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}}
    new = {**BASE, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}}
    assert config_from_hf(old).rope == config_from_hf(new).rope == Rope(5e5, "llama3", 8.0, 1.0, 4.0, 512)


def test_a_mistral_without_the_key_has_its_window() -> None:
    """transformers fills in 4096; only null switches the window off."""
    values = {**BASE, "model_type": "mistral"}
    assert config_from_hf(values).windows == (4096,) * 3
    assert config_from_hf({**values, "sliding_window": None}).windows == ()


def test_gemma3_keys_of_the_hub() -> None:
    """As published for the 1B model: old spellings, no layer_types."""
    values = {**BASE, "model_type": "gemma3_text", "num_hidden_layers": 7, "head_dim": 32, "sliding_window": 512}
    values |= {"sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "query_pre_attn_scalar": 64}
    values |= {"rope_scaling": None, "hidden_activation": "gelu_pytorch_tanh", "attn_logit_softcapping": None}
    config = config_from_hf(values)
    assert config.windows == (512, 512, 512, 512, 512, 0, 512)
    assert (config.layer_rope(0), config.layer_rope(5)) == (Rope(1e4), Rope(1e6))
    assert (config.scale, config.embedding_scale, config.tied_head) == (0.125, 8.0, True)
    assert config.norm_offset and config.sandwich_norms and config.qk_norm and config.activation == "gelu_tanh"


def test_qwen2_window_only_when_switched_on() -> None:
    values = {**BASE, "model_type": "qwen2", "sliding_window": 128, "max_window_layers": 1}
    assert config_from_hf({**values, "use_sliding_window": False}).windows == ()
    on = config_from_hf({**values, "use_sliding_window": True})
    assert on.windows == (0, 128, 128)
    assert on.qkv_bias and not on.output_bias


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'"),
        ({"model_type": None}, "model_type"),
        ({"hidden_size": None}, "no 'hidden_size'"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 3}, "num_kv_heads is 3"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "num_attention_heads is 5"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"clip_qkv": 8.0}, "'clip_qkv'"),
        ({"num_local_experts": 8}, "'num_local_experts'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"text_config": {"a": 1}}, "multimodal"),
        ({"use_bidirectional_attention": True}, "causally"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "'dynamic'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "without a factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mscale": 1.0}}, "'mscale'"),
        ({"rope_theta": -1.0}, "theta is -1"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "full_attention", "chunked_attention"]}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 3}, "sliding_window is off"),
        ({"eos_token_id": 100}, "eos_ids"),
        ({"attention_bias": "yes"}, "qkv_bias"),
        ({"rms_norm_eps": -1.0}, "norm_eps"),
    ],
)
def test_what_cannot_be_run_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(AlulaError, match=words):
        config_from_hf({**BASE, **change})


def test_unknown_keys_that_are_off_pass() -> None:
    assert config_from_hf({**BASE, "rope_interleaved": False, "some_adapter": None}) == config_from_hf(BASE)


def test_generation_config_names_the_eos_ids(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "eos_token_id": 1}))
    assert read_hf_config(tmp_path).eos_ids == (1,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8], "temperature": 0.6}))
    assert read_hf_config(tmp_path).eos_ids == (7, 8)


def test_damaged_config_files(tmp_path: Path) -> None:
    with pytest.raises(AlulaError, match=r"config\.json is missing"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(AlulaError, match="not valid JSON"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(AlulaError, match="no JSON object"):
        read_hf_config(tmp_path)


def test_windows_and_layers_must_agree() -> None:
    values = {name: BASE[name] for name in ("vocab_size", "hidden_size", "intermediate_size")}
    sizes = {"num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "max_position_embeddings": 9}
    with pytest.raises(AlulaError, match="windows has 1"):
        ModelConfig("llama", **values, **sizes, windows=(4,))
