"""A model by name: configuration, decoder, tokenizer and identity."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from alula.config import AlulaError, ModelConfig
from alula.kernels.protocol import Kernels
from alula.kernels.select import load_kernels
from alula.model.decoder import Decoder
from alula.model.gguf_blocks import GgufBlocks
from alula.model.hf_config import read_hf_config
from alula.model.layers import EMBEDDING, LM_HEAD, Blocks
from alula.model.pick import pick_dtype
from alula.model.weights import TensorFolder, check_tensors, hash_files, hash_tensor
from alula.text import Tokenizer

if TYPE_CHECKING:
    from alula.kernels.products import LinearPath
    from alula.model.sources import Checkpoint

DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "int8": torch.bfloat16,
    "file": torch.bfloat16,
    "auto": torch.bfloat16,
}
"""Of activations and the cache. int8 and file are formats of weights, and the rest is bfloat16 then; auto picks."""

_LINEAR: dict[str | torch.dtype, LinearPath] = {"int8": "int8", "file": "file"}
"""Products of the formats of weights."""

MOST_THREADS = 1024
"""Far more than any machine gains from; OpenMP dies without a word at counts that it cannot serve."""


@dataclass(frozen=True)
class Identity:
    """What a head was trained for: SHA-256 of each part of the target.

    weights: of the file or files as the user has them, whatever dtype they are run in. embedding, lm_head: of
    the values rounded to bf16. dtype: the numeric format in use, `float32`, `bfloat16`, `int8` or `file`.
    """

    weights: str
    embedding: str
    lm_head: str
    tokenizer: str
    vocabulary: str
    chat_template: str
    dtype: str

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True)
class LoadedModel:
    """A target ready to run.

    dtype: of activations and the cache. checkpoint: the folder it was read from. picked: why dtype auto took its
    format, None where the format was given.
    """

    name: str
    config: ModelConfig
    decoder: Decoder
    tokenizer: Tokenizer
    kernels: Kernels
    dtype: torch.dtype
    device: torch.device
    eos_ids: tuple[int, ...]
    checkpoint: Checkpoint
    picked: str | None = None

    @property
    def format(self) -> str:
        """The numeric format in use: of the weights, `int8` or `file`, where they are quantised, else the dtype."""
        return self.kernels.weight_format or str(self.dtype).removeprefix("torch.")

    @property
    def feature_identity(self) -> dict[str, str]:
        """What decides the features, besides their dtype and which ones they are."""
        return {"weights": self.weights_hash} | ({"format": self.format} if self.kernels.weight_format else {})

    @cached_property
    def weights_hash(self) -> str:
        """`identity.weights` alone: known already for converted files, a second per gigabyte for folders."""
        return self.checkpoint.source_hash or hash_files(self.tensors().files)

    @cached_property
    def identity(self) -> Identity:
        """Hashes everything on first use."""
        tensors = self.tensors()
        embedding = hash_tensor(tensors.get(EMBEDDING))
        lm_head = embedding if self.config.tied_head else hash_tensor(tensors.get(LM_HEAD))
        return Identity(
            self.weights_hash,
            embedding,
            lm_head,
            dtype=self.format,
            **self.tokenizer.hashes,
        )

    def tensors(self) -> TensorFolder:
        """The weights as stored, by Hugging Face name; for training and for heads that carry copies."""
        return TensorFolder(self.checkpoint.folder)


def resolve_dtype(name: str | torch.dtype) -> torch.dtype:
    """Of activations and the cache. Raises AlulaError for a format that there is not."""
    if isinstance(name, torch.dtype) and name in DTYPES.values():
        return name
    if name not in DTYPES:
        raise AlulaError(f"dtype is {name!r}: give 'bfloat16', 'float32', 'int8', 'file' or 'auto'")
    return DTYPES[str(name)]


def set_threads(count: int | None) -> None:
    """torch's thread count; None leaves it. Raises AlulaError for a count that would crash its thread pool."""
    if count is None:
        return
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_THREADS:
        raise AlulaError(f"threads is {count!r}: give a whole number of at least 1 and at most {MOST_THREADS}")
    torch.set_num_threads(count)


def resolve_device(device: str | torch.device) -> torch.device:
    """The device by torch's name. Raises AlulaError where it cannot hold and return numbers."""
    try:
        where = torch.device(device)
        torch.ones(1, device=where).item()
    except (RuntimeError, AssertionError, TypeError) as error:  # torch asserts where it was built without a device
        reason = str(error).splitlines()[0]
        raise AlulaError(f"device is {str(device)!r}, which torch cannot use here ({reason}): give cpu") from None
    return where


def _kernels(kernels: str | Kernels, device: torch.device, dtype: str | torch.dtype) -> Kernels:
    if isinstance(kernels, str):
        return load_kernels(kernels, device, linear=_LINEAR.get(dtype, "auto"))
    if dtype in _LINEAR and kernels.weight_format != dtype:
        raise AlulaError(
            f"dtype is {dtype!r}, which the kernels given ({kernels.name}) do not do: give kernels by name"
        )
    return kernels


def _blocks(checkpoint: Checkpoint, config: ModelConfig, kernels: Kernels, dtype: str | torch.dtype) -> Blocks | None:
    if dtype == "file" and checkpoint.gguf is None:
        raise AlulaError(f"dtype is 'file', and {checkpoint.folder} is no GGUF file: give dtype int8 or bfloat16")
    if kernels.weight_format != "file" or checkpoint.gguf is None:
        return None
    return GgufBlocks(checkpoint.gguf, checkpoint.folder, config)


def load_model(
    name: str | Path,
    *,
    dtype: str | torch.dtype = "bfloat16",
    kernels: str | Kernels = "auto",
    device: str | torch.device = "cpu",
    max_len: int | None = None,
    progress: bool | None = None,
) -> LoadedModel:
    """Find, convert where needed, check and load a model.

    name: `smollm2`, a Hugging Face folder or hub id, or a GGUF file. dtype: of weights, activations and cache; `int8`
    is for weights, with bfloat16 for the rest, on native kernels; `file` likewise, and the 4 and 8 bit blocks of a GGUF
    file stay as they are; `auto` takes the fastest of these, by a short measurement, and says why.
    max_len: longest sequence in tokens, None for the model's own limit. progress: show bars on stderr; None shows them
    on a terminal.
    Raises AlulaError for anything that cannot be found, read or run.
    """
    from alula.model.sources import resolve

    chosen, where = resolve_dtype(dtype), resolve_device(device)
    # What cannot be had is said before anything is downloaded.
    kernel_set = None if dtype == "auto" else _kernels(kernels, where, dtype)
    checkpoint = resolve(name, chosen, progress=progress)
    config = read_hf_config(checkpoint.folder)
    picked = pick_dtype(config, checkpoint, kernels, where) if dtype == "auto" else None
    dtype = dtype if picked is None else picked.dtype
    kernel_set = kernel_set or _kernels(kernels, where, dtype)
    tensors = TensorFolder(checkpoint.folder)
    check_tensors(tensors, config)
    tokenizer = Tokenizer.from_folder(checkpoint.folder)
    blocks = _blocks(checkpoint, config, kernel_set, dtype)
    decoder = Decoder(config, tensors, kernel_set, dtype=chosen, device=where, max_positions=max_len, blocks=blocks)
    eos_ids = config.eos_ids or (() if tokenizer.eos_id is None else (tokenizer.eos_id,))
    return LoadedModel(
        str(name),
        config,
        decoder,
        tokenizer,
        kernel_set,
        chosen,
        where,
        eos_ids,
        checkpoint,
        None if picked is None else picked.reason,
    )
