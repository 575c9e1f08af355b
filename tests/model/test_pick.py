"""`--dtype auto`: what it may take, that it takes what is clearly faster, and that it says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from alula.cli.main import main
from alula.config import AlulaError, ModelConfig
from alula.kernels.blocks import BlockFormat
from alula.kernels.native import NativeKernels
from alula.model import pick
from alula.model.load import load_model
from tests.model.gguf_files import write_model
from tests.model.test_gguf import model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALULA_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what each format takes instead of measuring it."""

    def put(**seconds: float) -> None:
        def of(config: ModelConfig, dtype: str, blocks: BlockFormat | None) -> float:
            return seconds[dtype]

        monkeypatch.setattr(pick, "_seconds", of)

    return put


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({"bfloat16": 1.0, "int8": 0.95, "file": 0.92}, "bfloat16"),
        ({"bfloat16": 1.0, "int8": 0.5, "file": 0.48}, "int8"),
        ({"bfloat16": 1.0, "int8": 0.5, "file": 0.3}, "file"),
        ({"bfloat16": 1.0, "int8": 1.2, "file": 0.8}, "file"),
    ],
)
def test_a_coarser_format_must_be_clearly_faster(
    seconds: dict[str, float], expected: str, times: Callable[..., None], tmp_path: Path
) -> None:
    times(**seconds)
    found = load_model(write_model(tmp_path / "m.gguf", model(), "llama", kind="Q4_0"), dtype="auto")
    assert found.format == expected
    assert found.picked is not None
    assert found.picked.startswith(expected)
    assert all(f"{name} {1e3 * taken:.1f} ms" in found.picked for name, taken in seconds.items())


def test_only_files_in_blocks_of_ours_are_taken_as_they_are(times: Callable[..., None], tmp_path: Path) -> None:
    times(bfloat16=1.0, int8=0.5)  # `file` is not asked for
    made = load_model(write_model(tmp_path / "m.gguf", model(), "llama", kind="Q5_0"), dtype="auto")
    assert made.format == "int8"
    assert load_model(made.checkpoint.folder, dtype="auto").format == "int8"


def test_other_kernels_keep_bfloat16(times: Callable[..., None], tmp_path: Path) -> None:
    times()
    path = write_model(tmp_path / "m.gguf", model(), "llama", kind="Q4_0")
    found = load_model(path, dtype="auto", kernels="torch")
    assert (found.format, found.dtype) == ("bfloat16", torch.bfloat16)
    assert found.picked == "bfloat16, the only format measured for torch kernels on cpu"
    with pytest.raises(AlulaError, match="kernels are given ready-made"):
        load_model(path, dtype="auto", kernels=NativeKernels())


def test_it_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pick, "_MEASURED_WEIGHTS", 2**16)
    found = load_model(write_model(tmp_path / "m.gguf", model(), "llama", kind="Q8_0"), dtype="auto")
    assert found.picked is not None
    assert found.picked.count(" ms") == 3


def test_commands_say_what_was_taken(
    times: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times(bfloat16=1.0, int8=0.5, file=0.2)
    path = write_model(tmp_path / "m.gguf", model(), "llama", kind="Q4_0")
    options = ["--model", str(path), "--drafter", "none", "--dtype", "auto", "--max-tokens", "2", "--raw"]
    assert main(["generate", "hello", *options]) == 0
    assert "dtype auto takes file: products of 1 and 4 rows" in capsys.readouterr().err
    assert main(["bench", *options, "--limit", "1", "--repeats", "1", "--json"]) == 0
    assert '"dtype_picked": "file: products' in capsys.readouterr().out
