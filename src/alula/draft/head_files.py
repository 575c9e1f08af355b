"""The files of a head's folder: config.json, tensors, provenance.json; read with hints, written as a whole."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from alula.config import AlulaError

_TENSOR_FILES = ("model.safetensors", "pytorch_model.bin", "medusa_lm_head.safetensors", "medusa_lm_head.pt")

HEAD_FILES = frozenset({*_TENSOR_FILES, "config.json", "provenance.json"})
"""All that is read of a head's folder."""


def write_folder(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    provenance: Mapping[str, Any] | None,
    *,
    copies: Sequence[Path] = (),
) -> None:
    """Write a drafter's files. The folder appears, or is replaced, only once everything is written.

    copies: files to put beside them, such as a tokenizer's.
    """
    from safetensors.torch import save_file

    # The format refuses tensors that share memory or are views of a part.
    separate = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        save_file(separate, partial / "model.safetensors", metadata={"format": "pt"})
        _write_json(partial / "config.json", config)
        shutil.copymode(partial / "config.json", partial / "model.safetensors")  # safetensors leaves it to its owner
        if provenance is not None:
            _write_json(partial / "provenance.json", provenance)
        for file in copies:
            shutil.copyfile(file, partial / file.name)
        _put_in_place(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _tensor_file(folder: Path) -> Path:
    for name in _TENSOR_FILES:
        if (folder / name).is_file():
            return folder / name
    raise AlulaError(f"{folder} holds neither {' nor '.join(_TENSOR_FILES)}: give the folder of a head")


def tensor_names(folder: Path) -> list[str]:
    path = _tensor_file(folder)
    if path.suffix in (".bin", ".pt"):
        return list(read_tensors(folder))
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError):
        return []


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    path = _tensor_file(folder)
    if path.suffix in (".bin", ".pt"):
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


def read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise AlulaError(f"cannot read {path} ({error}): give a complete head folder") from None
    if not isinstance(values, dict):
        raise AlulaError(f"{path} holds no JSON object: give a complete head folder")
    return values


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _put_in_place(partial: Path, folder: Path) -> None:
    """mkdtemp's folder is private to its owner; the finished one is an ordinary folder."""
    partial.chmod(0o755)
    if not folder.exists():
        os.replace(partial, folder)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
    os.replace(folder, old)
    try:
        os.replace(partial, folder)
    except BaseException:
        os.replace(old, folder)
        raise
    shutil.rmtree(old)
