"""A tiny loaded model and comparisons on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from alula.bench.session import Session
from alula.model.load import load_model
from tests.engine.tiny import save_tiny_llama


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def session(tiny_folder: Path) -> Session:
    return Session(load_model(tiny_folder, dtype="float32"), rule="coupled")


@pytest.fixture(scope="session")
def prompts() -> list[tuple[int, ...]]:
    return [tuple(range(97, 97 + 20 + 7 * i)) for i in range(3)]
