"""The repository's `heads/`: each loads for SmolLM2 by its name, within the size that a checkout can bear."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from alula.draft.load import load_drafter
from alula.model.load import LoadedModel, load_model

MOST_BYTES = 25e6
NAMES = ("eagle1", "medusa", "lm")


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    return load_model("smollm2")


@pytest.mark.parametrize("name", NAMES)
def test_head_loads_by_name(name: str, smollm2: LoadedModel, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALULA_HEADS", str(root / "heads"))
    assert name in load_drafter(name, smollm2).name
    assert sum(path.stat().st_size for path in (root / "heads" / f"smollm2-{name}").iterdir()) < MOST_BYTES


@pytest.mark.parametrize("name", NAMES)
def test_provenance_says_what_it_was_trained_on(name: str, root: Path) -> None:
    known = json.loads((root / "heads" / f"smollm2-{name}" / "provenance.json").read_text())
    assert known["trainable_parameters"] > 5e5
    assert 7e5 < known["training"]["tokens"] < 1e6
    assert len(known["data"]) == 5
