"""Reading safetensors checkpoints strictly: whatever is missing, left over, misshapen or damaged is named."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alula.config import AlulaError, ModelConfig
from alula.model.hf_config import read_json
from alula.model.layers import EMBEDDING, LM_HEAD, expected_shapes

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_FLOATS = ("F32", "BF16", "F16")


class TensorFolder:
    """The tensors of a checkpoint folder, sharded or not, read one at a time.

    Raises AlulaError when a file is missing, truncated or no safetensors file, or when the index and the files differ.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = _files(folder)
        self._where = dict(pair for path in self.files for pair in _open(path).items())
        _check_index(folder, self._where)

    def names(self) -> set[str]:
        return set(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def stored_dtype(self, name: str) -> str:
        """As safetensors spells it: F32, BF16, ..."""
        return str(self._slice(name).get_dtype())

    def get(self, name: str) -> torch.Tensor:
        """The tensor of that name in the dtype it is stored in; it may be a view of the file."""
        tensor: torch.Tensor = self._handle(name).get_tensor(name)
        return tensor

    def _slice(self, name: str) -> Any:
        return self._handle(name).get_slice(name)

    def _handle(self, name: str) -> Any:
        if name not in self._where:
            raise AlulaError(f"tensor {name!r} is missing from {self.folder}: download the checkpoint again")
        return self._where[name]


def check_tensors(tensors: TensorFolder, config: ModelConfig) -> None:
    """Every tensor of the model and no other, in its shape, in a float type; AlulaError names the first that is not."""
    shapes, found = expected_shapes(config), tensors.names()
    for name in sorted(set(shapes) - found):
        raise AlulaError(f"tensor {name!r} is missing from {tensors.folder}: {_missing_mend(name)}")
    for name in sorted(found - set(shapes)):
        if not _harmless(name, tensors, config):
            raise AlulaError(
                f"tensor {name!r} in {tensors.folder} does not belong to a {config.family} model with this config.json:"
                " give the config.json that came with these weights"
            )
    for name, shape in shapes.items():
        if tensors.shape(name) != shape:
            raise AlulaError(
                f"tensor {name!r} has shape {list(tensors.shape(name))} but config.json says {list(shape)}: "
                "give the config.json that came with these weights"
            )
        if tensors.stored_dtype(name) not in _FLOATS:
            raise AlulaError(
                f"tensor {name!r} is stored as {tensors.stored_dtype(name)}: give a checkpoint in {', '.join(_FLOATS)}"
            )


def hash_files(files: Iterable[Path]) -> str:
    """SHA-256 over the SHA-256 of each file, in order of name."""
    total = hashlib.sha256()
    for path in sorted(files):
        total.update(hash_file(path).encode())
    return total.hexdigest()


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_tensor(tensor: torch.Tensor) -> str:
    """SHA-256 of the values rounded to bf16, so that the same weights in fp32 and bf16 agree."""
    import torch

    rounded = tensor.to(torch.bfloat16).contiguous()
    return hashlib.sha256(rounded.view(torch.uint8).numpy().data).hexdigest()


def _missing_mend(name: str) -> str:
    if name == LM_HEAD:
        return "download the checkpoint again, or set tie_word_embeddings if the LM head is the embedding"
    return "download the checkpoint again, or give the config.json that came with these weights"


def _harmless(name: str, tensors: TensorFolder, config: ModelConfig) -> bool:
    """Old checkpoints store RoPE frequencies, and some a copy of the tied LM head."""
    if name.endswith("rotary_emb.inv_freq"):
        return True
    return name == LM_HEAD and config.tied_head and bool((tensors.get(name) == tensors.get(EMBEDDING)).all())


def _files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        names = sorted(set(_weight_map(folder).values()))
        return [folder / name for name in names]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    raise AlulaError(f"{folder} has no {SINGLE}: give a checkpoint in safetensors format, or a GGUF file")


def _weight_map(folder: Path) -> dict[str, str]:
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise AlulaError(f"{folder / INDEX} has no weight_map: download it again")
    return weight_map


def _check_index(folder: Path, found: Iterable[str]) -> None:
    if (folder / INDEX).is_file():
        listed = set(_weight_map(folder))
        for name in sorted(listed ^ set(found)):
            kind = "listed in the index but in no file" if name in listed else "in a file but not in the index"
            raise AlulaError(f"tensor {name!r} of {folder} is {kind}: download the checkpoint again")


def _open(path: Path) -> dict[str, Any]:
    """The open file under each of its tensor names."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise AlulaError(f"{path} is missing: download the checkpoint again")
    try:
        handle: Any = safe_open(str(path), framework="pt", device="cpu")
    except SafetensorError as error:
        raise AlulaError(f"{path} is truncated or no safetensors file ({error}): download it again") from None
    return dict.fromkeys(handle.keys(), handle)
