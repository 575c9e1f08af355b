"""Files of a training run: the resumable checkpoint, and the head in the official layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from alula.config import AlulaError, Rope
from alula.draft import head_config
from alula.draft.dialects import read_head, save_official
from alula.train.files import write_whole
from alula.train.head import Eagle3Head, HeadConfig
from alula.train.vocabulary import DraftVocabulary

CHECKPOINT = "checkpoint.pt"
"""Its name in the folder of a run."""


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write a trainer's state, whatever device it is on; the file is replaced only once the new one is on disk."""

    def write(unfinished: Path) -> None:
        with unfinished.open("wb") as file:
            torch.save(_on_cpu(state), file)

    write_whole(path, write)


def _on_cpu(value: Any) -> Any:
    """``value`` with every tensor on the CPU, in dictionaries and lists too."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, Mapping):
        return {key: _on_cpu(one) for key, one in value.items()}
    return [_on_cpu(one) for one in value] if isinstance(value, list) else value


def load_state(path: Path) -> dict[str, Any] | None:
    """The state saved last, or None where none was. Raises AlulaError for a file that cannot be read."""
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise AlulaError(f"checkpoint {path} cannot be read: remove it to start over") from error
    if not isinstance(state, dict):
        raise AlulaError(f"checkpoint {path} holds no state: remove it to start over, or give another output")
    return state


def export_head(
    folder: Path, head: Eagle3Head, vocabulary: DraftVocabulary, provenance: Mapping[str, Any] | None = None
) -> None:
    """Write the head as every engine reads it: official tensor names, bf16, with d2t, t2d and its RoPE base."""
    weights = on_cpu(head.official_weights()) | {"d2t": vocabulary.d2t(), "t2d": vocabulary.t2d()}
    limit = head.config.max_position_embeddings
    save_official(folder, serving_config(head.config), weights, provenance, max_position_embeddings=limit)


def on_cpu(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What is written to a file."""
    return {name: tensor.detach().cpu() for name, tensor in weights.items()}


def serving_config(config: HeadConfig, kind: head_config.HeadKind = "eagle3") -> head_config.HeadConfig:
    """The same head in the words of the serving side."""
    return head_config.HeadConfig(
        kind=kind,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        vocab_size=config.vocab_size,
        draft_vocab_size=config.draft_vocab_size,
        target_hidden_size=config.hidden_size,
        rope=Rope(config.rope_theta),
        taps=config.taps if kind == "eagle3" else None,
        fc_norm=config.fc_norm,
        norm_output=config.norm_output,
    )


def read_start(
    folder: Path, sizes: HeadConfig, tap_scale_F: torch.Tensor
) -> tuple[dict[str, torch.Tensor], DraftVocabulary]:
    """(state dict, draft vocabulary) of an exported head, to go on training it.

    tap_scale_F: size of each tap on the new data; ``fc`` is kept in units of it (see `Eagle3Head.fuse`).
    Raises AlulaError, naming the field, for a head of other sizes than ``sizes`` (its draft vocabulary is its own).
    """
    files = read_head(folder)
    check_sizes(folder, files.config, serving_config(replace(sizes, draft_vocab_size=files.config.draft_vocab_size)))
    weights = {name: tensor.float() for name, tensor in files.weights.items() if name not in ("d2t", "t2d")}
    weights["fc.weight"] = weights["fc.weight"] * tap_scale_F.cpu()
    offsets_C = files.weights.get("d2t", torch.zeros(files.config.draft_vocab_size, dtype=torch.int64))
    vocabulary = DraftVocabulary(torch.arange(len(offsets_C)) + offsets_C, files.config.vocab_size)
    return weights | {"tap_scale_F": tap_scale_F}, vocabulary


def check_sizes(folder: Path, found: head_config.HeadConfig, wanted: head_config.HeadConfig) -> None:
    """Raises AlulaError, naming the field, where a head to go on from is not of this run's sizes."""
    for name, ours in vars(wanted).items():
        theirs = getattr(found, name)
        if theirs != ours and not (name == "taps" and theirs is None):
            raise AlulaError(
                f"start_from {folder}: its {name} is {theirs}, and this run's is {ours}: give a head of the same"
            )
