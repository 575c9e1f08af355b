"""A GGUF file, dequantised once into a checkpoint folder of the cache.

The folder is in Hugging Face's layout, so that everything after it reads one format, with a manifest that says what
it was made from and how its files must look.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from alula.model.cache_dir import cache_folder, check_space, replace_into, writing
from alula.model.gguf_config import hf_config
from alula.model.gguf_directory import Directory
from alula.model.gguf_tensors import ROPE_FREQS, GgufFile, hf_name, to_hf_layout
from alula.model.gguf_tokenizer import save_tokenizer
from alula.model.progress import Bar, progress_bar
from alula.model.weights import INDEX

MANIFEST = "alula_manifest.json"
_FORMAT = 2
_SHARD_BYTES = 256 << 20


def converted(gguf: Path, digest: str, dtype: torch.dtype, progress: bool | None = None) -> Path:
    """The checkpoint folder of that file (whose SHA-256 is `digest`) in that dtype, made if absent or damaged.

    Raises AlulaError for a file that cannot be converted, or a disk without room; then nothing is left behind.
    """
    name = f"{digest[:32]}-{str(dtype).removeprefix('torch.')}-{_FORMAT}"
    target = cache_folder("models") / name
    if is_whole(target):
        return target
    shutil.rmtree(target, ignore_errors=True)
    source = GgufFile(gguf)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".partial-", ignore_cleanup_errors=True) as scratch:
        made = Path(scratch) / name
        made.mkdir()
        with writing(target.parent):
            _convert(source, made, dtype, progress)
            _write_manifest(made, digest)
        replace_into(made, target)
    return target


def is_whole(folder: Path) -> bool:
    """Whether every file that the manifest lists is there with its size and checksum."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        return all(_fingerprint(folder / name) == wanted for name, wanted in files.items())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False


def _write_manifest(folder: Path, digest: str) -> None:
    files = {path.name: _fingerprint(path) for path in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(
        json.dumps({"source_sha256": digest, "files": files}, indent=1),
        encoding="utf-8",
    )


def _fingerprint(path: Path) -> list[int]:
    """[size, CRC-32]: against truncation and bad disks, and several times faster than a cryptographic hash."""
    checksum, size = 0, 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            checksum, size = zlib.crc32(block, checksum), size + len(block)
    return [size, checksum]


def _convert(source: GgufFile, folder: Path, dtype: torch.dtype, progress: bool | None) -> None:
    architecture = source.metadata.get("general.architecture", "")
    names = source.names()
    rope_freqs = source.read(ROPE_FREQS, torch.float32) if ROPE_FREQS in names else None
    rows = source.shape("token_embd.weight")[0] if "token_embd.weight" in names else 0
    config = hf_config(source.metadata, names, rows, rope_freqs)
    weights = {hf_name(name, architecture): name for name in names if name != ROPE_FREQS}
    total = sum(_bytes(source.shape(name), dtype) for name in weights.values())
    check_space(folder, total, f"dequantising {source.path.name}")
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    Directory.of(source).write(folder)
    save_tokenizer(source.path, source.metadata, folder)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    with progress_bar(f"Dequantising {source.path.name}", total, progress) as bar:
        tensors = (
            (
                target,
                to_hf_layout(
                    source.read(name, _dtype(source.shape(name), dtype)),
                    name,
                    architecture,
                    heads,
                    kv_heads,
                ),
            )
            for target, name in weights.items()
        )
        _save_shards(folder, tensors, bar)


def _dtype(shape: tuple[int, ...], dtype: torch.dtype) -> torch.dtype:
    """Norms and biases stay in fp32: they are small, and the decoder rounds them itself."""
    return dtype if len(shape) > 1 else torch.float32


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * _dtype(shape, dtype).itemsize


def _save_shards(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], bar: Bar) -> None:
    """Writes an indexed checkpoint, holding no more than one shard in memory."""
    weight_map: dict[str, str] = {}
    done = 0
    for number, shard in enumerate(_shards(tensors)):
        file = f"model-{number:05d}.safetensors"
        _save(shard, folder / file)
        weight_map |= dict.fromkeys(shard, file)
        done += sum(tensor.nbytes for tensor in shard.values())
        bar.set(done)
    index: dict[str, Any] = {"metadata": {"total_size": done}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")


def _shards(
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors:
        shard[name] = tensor.contiguous()
        size += tensor.nbytes
        if size >= _SHARD_BYTES:
            yield shard
            shard, size = {}, 0
    if shard:
        yield shard


def _save(shard: dict[str, torch.Tensor], path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(shard, path)
    except SafetensorError as error:  # it wraps I/O errors, a full disk among them
        raise OSError(28, str(error)) from error
