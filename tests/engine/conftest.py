from __future__ import annotations

from pathlib import Path

import pytest

from alula.model.load import LoadedModel, load_model
from tests.engine.tiny import save_tiny_llama


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> LoadedModel:
    return load_model(str(tiny_folder), dtype="float32")
