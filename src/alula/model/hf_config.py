"""config.json of a Hugging Face checkpoint -> ModelConfig, strictly.

A key that is neither read nor known to be without effect is an error unless it is switched off (null, false, empty):
a silent default here is a wrong model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from alula.config import AlulaError, ModelConfig, Rope

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NEUTRAL = _words(
    """architectures model_type torch_dtype dtype transformers_version initializer_range use_cache pad_token_id
    attention_dropout pretraining_tp _name_or_path id2label label2id problem_type return_dict output_hidden_states
    output_attentions chunk_size_feed_forward is_encoder_decoder _attn_implementation attn_implementation
    cache_implementation transformers.js_config is_llama_config unsloth_version unsloth_fixed max_length temperature
    top_p top_k do_sample unk_token_id sep_token_id cls_token_id tokenizer_class eos_token bos_token
    resid_pdrop embd_pdrop attn_pdrop hidden_dropout name_or_path license author"""
)
_READ = _words(
    """vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    max_position_embeddings rms_norm_eps hidden_act hidden_activation rope_theta rope_scaling rope_parameters
    rope_local_base_freq attention_bias mlp_bias sliding_window use_sliding_window max_window_layers layer_types
    sliding_window_pattern _sliding_window_pattern tie_word_embeddings query_pre_attn_scalar
    attn_logit_softcapping final_logit_softcapping bos_token_id eos_token_id partial_rotary_factor"""
)
_ROPE_KEYS = _words(
    """rope_type type rope_theta factor low_freq_factor high_freq_factor original_max_position_embeddings
    partial_rotary_factor"""
)
_REFUSED = {
    "quantization_config": "quantised Hugging Face checkpoints are not read; give the unquantised one, or a GGUF file",
    "use_bidirectional_attention": "alula decodes causally",
    "text_config": "multimodal checkpoints are not read; give a text-only one",
}
_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "rope_parameters": (dict, "an object"),
    "rope_scaling": (dict, "an object"),
    "layer_types": (list, "a list"),
    **dict.fromkeys(
        ("sliding_window", "max_window_layers", "sliding_window_pattern", "_sliding_window_pattern", "bos_token_id"),
        (int, "a whole number"),
    ),
    **dict.fromkeys(
        ("rope_theta", "rope_local_base_freq", "query_pre_attn_scalar", "partial_rotary_factor"),
        ((int, float), "a number"),
    ),
}
"""What is computed with before ModelConfig and Rope check their values."""
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
}


def read_hf_config(folder: Path) -> ModelConfig:
    """Reads config.json, and the EOS ids of generation_config.json where there is one (as `generate` does)."""
    values = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    if generation.is_file():
        eos = read_json(generation).get("eos_token_id")
        values = values if eos is None else {**values, "eos_token_id": eos}
    return config_from_hf(values)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; AlulaError for anything else."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise AlulaError(f"{path} is missing: give a folder with a complete Hugging Face checkpoint") from None
    except (ValueError, RecursionError) as error:
        raise AlulaError(f"{path} is not valid JSON ({error}): download it again") from None
    if not isinstance(values, dict):
        raise AlulaError(f"{path} holds no JSON object: download it again")
    return cast("dict[str, Any]", values)


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """Flags for one of the families; AlulaError names the key that is missing, unknown or unsupported."""
    _check_keys(values)
    family = values["model_type"]
    heads = _whole(values, "num_attention_heads")
    hidden = _whole(values, "hidden_size")
    gemma = family == "gemma3_text"
    windows = _windows(values, family)
    rope, local = _ropes(values, gemma)
    return ModelConfig(
        family=family,
        vocab_size=_need(values, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_need(values, "intermediate_size"),
        num_layers=_whole(values, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_or(values, "num_key_value_heads", heads),
        head_dim=_head_dim(values, hidden, heads),
        max_position_embeddings=_need(values, "max_position_embeddings"),
        norm_eps=_or(values, "rms_norm_eps", 1e-6),
        activation=_activation(values, "hidden_activation" if gemma else "hidden_act"),
        rope=rope,
        local_rope=local,
        windows=windows,
        qkv_bias=_or(values, "attention_bias", family == "qwen2"),
        output_bias=family != "qwen2" and _or(values, "attention_bias", False),
        mlp_bias=_or(values, "mlp_bias", False),
        qk_norm=family in ("qwen3", "gemma3_text"),
        norm_offset=gemma,
        sandwich_norms=gemma,
        embedding_scale=float(hidden) ** 0.5 if gemma else 1.0,
        attention_scale=_attention_scale(values) if gemma else 0.0,
        attention_softcap=_or(values, "attn_logit_softcapping", 0.0),
        final_softcap=_or(values, "final_logit_softcapping", 0.0),
        tied_head=_or(values, "tie_word_embeddings", gemma),
        bos_id=values.get("bos_token_id"),
        eos_ids=as_ids(values.get("eos_token_id")),
    )


def as_ids(value: object) -> tuple[int, ...]:
    """eos_token_id is null, one id or a list of ids."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (cast("int", value),)


