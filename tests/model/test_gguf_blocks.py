"""`--dtype file`: a GGUF file's own blocks, as they are multiplied, against its dequantised weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from alula.config import AlulaError
from alula.draft.load import load_drafter
from alula.draft.neural import NeuralDrafter
from alula.kernels.native import NativeKernels
from alula.model.gguf_blocks import GgufBlocks, blocks_of
from alula.model.gguf_directory import Directory
from alula.model.gguf_tensors import GgufFile
from alula.model.load import load_model
from tests.model.gguf_files import write_model
from tests.model.test_gguf import model

LAYER = "model.layers.1"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALULA_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_blocks_hold_the_values_of_the_file(kind: str) -> None:
    qtype = gguf.GGMLQuantizationType[kind]
    values = np.random.default_rng(1).normal(size=(7, 96)).astype(np.float32)
    stored = gguf.quantize(values, qtype)
    found = blocks_of(torch.from_numpy(stored), kind)
    assert found.format == ("q8" if kind == "Q8_0" else "q4")
    torch.testing.assert_close(found.values().numpy(), gguf.dequantize(stored, qtype), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q5_0"])
def test_model_in_its_own_blocks(kind: str, tmp_path: Path, dense: Callable[..., Any]) -> None:
    """Heads turned back to Hugging Face's order, the LM head among them; other types are rounded to int8."""
    path = write_model(tmp_path / "m.gguf", model(), "llama", kind=kind)
    plain = load_model(path, dtype="float32", kernels="torch")
    found = load_model(path, dtype="file")
    assert isinstance(found.kernels, NativeKernels)
    format = {"Q8_0": "q8", "Q5_0": "int8"}.get(kind, "q4")
    assert found.kernels.describe()["linear"] == f"file (9 {format})"
    assert (found.format, found.identity.dtype, found.dtype) == ("file", "file", torch.bfloat16)
    ids = list(range(2, 40))
    expected = plain.decoder.logits(dense(plain.decoder, ids).final_TD)
    logits = found.decoder.logits(dense(found.decoder, ids).final_TD)
    assert (logits - expected).norm() < 0.06 * expected.norm()


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_rows_of_heads_are_those_of_the_converted_file(kind: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", model(), "llama", kind=kind)
    loaded = load_model(path, dtype="float32", kernels="torch")
    names = [f"{LAYER}.self_attn.{name}_proj.weight" for name in "qkv"]
    found = GgufBlocks(path, loaded.checkpoint.folder, loaded.config).get(names)
    assert found is not None
    converted = torch.cat([loaded.tensors().get(name) for name in names])
    torch.testing.assert_close(found.values(), converted, rtol=1e-6, atol=1e-6)


def test_matrices_of_several_types_are_rounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_model(tmp_path / "m.gguf", model(), "llama", kind="Q8_0")
    read = Directory.read

    def mixed(folder: Path) -> Directory:
        found = read(folder)
        places = {name: replace(p, kind="Q6_K") if "attn_v" in name else p for name, p in found.places.items()}
        return replace(found, places=places)

    monkeypatch.setattr(Directory, "read", mixed)
    assert load_model(path, dtype="file").kernels.describe()["linear"] == "file (2 int8, 7 q8)"


def test_a_converted_file_is_not_parsed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_model(tmp_path / "m.gguf", model(), "llama", kind="Q4_0")
    first = load_model(path, dtype="file")

    def refuse(self: GgufFile, path: Path) -> None:
        raise AssertionError(f"{path} was parsed")

    monkeypatch.setattr(GgufFile, "__init__", refuse)
    again = load_model(path, dtype="file")
    assert again.kernels.describe() == first.kernels.describe()
    x = torch.randn(3, first.config.hidden_size, dtype=torch.bfloat16)
    assert torch.equal(again.decoder.logits(x), first.decoder.logits(x))


def test_scales_must_be_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_model(tmp_path / "m.gguf", model(), "llama", kind="Q4_1")
    loaded = load_model(path, dtype="float32", kernels="torch")
    stored = Directory.stored

    def damaged(self: Directory, path: Path, name: str) -> torch.Tensor:
        rows = stored(self, path, name)
        rows[1, 2:4] = torch.from_numpy(np.array([np.inf], np.float16).view(np.uint8))
        return rows

    monkeypatch.setattr(Directory, "stored", damaged)
    with pytest.raises(AlulaError, match=r"'blk.1.attn_output.weight' holds scales that are not finite"):
        GgufBlocks(path, loaded.checkpoint.folder, loaded.config).get([f"{LAYER}.self_attn.o_proj.weight"])


def test_a_draft_model_from_a_folder_is_rounded(tmp_path: Path) -> None:
    """It runs on the target's kernels, and has no blocks of its own."""
    target = load_model(write_model(tmp_path / "m.gguf", model(), "llama", kind="Q4_1"), dtype="file")
    small = load_model(write_model(tmp_path / "s.gguf", model(), "llama", kind="F32"), dtype="float32", kernels="torch")
    assert isinstance(load_drafter(str(small.checkpoint.folder), target), NeuralDrafter)
    assert target.kernels.describe()["linear"] == "file (9 int8, 9 q4)"


def test_only_files_have_blocks(tmp_path: Path) -> None:
    made = model()
    made.save_pretrained(tmp_path / "folder")
    write_model(tmp_path / "m.gguf", made, "llama")
    converted = load_model(tmp_path / "m.gguf", dtype="float32", kernels="torch").checkpoint.folder
    for file in converted.glob("tokenizer*"):
        (tmp_path / "folder" / file.name).write_bytes(file.read_bytes())
    with pytest.raises(AlulaError, match="is no GGUF file: give dtype int8 or bfloat16"):
        load_model(tmp_path / "folder", dtype="file")
    with pytest.raises(AlulaError, match="file is there in the native kernels on the CPU only"):
        load_model(tmp_path / "m.gguf", dtype="file", kernels="torch")
    with pytest.raises(AlulaError, match="give kernels by name"):
        load_model(tmp_path / "m.gguf", dtype="file", kernels=NativeKernels())
