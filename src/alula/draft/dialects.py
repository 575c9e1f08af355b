"""Heads on disk: all three public layouts are read, and alula's own heads written.

Loading is strict: every tensor is accounted for, and what is missing is an error, since a silent default (d2t above
all) makes a head that loads well and is never accepted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from alula.config import AlulaError
from alula.draft.head_config import HeadConfig, HeadKind, Layout, layout_of, read_head_config
from alula.draft.head_files import read_json, read_tensors, tensor_names, write_folder
from alula.draft.head_record import RECORD, check_record, head_record
from alula.draft.head_tensors import check_tensors, with_vocabulary
from alula.draft.layouts import head_json

_LEGACY_NORMS = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
_ONLY_IN_EAGLE3 = frozenset({"norm.weight", "lm_head.weight", "d2t"})
"""Beside its hidden_norm. Two of these tell the kind even where one is missing or misnamed."""
_TARGET_ONLY = frozenset({"verifier_norm.weight", "verifier_lm_head.weight"})
"""Copies of the target's tensors that some trainers leave in; not the head's."""


@dataclass(frozen=True)
class HeadFiles:
    """A head as read: checked configuration, official tensor names, provenance where there is one.

    weights: as stored. `d2t` is int64 and only there when the draft vocabulary is not the target's.
    layout: in which it was found. max_position_embeddings: as stated; it changes nothing here.
    verifier: `name_or_path` and `architectures` of the target, where the config names them.
    left_out: tensors of the file that are the target's.
    doubtful_norm_output: `norm_output` is true in a layout where that has had two meanings, and nothing says which;
    `config` has that of the engines.
    """

    config: HeadConfig
    weights: dict[str, torch.Tensor]
    provenance: dict[str, Any] | None
    layout: Layout = "official"
    max_position_embeddings: int = 2048
    verifier: Mapping[str, Any] | None = None
    left_out: tuple[str, ...] = ()
    doubtful_norm_output: bool = False


def is_head_folder(folder: Path) -> bool:
    """Whether this is meant to be an EAGLE head rather than a whole model: its tensors, or, where those cannot be read,
    a config without a tokenizer."""
    if not (folder / "config.json").is_file():
        return False
    if not any(folder.glob("tokenizer*")):
        return True
    try:
        return "fc.weight" in tensor_names(folder)
    except AlulaError:
        return False


def read_head(folder: Path) -> HeadFiles:
    """Read and check a head. Raises AlulaError naming the file, key or tensor and the mend."""
    raw = read_json(folder / "config.json")
    layout, provenance = layout_of(raw), read_provenance(folder)
    stored = read_tensors(folder)
    weights = {_official(name): tensor for name, tensor in stored.items() if name not in _TARGET_ONLY}
    kind = _kind(weights)
    if kind == "eagle3":
        weights = {re.sub(r"^layers\.0\.", "midlayer.", name): tensor for name, tensor in weights.items()}
    record = (provenance or {}).pop(RECORD, None)
    ours = "alula" in ((provenance or {}).get("versions") or ())
    config = read_head_config(raw, kind, nested_inputs=ours and record is None)
    _check_act(config)
    _check_fc_bias(raw, weights)
    check_tensors(config, weights)
    check_record(record, config, weights)
    return HeadFiles(
        config=config,
        weights=with_vocabulary(config, weights),
        provenance=provenance,
        layout=layout,
        max_position_embeddings=_longest(raw),
        verifier=_verifier(raw) or (record or {}).get("verifier"),
        left_out=tuple(sorted(_TARGET_ONLY & set(stored))),
        doubtful_norm_output=layout == "specforge" and config.norm_output and record is None,
    )


def read_provenance(folder: Path) -> dict[str, Any] | None:
    """The content of provenance.json, None where there is none. Raises AlulaError for one that cannot be read."""
    path = folder / "provenance.json"
    return read_json(path) if path.is_file() else None


def save_official(
    folder: Path,
    config: HeadConfig,
    weights: Mapping[str, torch.Tensor],
    provenance: Mapping[str, Any] | None = None,
    *,
    max_position_embeddings: int = 2048,
) -> None:
    """Write a head under the official names: config.json, model.safetensors (floats as bf16) and provenance.json.

    The config says everything that `HeadConfig` does, an EAGLE-3 head's in SpecForge's words.
    The folder appears, or is replaced, only once everything is written. Raises AlulaError for tensors that
    `read_head` would refuse.
    """
    stored = {name: _rounded(tensor) for name, tensor in weights.items()}
    check_tensors(config, stored)
    with_vocabulary(config, stored)
    values = head_json(
        config,
        "specforge" if config.kind == "eagle3" else "official",
        fc_bias="fc.bias" in stored,
        dtype=torch.bfloat16,
        max_position_embeddings=max_position_embeddings,
    )
    if provenance is not None:
        provenance = {**provenance, RECORD: head_record(config, stored)}
    write_folder(folder, values, stored, provenance)


def _kind(weights: Mapping[str, torch.Tensor]) -> HeadKind:
    if "fc.weight" not in weights:
        raise AlulaError("the head lacks the tensor 'fc.weight': give the folder of an EAGLE head")
    signs = sum(name.endswith("hidden_norm.weight") or name in _ONLY_IN_EAGLE3 for name in weights)
    eagle3 = signs > 1 or any(name.startswith("midlayer.") for name in weights)
    return "eagle3" if eagle3 else "eagle1"


def _official(name: str) -> str:
    for legacy, modern in _LEGACY_NORMS.items():
        name = name.replace(legacy, modern)
    return name


def _longest(raw: Mapping[str, Any]) -> int:
    stated = raw.get("max_position_embeddings") or (raw.get("transformer_layer_config") or {}).get(
        "max_position_embeddings"
    )
    return stated if type(stated) is int and stated > 0 else 2048


def _verifier(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    speculators = raw.get("speculators_config")
    verifier = speculators.get("verifier") if isinstance(speculators, dict) else None
    return verifier if isinstance(verifier, dict) else None


def _check_act(config: HeadConfig) -> None:
    if config.hidden_act not in ("silu", "gelu_pytorch_tanh"):
        raise AlulaError(f"hidden_act is {config.hidden_act!r}: give 'silu' or 'gelu_pytorch_tanh'")


def _check_fc_bias(raw: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> None:
    """Without the key in config.json the tensors decide: the two generations of official heads have other defaults."""
    if "bias" in raw and bool(raw["bias"]) != ("fc.bias" in weights):
        stated = "lacks" if raw["bias"] else "has"
        raise AlulaError(f"bias is {raw['bias']!r} in config.json, but the head {stated} fc.bias: make them agree")


def _rounded(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().cpu()
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
