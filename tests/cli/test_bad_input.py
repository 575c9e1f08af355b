"""Every mistake is one sentence on stderr that names the field, exit code 2, and nothing on stdout."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest

from alula.cli import main
from alula.cli.errors import guarded
from tests.cli.conftest import Shell

CASES = (
    (["--temperature", "-1"], "temperature is -1.0"),
    (["--top-p", "0"], "top_p is 0.0"),
    (["--max-tokens", "-4"], "max_tokens is -4"),
    (["--nodes", "0"], "nodes is 0"),
    (["--floor", "1"], "floor is 1.0: give a number of at least 0 and below 1"),
    (["--floor", "nan"], "floor is nan"),
    (["--threads", "0"], "threads is 0"),
    (["--max-model-len", "2"], "context limit is 2"),
    (["--max-model-len", "100000"], "max_model_len is 100000"),
    (["--drafter", "nothing"], "drafter is 'nothing'"),
    (["--device", "moon"], "device is 'moon'"),
    (["--kv-cache-mib", "0"], "kv_cache_mib is 0"),
    (["--max-num-batched-tokens", "4"], "max_num_batched_tokens is 4"),
    (["--stop", ""], "stop is"),
)


def told(capsys: pytest.CaptureFixture[str]) -> str:
    """The one sentence."""
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("alula: error: ") and shown.err.count("\n") == 1
    assert "Traceback" not in shown.err
    return shown.err


@pytest.mark.parametrize(("flags", "sentence"), CASES)
def test_one_sentence(flags: list[str], sentence: str, tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hello", "--json", "--model", str(tiny_folder), *flags]) == 2
    assert sentence in told(capsys)


def test_an_unknown_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hello", "--model", "nothing"]) == 2
    assert "model 'nothing'" in told(capsys)


def test_an_empty_prompt(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for raw in ([], ["--raw"]):
        assert main(["generate", "", "--model", str(tiny_folder), *raw]) == 2
        assert "prompt is empty" in told(capsys)


@pytest.mark.slow
def test_text_that_is_not_utf8(shell: Shell, tiny_folder: Path) -> None:
    for arguments, stdin in (([b"\xff\xfe"], b""), (["-"], b"abc\xff")):
        found = shell("generate", *arguments, "--model", tiny_folder, stdin=stdin)
        assert (found.returncode, found.stdout) == (2, "")
        assert "not valid UTF-8" in found.stderr and "Traceback" not in found.stderr


def test_a_head_for_another_target(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from alula.bench.random_head import random_head
    from alula.draft.dialects import save_official
    from alula.model.load import load_model

    head = random_head(load_model(tiny_folder, dtype="float32").config)
    save_official(tmp_path / "head", head.config, head.weights)
    command = [
        "generate",
        "hello",
        "--model",
        str(tiny_folder),
        "--drafter",
        str(tmp_path / "head"),
        "--max-tokens",
        "2",
    ]
    assert main(command) == 2
    assert "--allow-unverified-head" in told(capsys)
    assert main([*command, "--allow-unverified-head"]) == 0


def test_an_unknown_config_key(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "secret_scaling": 2}))
    assert main(["generate", "hello", "--model", str(folder)]) == 2
    assert "secret_scaling" in told(capsys)


def test_a_truncated_file(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert main(["generate", "hello", "--model", str(folder)]) == 2
    assert "model.safetensors" in told(capsys)


def test_a_full_disk(capsys: pytest.CaptureFixture[str]) -> None:
    def full() -> int:
        raise OSError(errno.ENOSPC, "No space left on device", "file")

    assert guarded(full) == 2
    assert "no space is left on the disk at file" in told(capsys)


def test_a_fault_of_our_own_keeps_its_traceback() -> None:
    def broken() -> int:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError):
        guarded(broken)


def test_interrupted(capsys: pytest.CaptureFixture[str]) -> None:
    def stopped() -> int:
        raise KeyboardInterrupt

    assert guarded(stopped) == 130
    assert capsys.readouterr().out == ""
