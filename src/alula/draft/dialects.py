"""Heads on disk: the official EAGLE layout, and the names of SpecForge/SGLang and speculators/vLLM.

Loading is strict: every tensor is accounted for, and what is missing is an error, since a silent default (d2t above
all) makes a head that loads well and is never accepted.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from alula.config import AlulaError
from alula.draft.head_config import HeadConfig, HeadKind, read_head_config

_TENSOR_FILES = ("model.safetensors", "pytorch_model.bin")
_LEGACY_NORMS = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
_TARGET_ONLY = frozenset({"verifier_norm.weight", "verifier_lm_head.weight"})
"""Copies of the target's tensors that some trainers leave in; not the head's."""


@dataclass(frozen=True)
class HeadFiles:
    """A head as read: checked configuration, official tensor names, provenance where there is one.

    weights: as stored. `d2t` is int64 and only there when the draft vocabulary is not the target's.
    """

    config: HeadConfig
    weights: dict[str, torch.Tensor]
    provenance: dict[str, Any] | None


def is_head_folder(folder: Path) -> bool:
    """Whether this is meant to be an EAGLE head rather than a whole model: its tensors, or, where those cannot be read,
    a config without a tokenizer."""
    if not (folder / "config.json").is_file():
        return False
    if not any(folder.glob("tokenizer*")):
        return True
    try:
        return "fc.weight" in _tensor_names(folder)
    except AlulaError:
        return False


def read_head(folder: Path) -> HeadFiles:
    """Read and check a head. Raises AlulaError naming the file, key or tensor and the mend."""
    raw = _read_json(folder / "config.json")
    weights = {_official(name): tensor for name, tensor in _read_tensors(folder).items() if name not in _TARGET_ONLY}
    kind = _kind(weights)
    if kind == "eagle3":
        weights = {re.sub(r"^layers\.0\.", "midlayer.", name): tensor for name, tensor in weights.items()}
    config = read_head_config(raw, kind)
    _check_act(config)
    _check_fc_bias(raw, weights)
    _check_tensors(config, weights)
    provenance = folder / "provenance.json"
    return HeadFiles(
        config=config,
        weights=_with_vocabulary(config, weights),
        provenance=_read_json(provenance) if provenance.is_file() else None,
    )


def save_official(
    folder: Path,
    config: HeadConfig,
    weights: Mapping[str, torch.Tensor],
    provenance: Mapping[str, Any] | None = None,
    *,
    max_position_embeddings: int = 2048,
) -> None:
    """Write a head in the official layout: config.json, model.safetensors (floats as bf16) and provenance.json.

    The folder appears, or is replaced, only once everything is written. Raises AlulaError for tensors that
    `read_head` would refuse.
    """
    from safetensors.torch import save_file

    stored = {name: _stored(tensor) for name, tensor in weights.items()}
    _check_tensors(config, stored)
    _with_vocabulary(config, stored)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        save_file(stored, partial / "model.safetensors", metadata={"format": "pt"})
        _write_json(partial / "config.json", config_json(config, "fc.bias" in stored, max_position_embeddings))
        if provenance is not None:
            _write_json(partial / "provenance.json", provenance)
        _put_in_place(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def config_json(config: HeadConfig, fc_bias: bool, max_position_embeddings: int) -> dict[str, Any]:
    """The config.json of a head. rope_theta is always written, so that no loader has to guess."""
    values: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3" if config.kind == "eagle3" else "LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.target_hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "rope_theta": config.rope.theta,
        "max_position_embeddings": max_position_embeddings,
        "attention_bias": config.attention_bias,
        "bias": fc_bias,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    if config.rope.scaling != "default":
        values["rope_scaling"] = {
            "rope_type": config.rope.scaling,
            "factor": config.rope.factor,
            "low_freq_factor": config.rope.low_freq_factor,
            "high_freq_factor": config.rope.high_freq_factor,
            "original_max_position_embeddings": config.rope.original_max_position,
        }
    if config.kind == "eagle3":
        values["draft_vocab_size"] = config.draft_vocab_size
        values |= {name: True for name in _EAGLE3_FLAGS if getattr(config, name)}
        if config.taps is not None:
            values["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(config.taps)}
    return values


_EAGLE3_FLAGS = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")


def expected_shapes(config: HeadConfig, taps: int) -> dict[str, tuple[int, ...]]:
    """Required tensors of a head with that many taps, in official names."""
    hidden, keys = config.hidden_size, config.num_key_value_heads * config.head_dim
    queries, inner = config.num_attention_heads * config.head_dim, config.intermediate_size
    eagle3 = config.kind == "eagle3"
    layer, width = ("midlayer", 2 * hidden) if eagle3 else ("layers.0", hidden)
    features = taps * config.target_hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, features if eagle3 else hidden + features),
        f"{layer}.self_attn.q_proj.weight": (queries, width),
        f"{layer}.self_attn.k_proj.weight": (keys, width),
        f"{layer}.self_attn.v_proj.weight": (keys, width),
        f"{layer}.self_attn.o_proj.weight": (hidden, queries),
        f"{layer}.mlp.gate_proj.weight": (inner, hidden),
        f"{layer}.mlp.up_proj.weight": (inner, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, inner),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
    }
    if config.attention_bias:
        sizes = {"q": queries, "k": keys, "v": keys}
        shapes |= {f"{layer}.self_attn.{name}_proj.bias": (size,) for name, size in sizes.items()}
    if not eagle3:
        return shapes
    shapes |= {f"midlayer.{name}.weight": (hidden,) for name in ("hidden_norm", "input_layernorm")}
    shapes |= {"norm.weight": (hidden,), "lm_head.weight": (config.draft_vocab_size, hidden)}
    if config.fc_norm:
        shapes |= {f"fc_norm.{tap}.weight": (config.target_hidden_size,) for tap in range(taps)}
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (features,)
    return shapes


def _optional_shapes(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (vocab, hidden), "fc.bias": (hidden,)}
    if config.kind == "eagle3":
        shapes |= {"d2t": (config.draft_vocab_size,), "t2d": (vocab,)}
    if config.attention_bias:
        layer = "midlayer" if config.kind == "eagle3" else "layers.0"
        shapes[f"{layer}.self_attn.o_proj.bias"] = (hidden,)
    return shapes


def _check_tensors(config: HeadConfig, weights: Mapping[str, torch.Tensor]) -> None:
    required = expected_shapes(config, _taps_of(config))
    allowed = required | _optional_shapes(config)
    for name in required:
        if name not in weights:
            raise AlulaError(f"the head lacks the tensor {name!r}: give a complete checkpoint of this layout")
    for name, tensor in weights.items():
        if name not in allowed:
            raise AlulaError(f"the head has the unknown tensor {name!r}: remove it, or set the flag that uses it")
        if tuple(tensor.shape) != allowed[name]:
            raise AlulaError(
                f"the head's {name} has shape {tuple(tensor.shape)}, but its config.json asks for {allowed[name]}:"
                " give the config of these weights"
            )
        if name not in ("d2t", "t2d") and not tensor.is_floating_point():
            raise AlulaError(f"the head's {name} is stored as {tensor.dtype}: give unquantised floats")


def _taps_of(config: HeadConfig) -> int:
    if config.kind == "eagle1":
        return 1
    return 3 if config.taps is None else len(config.taps)


def _with_vocabulary(config: HeadConfig, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights without t2d, and with d2t (int64) only where it changes anything."""
    found = dict(weights)
    mask, offsets = found.pop("t2d", None), found.pop("d2t", None)
    if offsets is None:
        if config.draft_vocab_size != config.vocab_size:
            raise AlulaError(
                f"the head lacks d2t, though its draft vocabulary has {config.draft_vocab_size} of "
                f"{config.vocab_size} tokens: export it with d2t, without which drafts would be wrong tokens"
            )
        return found
    if offsets.is_floating_point() or offsets.dtype == torch.bool:
        raise AlulaError(f"d2t is stored as {offsets.dtype}: store whole numbers (int64)")
    if config.draft_vocab_size == config.vocab_size:
        if offsets.any():
            raise AlulaError(
                "d2t is not all zero, though the draft vocabulary is the whole one: remove it, or fill it in"
            )
        return found  # the original leaves both tables unused here, t2d even unfilled
    ids_C = offsets.long() + torch.arange(len(offsets))
    if ids_C.min() < 0 or ids_C.max() >= config.vocab_size or len(set(ids_C.tolist())) != len(ids_C):
        raise AlulaError(
            f"d2t does not lead to distinct token ids below vocab_size {config.vocab_size}: it holds offsets, so that"
            " the target id of draft id i is i + d2t[i]"
        )
    if mask is not None and (int(mask.bool().sum()) != len(ids_C) or not mask.bool()[ids_C].all()):
        raise AlulaError("t2d marks other tokens than d2t leads to: export both from the same vocabulary")
    found["d2t"] = offsets.long()
    return found


