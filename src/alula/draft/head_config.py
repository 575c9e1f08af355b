"""What the config.json of an EAGLE head says, in any of the three public layouts, checked key by key.

The layouts: official EAGLE (a plain Llama config), SpecForge/SGLang (the same with flags and `eagle_config`), and
speculators/vLLM (its own keys around `transformer_layer_config`). Two keys mean different things in them:

- `eagle_aux_hidden_state_layer_ids` inside `eagle_config` names layers whose *outputs* are the features (SGLang adds
  one to each); outside of it, where vLLM and speculators look, layers whose *inputs* are. `HeadConfig.taps` are inputs.
- `norm_output` in SpecForge's own trainer once meant that the LM head reads normed states; everywhere else, and in
  `HeadConfig`, that normed states are fed back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from alula.config import AlulaError, Rope

HeadKind = Literal["eagle1", "eagle3"]

Layout = Literal["official", "specforge", "speculators"]

DEFAULT_ROPE_THETA = 10000.0
"""Official EAGLE-3 heads are trained with this base, whatever their target uses."""


@dataclass(frozen=True)
class HeadConfig:
    """One EAGLE head. Field names follow the config files.

    kind: `eagle1` (EAGLE-1/2: final feature, target's LM head) or `eagle3` (taps, own LM head).
    taps: decoder layers whose inputs are the features; None asks for the default of the target's depth.
    fc_norm: one RMS norm per tap before `fc` (EAGLE-3.1); norm_before_fc: one over all taps together.
    norm_output: the state fed back to the next step is the output of the final norm (EAGLE-3.1).
    norm_before_residual: the residual of the layer is the normed hidden, not the fused one.
    """

    kind: HeadKind
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    hidden_act: str = "silu"
    rope: Rope = field(default_factory=lambda: Rope(DEFAULT_ROPE_THETA))
    taps: tuple[int, ...] | None = None
    attention_bias: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False

    def tap_layers(self, target_layers: int) -> tuple[int, ...]:
        """Taps for a target of that many layers: its config's own, else the default (-1: after the final norm)."""
        if self.kind == "eagle1":
            return (-1,)
        taps = self.taps if self.taps is not None else default_taps(target_layers)
        for tap in taps:
            if not 0 <= tap <= target_layers:
                raise AlulaError(
                    f"eagle_aux_hidden_state_layer_ids names layer {tap}, but the target has {target_layers} layers:"
                    " give the head of this target"
                )
        return taps


def default_taps(target_layers: int) -> tuple[int, int, int]:
    """Inputs of layers 2, n // 2 and n - 3; for models too small for that to be three layers, others in their place.

    Raises AlulaError for a target of a single layer.
    """
    if target_layers >= 7:
        return 2, target_layers // 2, target_layers - 3
    if target_layers >= 4:
        return 1, target_layers // 2, target_layers - 1
    if target_layers >= 2:
        return target_layers - 2, target_layers - 1, target_layers
    raise AlulaError("the target has a single layer: EAGLE-3 needs three distinct features, use an EAGLE-1 head")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_IGNORED = _words(
    """architectures model_type torch_dtype dtype transformers_version _name_or_path name_or_path
    bos_token_id eos_token_id pad_token_id unk_token_id initializer_range use_cache tie_word_embeddings
    max_position_embeddings attention_dropout max_window_layers use_sliding_window layer_types
    speculators_version speculators_config speculators_model_type embed_requires_grad return_dict
    output_hidden_states output_attentions torchscript chunk_size_feed_forward is_encoder_decoder
    id2label label2id problem_type target_model_type model_name use_return_dict"""
)
"""Keys that do not change what a head computes here. `max_position_embeddings` is one: RoPE is sized by the
serving context."""

_USED = _words(
    """hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim rms_norm_eps vocab_size
    draft_vocab_size target_hidden_size hidden_act rope_theta rope_scaling rope_parameters num_hidden_layers
    attention_bias qkv_bias bias mlp_bias fc_norm norm_before_fc norm_output norm_before_residual eagle_config
    eagle_aux_hidden_state_layer_ids target_layer_ids num_aux_hidden_states use_aux_norm sliding_window
    pretraining_tp logit_scale transformer_layer_config"""
)

_EAGLE_CONFIG_KEYS = _words("eagle_aux_hidden_state_layer_ids use_aux_hidden_state norm_before_fc fc_norm norm_output")

_FIXED: Mapping[str, tuple[Any, ...]] = {
    "num_hidden_layers": (1,),
    "mlp_bias": (False, None),
    "sliding_window": (None,),
    "pretraining_tp": (1, None),
    "logit_scale": (1, 1.0, None),
}


def layout_of(raw: Mapping[str, Any]) -> Layout:
    """Whose layout a config.json is in."""
    if "speculators_model_type" in raw or "transformer_layer_config" in raw:
        return "speculators"
    if "eagle_config" in raw or "LlamaForCausalLMEagle3" in (raw.get("architectures") or ()):
        return "specforge"
    return "official"


def read_head_config(raw: Mapping[str, Any], kind: HeadKind, *, nested_inputs: bool = False) -> HeadConfig:
    """Check a head's config.json. Raises AlulaError naming the key.

    nested_inputs: layer numbers inside `eagle_config` name inputs too, as in heads that alula wrote before it
    recorded the taps.
    """
    flat = _flatten(raw)
    unknown = sorted(set(flat) - _USED - _IGNORED)
    if unknown:
        raise AlulaError(f"the head's config.json has the unknown key {unknown[0]!r}: remove it, or update alula")
    if layout_of(raw) == "speculators" and "norm_before_residual" not in flat:
        raise AlulaError(
            "the head's config.json lacks norm_before_residual, which speculators takes for false and vLLM for true: "
            "state which of them it was trained with"
        )
    for key, values in _FIXED.items():
        if key in flat and flat[key] not in values and not _window_unused(key, flat):
            raise AlulaError(f"{key} is {flat[key]!r} in the head's config.json: only {values[0]!r} is supported")
    if (_flag(flat, "fc_norm") or _flag(flat, "use_aux_norm")) and _flag(flat, "norm_before_fc"):
        raise AlulaError("fc_norm and norm_before_fc are both true in the head's config.json: set the one it has")
    hidden = _whole(flat, "hidden_size")
    heads = _whole(flat, "num_attention_heads")
    vocab = _whole(flat, "vocab_size")
    return HeadConfig(
        kind=kind,
        hidden_size=hidden,
        intermediate_size=_whole(flat, "intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=_whole(flat, "num_key_value_heads", heads),
        head_dim=_whole(flat, "head_dim", hidden // heads),
        rms_norm_eps=_positive(flat, "rms_norm_eps", 1e-6),
        vocab_size=vocab,
        draft_vocab_size=_whole(flat, "draft_vocab_size", vocab) if kind == "eagle3" else vocab,
        target_hidden_size=_whole(flat, "target_hidden_size", hidden),
        hidden_act=str(flat.get("hidden_act", "silu")),
        rope=_rope(flat),
        taps=_taps(raw, flat, nested_inputs),
        attention_bias=_flag(flat, "attention_bias") or _flag(flat, "qkv_bias"),
        fc_norm=_flag(flat, "fc_norm") or _flag(flat, "use_aux_norm"),
        norm_before_fc=_flag(flat, "norm_before_fc"),
        norm_output=_flag(flat, "norm_output"),
        norm_before_residual=_flag(flat, "norm_before_residual"),
    )


def _flatten(raw: Mapping[str, Any]) -> dict[str, Any]:
    """One level of keys: the nested layer config and eagle_config are lifted; outer keys win."""
    flat = dict(raw)
    inner, eagle = _object(flat, "transformer_layer_config"), _object(flat, "eagle_config")
    flat = {key: value for key, value in flat.items() if key not in ("transformer_layer_config", "eagle_config")}
    unknown = sorted(set(eagle) - _EAGLE_CONFIG_KEYS)
    if unknown:
        raise AlulaError(f"eagle_config has the unknown key {unknown[0]!r}: remove it, or update alula")
    if eagle.get("use_aux_hidden_state", True) is not True:
        raise AlulaError("use_aux_hidden_state is false in eagle_config: only heads on tapped layers are supported")
    eagle = {key: value for key, value in eagle.items() if key != "use_aux_hidden_state"}
    return {**inner, **eagle, **flat}


def _window_unused(key: str, flat: Mapping[str, Any]) -> bool:
    return key == "sliding_window" and flat.get("use_sliding_window") is False


def _whole(flat: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = flat.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise AlulaError(f"{key} is {value!r} in the head's config.json: give a whole number of at least 1")
    return value


def _positive(flat: Mapping[str, Any], key: str, default: float) -> float:
    value = flat.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise AlulaError(f"{key} is {value!r} in the head's config.json: give a number above 0")
    return float(value)


def _object(flat: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = flat.get(key) or {}
    if not isinstance(value, dict):
        raise AlulaError(f"{key} is {value!r} in the head's config.json: give an object")
    return value


def _flag(flat: Mapping[str, Any], key: str) -> bool:
    value = flat.get(key) or False
    if not isinstance(value, bool):
        raise AlulaError(f"{key} is {value!r} in the head's config.json: give true or false")
    return value


def _taps(raw: Mapping[str, Any], flat: Mapping[str, Any], nested_inputs: bool) -> tuple[int, ...] | None:
    """Inputs of layers, from either place; both may be given where they agree."""
    taps = _layers(raw.get(_TAPS, raw.get("target_layer_ids")))
    nested = _layers(_object(raw, "eagle_config").get(_TAPS))
    if nested is not None and not nested_inputs:
        nested = tuple(layer + 1 for layer in nested)
    if taps is not None and nested is not None and taps != nested:
        raise AlulaError(
            f"{_TAPS} is {list(taps)}, but the one in eagle_config stands for {list(nested)} (it names outputs of "
            "layers, one less than their inputs): make them agree"
        )
    taps = nested if taps is None else taps
    _check_taps(taps, flat.get("num_aux_hidden_states"))
    return taps


_TAPS = "eagle_aux_hidden_state_layer_ids"


def _layers(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not value or not all(type(layer) is int for layer in value):
        raise AlulaError(f"{_TAPS} is {value!r}: give a list of layer numbers")
    return tuple(value)


def _check_taps(taps: tuple[int, ...] | None, count: object) -> None:
    if taps is None:
        if count not in (None, 3):
            raise AlulaError(f"num_aux_hidden_states is {count!r}: list them in {_TAPS}")
        return
    if list(taps) != sorted(set(taps)):
        raise AlulaError(
            f"{_TAPS} names the inputs of layers {list(taps)}: list them in ascending order, in which every engine "
            "hands their features to fc"
        )
    if count is not None and count != len(taps):
        raise AlulaError(f"num_aux_hidden_states is {count!r}, but {len(taps)} layers are listed: make them agree")


_ROPE_FIELDS: Mapping[str, str] = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_position",
}


def _rope(flat: Mapping[str, Any]) -> Rope:
    """Base and scaling, from either spelling (rope_theta and rope_scaling, or rope_parameters)."""
    values = {**_object(flat, "rope_parameters"), **_object(flat, "rope_scaling")}
    stated = flat if flat.get("rope_theta") else values
    theta = _positive(stated, "rope_theta", DEFAULT_ROPE_THETA)
    kind = values.pop("rope_type", None) or values.pop("type", None) or "default"
    values = {key: value for key, value in values.items() if value is not None and key not in ("type", "rope_theta")}
    unknown = sorted(set(values) - set(_ROPE_FIELDS))
    if unknown:
        raise AlulaError(f"rope_scaling has the unknown key {unknown[0]!r} in the head's config.json: remove it")
    if kind == "default":
        return Rope(theta)
    return Rope(theta, kind, **{_ROPE_FIELDS[key]: value for key, value in values.items()})
