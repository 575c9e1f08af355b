"""Checkpoints, exported heads and stored features."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from alula.config import AlulaError
from alula.draft.dialects import read_head
from alula.train.checkpoint import export_head, load_state, save_state
from tests.train.support import SIZES, FakeTarget, random_head, vocabulary


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint.pt"
    save_state(path, {"step": 1})

    def half(state: object, file: object) -> None:
        file.write(b"half")  # type: ignore[attr-defined]
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match="no space"):
        save_state(path, {"step": 2})
    assert load_state(path) == {"step": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    left = tmp_path / f".checkpoint.{gone.pid}.tmp.pt"
    others = [f".checkpoint.{os.getppid()}.tmp.pt", f".checkpoint.{gone.pid}.tmp.json", ".checkpoint.x.tmp.pt"]
    for name in (left.name, *others):
        (tmp_path / name).write_text("half")
    save_state(tmp_path / "checkpoint.pt", {"step": 1})
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(["checkpoint.pt", *others])


def test_no_checkpoint_is_none_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    assert load_state(path) is None
    path.write_bytes(b"nonsense")
    with pytest.raises(AlulaError, match=r"checkpoint\.pt cannot be read"):
        load_state(path)


def test_an_exported_head_is_read_strictly_by_the_serving_side(tmp_path: Path) -> None:
    head = random_head(FakeTarget())
    head.tap_scale_F.uniform_(0.5, 20.0)
    export_head(tmp_path / "head", head, vocabulary(), {"target": {"name": "fake"}})
    files = read_head(tmp_path / "head")
    assert (files.config.kind, files.config.taps) == ("eagle3", SIZES.taps)
    assert files.config.rope.theta == SIZES.rope_theta
    assert files.provenance == {"target": {"name": "fake"}}
    assert torch.equal(files.weights["d2t"] + torch.arange(SIZES.draft_vocab_size), vocabulary().target_ids_C)
    for name, parameter in head.named_parameters():
        if name != "fc.weight":
            assert torch.equal(files.weights[name], parameter.to(torch.bfloat16)), name
    features = torch.randn(5, head.fc.in_features) * head.tap_scale_F
    fused = features @ files.weights["fc.weight"].float().T
    torch.testing.assert_close(fused, head.fuse(features), atol=0.05, rtol=0.02)
