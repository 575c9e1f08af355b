"""What long commands say of their progress where standard error is no terminal."""

from __future__ import annotations

import pytest

from alula.cli.ablate import _Bar as AblationBar
from alula.cli.progress import Progress
from alula.cli.synth import Bar as SynthBar
from alula.model.progress import Pace


def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pace, "is_due", lambda self: True)


def test_nothing_is_said_within_the_first_minute(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("runs", 3) as progress, AblationBar() as ablation, SynthBar() as synth:
        progress.tick()
        ablation.step(5)
        synth.tokens(5)
    assert capsys.readouterr().err == ""


def test_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    always(monkeypatch)
    with Progress("runs", 3) as progress:
        progress.tick()
        progress.announce("cells", more=2)
        progress.tick()
    assert capsys.readouterr().err == "runs: 1 of 3\ncells: 2 of 5\n"


def test_ablation(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    always(monkeypatch)
    with AblationBar() as bar:
        bar.begin("regression only, seed 0", 100_000)
        bar.step(25_000)
    assert capsys.readouterr().err == "regression only, seed 0: 25,000 of 100,000 tokens\n"


def test_data(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    always(monkeypatch)
    with SynthBar() as bar:
        bar.begin(answer_tokens=100, wanted=1000, inputs=None)
        bar.phase("answers")
        bar.tokens(50)
    assert "answers: 150 of 1,000 answer tokens" in capsys.readouterr().err
