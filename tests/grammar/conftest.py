from __future__ import annotations

import pytest

from alula.grammar import Grammars
from alula.model.load import LoadedModel, load_model
from tests.engine.tiny import save_tiny_llama
from tests.grammar import support


@pytest.fixture(scope="session")
def made() -> Grammars:
    return support.grammars()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(str(save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"), layers=3)), dtype="float32")
