"""What `alula serve` refuses before it loads a model."""

from __future__ import annotations

import pytest

from alula.cli import main


def test_trees_larger_than_a_request_may_have_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--nodes", "65"]) == 2
    assert "nodes is 65, but a request may have 64 at most" in capsys.readouterr().err
