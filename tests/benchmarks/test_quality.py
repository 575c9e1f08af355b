"""benchmarks/quality.py: its sums, and a run on a tiny file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from quality import Totals, main

from tests.model.gguf_files import write_model
from tests.model.test_gguf import model


def test_totals_of_known_distributions() -> None:
    reference = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]]).log()
    found = torch.tensor([[0.25, 0.5, 0.25], [0.25, 0.5, 0.25]]).log()
    totals = Totals()
    totals.add(found, reference, torch.tensor([1, 0]))
    kl, loss = 0.25 * torch.tensor(2.0).log().item(), (torch.tensor(2.0).log() + torch.tensor(4.0).log()).item()
    expected = {"tokens": 2, "kl": kl / 2, "same_token": 0.5, "loss": loss / 2, "accuracy": 0.5}
    assert totals.report() == pytest.approx(expected, abs=1e-5)


def test_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ALULA_CACHE", str(tmp_path / "cache"))
    path = write_model(tmp_path / "m.gguf", model(), "llama", kind="Q4_1")
    (tmp_path / "own.jsonl").write_text(json.dumps({"prompt_ids": [5, 6, 7], "answer_ids": list(range(8, 48))}) + "\n")
    (tmp_path / "asked.jsonl").write_text(json.dumps({"prompt": "hello there"}) + "\n")
    files = ["--data", str(tmp_path / "own.jsonl"), "--prompts", str(tmp_path / "asked.jsonl")]
    assert main(["--model", str(path), "--dtypes", "bf16", "file", "--tokens", "30", *files]) == 0
    lines = capsys.readouterr().out.splitlines()
    fp32, bf16, blocks = json.loads(lines[-1])["results"]
    assert (fp32["own"]["tokens"], fp32["own"]["kl"], fp32["own"]["same_token"]) == (30, 0.0, 1.0)
    assert 0 < bf16["own"]["kl"] < blocks["own"]["kl"] < 0.05
    assert fp32["prompts"]["tokens"] == blocks["prompts"]["tokens"] > 3
    assert [line.split(" | ")[0] for line in lines[2:5]] == ["| fp32", "| bf16", "| file"]
