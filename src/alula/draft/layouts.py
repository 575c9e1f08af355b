"""The three public layouts of a head, written: what config.json says, what the tensors are called, what cannot be said.

See `alula.draft.head_config` for the two keys whose meaning depends on the layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from alula.config import AlulaError
from alula.draft.head_config import DEFAULT_ROPE_THETA, HeadConfig, Layout, default_taps

_EAGLE3_FLAGS = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")

_UNKNOWN_FLAGS: Mapping[Layout, tuple[str, ...]] = {
    "official": _EAGLE3_FLAGS,
    "specforge": ("norm_before_fc", "norm_before_residual"),
    "speculators": (),
}
"""Flags that the engines of a layout do not know and would pass over in silence."""

SPECULATORS_VERSION = "0.9.0"
"""Release whose fields are written."""


def check_expressible(
    config: HeadConfig, weights: Mapping[str, torch.Tensor], layout: Layout, target_layers: int | None
) -> None:
    """Raises AlulaError for what that layout has no words for.

    target_layers: decoder layers of the target, None where nobody says.
    """
    if config.kind == "eagle1" and layout != "official":
        raise AlulaError(
            f"the {layout} layout has EAGLE-3 heads only, and this is an EAGLE-1/2 head: give --to official"
        )
    for flag in _UNKNOWN_FLAGS[layout]:
        if getattr(config, flag):
            raise AlulaError(f"{flag} is true, which the {layout} layout cannot say: give --to {_knowing(flag)}")
    _check_biases(config, weights, layout)
    if layout == "official":
        _check_official_taps(config, target_layers)
        _check_official_rope(config)


def head_json(
    config: HeadConfig,
    layout: Layout,
    *,
    fc_bias: bool,
    dtype: torch.dtype,
    max_position_embeddings: int,
    verifier: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The config.json of a head. rope_theta is always written, so that no loader has to guess.

    verifier: `name_or_path` and `architectures` of the target, for speculators.
    """
    values = _layer_json(config, max_position_embeddings)
    values["torch_dtype"] = str(dtype).removeprefix("torch.")
    if config.taps is not None and len(config.taps) != 3:
        values["num_aux_hidden_states"] = len(config.taps)  # which vLLM counts in eagle_config alone
    if layout == "speculators":
        return _speculators_json(config, values, verifier or {})
    if config.target_hidden_size != config.hidden_size:
        values["target_hidden_size"] = config.target_hidden_size  # the original shares no embedding where this is set
    if config.kind == "eagle1":
        # Without the key the original has a bias. It, and not attention_bias, knows qkv_bias.
        biases = {"bias": fc_bias, "qkv_bias": config.attention_bias}
        return values | {"architectures": ["LlamaForCausalLM"]} | biases | _official_rope(config)
    values |= {"attention_bias": config.attention_bias, "draft_vocab_size": config.draft_vocab_size}
    values |= {"bias": True} if fc_bias else {}
    values |= {name: True for name in _EAGLE3_FLAGS if getattr(config, name)}
    if config.taps is not None:
        values["eagle_aux_hidden_state_layer_ids"] = list(config.taps)
    if layout == "official":
        return values | {"architectures": ["LlamaForCausalLM"]} | _official_rope(config)
    if config.taps is not None:
        outputs = [tap - 1 for tap in config.taps]
        values["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": outputs, "use_aux_hidden_state": True}
    return values | {"architectures": ["LlamaForCausalLMEagle3"]}


def layout_tensors(config: HeadConfig, weights: Mapping[str, torch.Tensor], layout: Layout) -> dict[str, torch.Tensor]:
    """The tensors of `HeadFiles.weights` under the layout's names, with the tables between the vocabularies."""
    tensors = dict(weights)
    if config.kind == "eagle3" and (layout != "official" or "d2t" in tensors):
        offsets_C = tensors.get("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        reached_V = torch.zeros(config.vocab_size, dtype=torch.bool)
        reached_V[offsets_C + torch.arange(len(offsets_C))] = True
        tensors |= {"d2t": offsets_C, "t2d": reached_V}
    if layout == "speculators":
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    return tensors


def _layer_json(config: HeadConfig, max_position_embeddings: int) -> dict[str, Any]:
    """What every layout says of the layer, in Llama's words."""
    values: dict[str, Any] = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "rope_theta": config.rope.theta,
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": False,
    }
    rope = config.rope
    if rope.scaling == "linear":
        values["rope_scaling"] = {"rope_type": rope.scaling, "factor": rope.factor}
    elif rope.scaling != "default":
        values["rope_scaling"] = {
            "rope_type": rope.scaling,
            "factor": rope.factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position,
        }
    return values


def _official_rope(config: HeadConfig) -> dict[str, Any]:
    """The original wants exactly these two fields."""
    if config.rope.scaling == "default":
        return {}
    return {"rope_scaling": {"type": config.rope.scaling, "factor": config.rope.factor}}


def _speculators_json(config: HeadConfig, layer: Mapping[str, Any], verifier: Mapping[str, Any]) -> dict[str, Any]:
    other_width = config.target_hidden_size != config.hidden_size
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": 3,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "torch_dtype": layer["torch_dtype"],
        "tie_word_embeddings": False,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size if other_width else None,
        "eagle_aux_hidden_state_layer_ids": None if config.taps is None else list(config.taps),
        **{name: getattr(config, name) for name in _EAGLE3_FLAGS},
        "embed_requires_grad": False,
        "transformer_layer_config": {**layer, "attention_bias": config.attention_bias},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": verifier.get("name_or_path"),
                "architectures": list(verifier.get("architectures") or ()),
            },
        },
    }


def _knowing(flag: str) -> Layout:
    return "speculators" if flag in _UNKNOWN_FLAGS["specforge"] else "specforge"


def _check_biases(config: HeadConfig, weights: Mapping[str, torch.Tensor], layout: Layout) -> None:
    """EAGLE-1/2 has fc.bias and those of q, k and v; SGLang knows fc.bias; speculators all four of the attention."""
    output = any(name.endswith("o_proj.bias") for name in weights)
    eagle1 = config.kind == "eagle1"
    if "fc.bias" in weights and not (eagle1 or layout == "specforge"):
        raise AlulaError(f"the head has fc.bias, which the {layout} layout cannot say: give --to specforge")
    if layout == "speculators" and config.attention_bias and not output:
        raise AlulaError("the head lacks o_proj.bias, which attention_bias stands for in the speculators layout")
    if layout != "speculators" and config.attention_bias and (output or not eagle1):
        raise AlulaError(f"the head has attention biases that the {layout} layout cannot say: give --to speculators")


def _check_official_taps(config: HeadConfig, target_layers: int | None) -> None:
    """The original always reads the inputs of layers 2, n // 2 and n - 3."""
    if config.kind == "eagle1" or config.taps is None:
        return
    layers = config.taps[-1] + 3 if target_layers is None else target_layers
    if layers < 7 or config.taps != default_taps(layers):
        raise AlulaError(
            f"the head reads the inputs of layers {list(config.taps)}, and the official layout always those of layers "
            "2, n // 2 and n - 3 of n: give --to specforge or speculators"
        )


def _check_official_rope(config: HeadConfig) -> None:
    rope = config.rope
    if rope.scaling not in ("default", "linear") or (rope.scaling == "linear" and rope.theta != DEFAULT_ROPE_THETA):
        raise AlulaError(
            f"the head's rope_scaling is {rope.scaling!r} with base {rope.theta:g}, and the official layout can say "
            "linear with base 10000 alone: give --to specforge or speculators"
        )
