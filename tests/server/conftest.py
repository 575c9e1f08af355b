from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from alula.model.load import LoadedModel, load_model
from tests.engine.tiny import EOS, save_tiny_llama
from tests.server.running import Running, build_engine, scripted, serving

CALL = '<tool_call>{"name": "look", "arguments": {"at": "a \\"bird\\"", "times": [1, 2]}}</tool_call>'


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> LoadedModel:
    return load_model(str(tiny_folder), dtype="float32")


@pytest.fixture(scope="session")
def shared_server(tiny: LoadedModel, tiny_folder: Path) -> Iterator[Running]:
    processors = {
        "call": scripted(f"Let me see. {CALL}", EOS),
        "two calls": scripted(f'<tool_call>[{CALL[11:-12]}, {{"name": "rest", "arguments": {{}}}}]</tool_call>', EOS),
        "wings": scripted("Flügel, 翼 🪽 wings", EOS),
        "listing": scripted("one, two, three, four", EOS),
    }
    with serving(build_engine(tiny, tiny_folder), processors) as running:
        yield running


@pytest.fixture
def server(shared_server: Running) -> Iterator[Running]:
    """The server of all tests, which every test leaves idle and with all its pages free."""
    yield shared_server
    shared_server.idle()


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.client() as found:
        yield found