def _kind(weights: Mapping[str, torch.Tensor]) -> HeadKind:
    if "fc.weight" not in weights:
        raise AlulaError("the head lacks the tensor 'fc.weight': give the folder of an EAGLE head")
    eagle3 = any(name.startswith("midlayer.") or name.endswith("hidden_norm.weight") for name in weights)
    return "eagle3" if eagle3 else "eagle1"


def _official(name: str) -> str:
    for legacy, modern in _LEGACY_NORMS.items():
        name = name.replace(legacy, modern)
    return name


def _check_act(config: HeadConfig) -> None:
    if config.hidden_act not in ("silu", "gelu_pytorch_tanh"):
        raise AlulaError(f"hidden_act is {config.hidden_act!r}: give 'silu' or 'gelu_pytorch_tanh'")


def _check_fc_bias(raw: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> None:
    """Without the key in config.json the tensors decide: the two generations of official heads have other defaults."""
    if "bias" in raw and bool(raw["bias"]) != ("fc.bias" in weights):
        stated = "lacks" if raw["bias"] else "has"
        raise AlulaError(f"bias is {raw['bias']!r} in config.json, but the head {stated} fc.bias: make them agree")


def _tensor_file(folder: Path) -> Path:
    for name in _TENSOR_FILES:
        if (folder / name).is_file():
            return folder / name
    raise AlulaError(f"{folder} holds neither {' nor '.join(_TENSOR_FILES)}: give the folder of a head")


def _tensor_names(folder: Path) -> list[str]:
    path = _tensor_file(folder)
    if path.suffix == ".bin":
        return list(_read_tensors(folder))
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError):
        return []


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    path = _tensor_file(folder)
    if path.suffix == ".bin":
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # noqa: BLE001 - torch raises a dozen kinds for damaged files
            raise AlulaError(f"cannot read {path} ({type(error).__name__}): download it again") from None
        if not isinstance(loaded, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in loaded.values()):
            raise AlulaError(f"{path} holds no dictionary of tensors: give a head's state dict")
        return cast("dict[str, torch.Tensor]", loaded)
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise AlulaError(f"cannot read {path} ({error}): it is damaged or cut short, download it again") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise AlulaError(f"cannot read {path} ({error}): give a complete head folder") from None
    if not isinstance(values, dict):
        raise AlulaError(f"{path} holds no JSON object: give a complete head folder")
    return values


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().cpu()
    return (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).clone().contiguous()


def _put_in_place(partial: Path, folder: Path) -> None:
    """mkdtemp's folder is private to its owner; the finished one is an ordinary folder."""
    partial.chmod(0o755)
    if folder.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
        os.replace(folder, old)
        os.replace(partial, folder)
        shutil.rmtree(old)
    else:
        os.replace(partial, folder)
