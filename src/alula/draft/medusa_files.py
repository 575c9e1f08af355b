"""Medusa heads on disk, in the public layout.

config.json names `medusa_num_heads` and `medusa_num_layers`; block l of head i is `i.l.linear.weight` and `.bias`, with
or without the prefix `medusa_head.`; an LM head of its own would be `i.<layers>.weight`. Heads trained here share the
target's and have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from alula.config import AlulaError
from alula.draft.head_files import read_json, read_tensors, write_folder

_PREFIX = "medusa_head."
_COUNTS = ("medusa_num_heads", "medusa_num_layers")
_SIZES = ("hidden_size", "vocab_size")
_TARGETS = ("base_model_name_or_path", "_name_or_path")
_WORDS = ("architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "version")
"""Keys that do not change what heads compute."""


@dataclass(frozen=True)
class MedusaConfig:
    """heads: tokens guessed ahead. layers: residual blocks of each. hidden_size, vocab_size: the target's."""

    heads: int
    layers: int
    hidden_size: int
    vocab_size: int


@dataclass(frozen=True)
class MedusaFiles:
    """Heads as read: checked tensors without prefix, and provenance where there is one."""

    config: MedusaConfig
    weights: dict[str, torch.Tensor]
    provenance: dict[str, Any] | None


def is_medusa_folder(folder: Path) -> bool:
    """Whether its config.json is that of Medusa heads."""
    return (folder / "config.json").is_file() and _COUNTS[0] in read_json(folder / "config.json")


def read_medusa(folder: Path, *, hidden_size: int, vocab_size: int) -> MedusaFiles:
    """Read and check heads for a target of these sizes. Raises AlulaError naming the key or tensor and the mend."""
    raw = read_json(folder / "config.json")
    unknown = sorted(set(raw) - {*_COUNTS, *_SIZES, *_TARGETS, *_WORDS})
    if unknown:
        raise AlulaError(f"the Medusa config.json has the unknown key {unknown[0]!r}: remove it, or update alula")
    sizes = {"hidden_size": hidden_size, "vocab_size": vocab_size}
    for name, ours in sizes.items():
        if raw.get(name, ours) != ours:
            raise AlulaError(
                f"the Medusa heads' {name} is {raw[name]!r}, but the target's is {ours}: give heads for this target"
            )
    config = MedusaConfig(*(_count(raw, name) for name in _COUNTS), **sizes)
    weights = {name.removeprefix(_PREFIX): tensor for name, tensor in read_tensors(folder).items()}
    check_medusa(config, weights)
    path = folder / "provenance.json"
    return MedusaFiles(config, weights, read_json(path) if path.is_file() else None)


def save_medusa(
    folder: Path, config: MedusaConfig, weights: Mapping[str, torch.Tensor], provenance: Mapping[str, Any] | None
) -> None:
    """Write Medusa heads as bf16. The folder appears, or is replaced, only once everything is written.

    weights: by name without prefix. Raises AlulaError for tensors that `read_medusa` would refuse.
    """
    check_medusa(config, weights)
    target = (provenance or {}).get("target", {})
    values = {
        "model_type": "medusa",
        "medusa_num_heads": config.heads,
        "medusa_num_layers": config.layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "base_model_name_or_path": target.get("name"),
        "torch_dtype": "bfloat16",
    }
    stored = {_PREFIX + name: tensor.detach().cpu().to(torch.bfloat16) for name, tensor in weights.items()}
    write_folder(folder, values, stored, provenance)


def check_medusa(config: MedusaConfig, weights: Mapping[str, torch.Tensor]) -> None:
    """Raises AlulaError for a tensor that is missing, unknown, of another shape or quantised."""
    blocks, lm_heads = _shapes(config)
    required = blocks | lm_heads if set(lm_heads) & set(weights) else blocks
    for name in required:
        if name not in weights:
            raise AlulaError(f"the Medusa heads lack the tensor {name!r}: give a complete checkpoint")
    for name, tensor in weights.items():
        if name not in required:
            raise AlulaError(f"the Medusa heads have the unknown tensor {name!r}: give the config of these weights")
        if tuple(tensor.shape) != required[name]:
            raise AlulaError(
                f"the Medusa heads' {name} has shape {tuple(tensor.shape)}, but {required[name]} is wanted: give heads "
                "for this target, with their own config"
            )
        if not tensor.is_floating_point():
            raise AlulaError(f"the Medusa heads' {name} is stored as {tensor.dtype}: give unquantised floats")


def _shapes(config: MedusaConfig) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """(of the blocks, of LM heads of their own)"""
    width, heads = config.hidden_size, range(config.heads)
    blocks: dict[str, tuple[int, ...]] = {}
    for name in (f"{head}.{layer}.linear" for head in heads for layer in range(config.layers)):
        blocks |= {f"{name}.weight": (width, width), f"{name}.bias": (width,)}
    return blocks, {f"{head}.{config.layers}.weight": (config.vocab_size, width) for head in heads}


def _count(raw: Mapping[str, Any], name: str) -> int:
    value = raw.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise AlulaError(f"{name} is {value!r} in the Medusa config.json: give a whole number of at least 1")
    return value