def _need(values: Mapping[str, Any], key: str) -> Any:
    value = values.get(key)
    if value is None:
        raise AlulaError(f"config.json has no {key!r}: download a complete checkpoint, or add the key")
    return value


def _whole(values: Mapping[str, Any], key: str) -> int:
    value = _need(values, key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise AlulaError(f"{key} is {value!r} in config.json: give a whole number of at least 1")
    return value


def _or(values: Mapping[str, Any], key: str, default: Any) -> Any:
    value = values.get(key)
    return default if value is None else value


def _check_keys(values: Mapping[str, Any]) -> None:
    for key, why in _REFUSED.items():
        if values.get(key):
            raise AlulaError(f"config.json sets {key!r}: {why}")
    family = values.get("model_type")
    if family not in FAMILIES:
        raise AlulaError(f"model_type is {family!r}: alula runs {', '.join(FAMILIES)}")
    for key, (kind, mend) in _KINDS.items():
        if values.get(key) is not None and not isinstance(values[key], kind):
            raise AlulaError(f"{key} is {values[key]!r} in config.json: give {mend}")
    for key, value in values.items():
        if key not in _NEUTRAL and key not in _READ and value not in (None, False, {}, [], ""):
            raise AlulaError(
                f"config.json sets {key!r} to {value!r}, which alula does not know: remove the key if it does not "
                "change what the model computes"
            )


def _head_dim(values: Mapping[str, Any], hidden: int, heads: int) -> int:
    if values.get("head_dim") is not None:
        return _whole(values, "head_dim")
    if values["model_type"] == "gemma3_text":
        return 256
    if values["model_type"] == "qwen3":
        return 128
    if hidden % heads:
        raise AlulaError(f"num_attention_heads is {heads!r}, which does not divide hidden_size {hidden}: set head_dim")
    return hidden // heads


def _activation(values: Mapping[str, Any], key: str) -> str:
    name = _or(values, key, "gelu_pytorch_tanh" if key == "hidden_activation" else "silu")
    if name not in _ACTIVATIONS:
        raise AlulaError(f"{key} is {name!r}: alula has {', '.join(sorted(_ACTIVATIONS))}")
    return _ACTIVATIONS[name]


def _attention_scale(values: Mapping[str, Any]) -> float:
    scalar = float(_or(values, "query_pre_attn_scalar", 256))
    if not 0 < scalar < math.inf:
        raise AlulaError(f"query_pre_attn_scalar is {scalar} in config.json: give a number above 0")
    return 1.0 / math.sqrt(scalar)


def _windows(values: Mapping[str, Any], family: str) -> tuple[int, ...]:
    """Window per layer, 0 for full attention; () where no layer has one."""
    layers, window = _whole(values, "num_hidden_layers"), _window(values, family)
    if family in ("qwen2", "qwen3") and not values.get("use_sliding_window"):
        window = None
    types = values.get("layer_types")
    if types is None:
        types = _default_types(values, family, layers)
    unknown = [kind for kind in types if kind not in ("full_attention", "sliding_attention")]
    if unknown or len(types) != layers:
        raise AlulaError(
            f"layer_types is {types!r}: give {layers} entries, each 'full_attention' or 'sliding_attention'"
        )
    if "sliding_attention" not in types:
        return ()
    if window is None:
        raise AlulaError("layer_types has 'sliding_attention' but sliding_window is off: set sliding_window")
    return tuple(int(window) if kind == "sliding_attention" else 0 for kind in types)


def _window(values: Mapping[str, Any], family: str) -> Any:
    """Mistral's is 4096 where the key is absent; null switches it off."""
    return values.get("sliding_window", 4096 if family == "mistral" else None)


def _default_types(values: Mapping[str, Any], family: str, layers: int) -> list[str]:
    if family == "gemma3_text":
        period = _or(values, "sliding_window_pattern", _or(values, "_sliding_window_pattern", 6))
        if period < 1:
            raise AlulaError(f"sliding_window_pattern is {period} in config.json: give a whole number of at least 1")
        first, sliding = 0, [bool((layer + 1) % period) for layer in range(layers)]
    else:
        qwen = family in ("qwen2", "qwen3")
        active = bool(_window(values, family)) and (family == "mistral" or bool(values.get("use_sliding_window")))
        first = _or(values, "max_window_layers", 28) if qwen else 0
        sliding = [active] * layers
    return ["sliding_attention" if on and layer >= first else "full_attention" for layer, on in enumerate(sliding)]


def _ropes(values: Mapping[str, Any], gemma: bool) -> tuple[Rope, Rope | None]:
    """The RoPE of all layers, or for Gemma 3 (of full layers, of sliding layers). Old and new key spellings."""
    if values.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise AlulaError(f"partial_rotary_factor is {values['partial_rotary_factor']}: alula turns whole heads only")
    new = dict(values.get("rope_parameters") or {})
    positions = values.get("max_position_embeddings")
    if not gemma:
        old = {**new, **(values.get("rope_scaling") or {})}
        return _rope(old, _or(values, "rope_theta", 10_000.0), positions), None
    full = {**(new.get("full_attention") or {}), **(values.get("rope_scaling") or {})}
    return (
        _rope(full, _or(values, "rope_theta", 1_000_000.0), positions),
        _rope(
            new.get("sliding_attention") or {},
            _or(values, "rope_local_base_freq", 10_000.0),
            positions,
        ),
    )


def _rope(values: Mapping[str, Any], theta: float, positions: int | None) -> Rope:
    kind = _or(values, "rope_type", _or(values, "type", "default"))
    if kind not in ("default", "linear", "llama3"):
        return Rope(scaling=kind)  # raises, naming the kind
    unknown = [key for key in values if key not in _ROPE_KEYS and values[key] is not None]
    if unknown:
        raise AlulaError(f"the RoPE parameters hold {unknown[0]!r}, which alula does not know: remove it")
    if values.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise AlulaError(f"partial_rotary_factor is {values['partial_rotary_factor']}: alula turns whole heads only")
    theta = _or(values, "rope_theta", theta)
    if kind == "default":
        return Rope(theta)
    if values.get("factor") is None:
        raise AlulaError(f"rope_type is {kind!r} without a factor: add it")
    if kind == "linear":
        return Rope(theta, kind, values["factor"])
    return Rope(
        theta,
        kind,
        values["factor"],
        _llama3(values, "low_freq_factor"),
        _llama3(values, "high_freq_factor"),
        _or(values, "original_max_position_embeddings", positions),
    )


def _llama3(values: Mapping[str, Any], key: str) -> Any:
    if values.get(key) is None:
        raise AlulaError(f"rope_type is 'llama3' without {key!r}: add it")
    return values[key]
