"""GGUF metadata -> the config.json that the same model would have as a Hugging Face checkpoint.

Keys follow the GGUF specification (ggml-org/ggml, docs/gguf.md) and what llama.cpp's converter writes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from alula.config import AlulaError, Rope
from alula.model.rope import inverse_frequencies

MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3": "gemma3_text",
}

_KNOWN = frozenset(
    [
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "vocab_size",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "attention.causal",
        "rope.freq_base",
        "rope.freq_base_swa",
        "rope.dimension_count",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.finetuned",
        "attn_logit_softcapping",
        "final_logit_softcapping",
    ]
)
_GEMMA3_27B_LAYERS = 62


class _Keys:
    """Metadata of one architecture, by the part of the key after its name."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        prefix = f"{architecture}."
        self._prefix = prefix
        self._values = {key[len(prefix) :]: value for key, value in metadata.items() if key.startswith(prefix)}
        for key, value in self._values.items():
            if key not in _KNOWN and value not in (0, False, "", [], "none"):
                raise AlulaError(
                    f"GGUF key {prefix + key!r} is {value!r}, which alula does not know: give the model as a Hugging "
                    "Face folder"
                )

    def get(self, key: str, default: Any = None) -> Any:
        value = self._values.get(key)
        return default if value is None else value

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None or isinstance(value, list):
            raise AlulaError(
                f"GGUF key {self._prefix + key!r} is {value!r}: alula needs one number, convert the file anew"
            )
        return value


def hf_config(
    metadata: Mapping[str, Any],
    tensor_names: Collection[str],
    vocab_size: int,
    rope_freqs: torch.Tensor | None = None,
) -> dict[str, Any]:
    """config.json as a dictionary.

    vocab_size: rows of the embedding. rope_freqs: the tensor of that name, divisors of the inverse frequencies.
    Raises AlulaError for an architecture or a key that alula does not run.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in MODEL_TYPES:
        raise AlulaError(
            f"general.architecture is {architecture!r}: alula reads GGUF files of {', '.join(MODEL_TYPES)}"
        )
    keys = _Keys(metadata, architecture)
    heads, hidden = keys.need("attention.head_count"), keys.need("embedding_length")
    head_dim = keys.get("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.get(key, head_dim) != head_dim:
            raise AlulaError(
                f"GGUF key '{architecture}.{key}' is {keys.get(key)}: alula needs the head size {head_dim}"
            )
    config = {
        "model_type": MODEL_TYPES[architecture],
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": keys.need("feed_forward_length"),
        "num_hidden_layers": keys.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.need("context_length"),
        "rms_norm_eps": keys.need("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "rope_parameters": _rope(keys, head_dim, rope_freqs),
        **_token_ids(metadata),
    }
    if architecture == "gemma3":
        return {**config, **_gemma3(keys, config)}
    if architecture != "qwen2":
        config["attention_bias"] = "blk.0.attn_q.bias" in tensor_names
    if architecture == "llama":
        config["mlp_bias"] = "blk.0.ffn_up.bias" in tensor_names
        if keys.get("attention.sliding_window"):
            config |= {
                "model_type": "mistral",
                "sliding_window": keys.get("attention.sliding_window"),
            }
    return config


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    return {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(end for end in ends if end is not None)),
    }


def _rope(keys: _Keys, head_dim: int, rope_freqs: torch.Tensor | None) -> dict[str, Any]:
    theta, kind = (
        keys.get("rope.freq_base", 10_000.0),
        keys.get("rope.scaling.type", "none"),
    )
    if rope_freqs is not None:
        return _llama3(rope_freqs, theta, head_dim)
    if kind == "linear":
        return {
            "rope_type": "linear",
            "rope_theta": theta,
            "factor": keys.need("rope.scaling.factor"),
        }
    return {"rope_type": "default" if kind == "none" else kind, "rope_theta": theta}


def _llama3(divisors_K: torch.Tensor, theta: float, head_dim: int) -> dict[str, Any]:
    """llama.cpp stores Llama 3's scaling as divisors; they must be those of the published low, high and length."""
    factor = float(divisors_K.max())
    rope = Rope(theta, "llama3", factor, 1.0, 4.0, 8192)
    expected_K = inverse_frequencies(Rope(theta), head_dim) / inverse_frequencies(rope, head_dim)
    if divisors_K.shape != expected_K.shape or not torch.allclose(divisors_K.float(), expected_K, rtol=1e-3):
        raise AlulaError(
            "tensor 'rope_freqs.weight' is no llama3 RoPE scaling: give the model as a Hugging Face folder"
        )
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _gemma3(keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    layers, heads, head_dim = (config[key] for key in ("num_hidden_layers", "num_attention_heads", "head_dim"))
    pattern = keys.get("attention.sliding_window_pattern", 6)
    sliding = pattern if isinstance(pattern, list) else [bool((layer + 1) % pattern) for layer in range(layers)]
    # The one size whose queries are scaled by the width per head instead of the head size.
    scalar = config["hidden_size"] // heads if layers == _GEMMA3_27B_LAYERS else head_dim
    local = {
        "rope_type": "default",
        "rope_theta": keys.get("rope.freq_base_swa", 10_000.0),
    }
    full = {
        **config["rope_parameters"],
        "rope_theta": keys.get("rope.freq_base", 1_000_000.0),
    }
    return {
        "sliding_window": keys.need("attention.sliding_window"),
        "layer_types": ["sliding_attention" if on else "full_attention" for on in sliding],
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": keys.get("attn_logit_softcapping"),
        "final_logit_softcapping": keys.get("final_logit_softcapping"),
    }
