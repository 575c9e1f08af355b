"""A server in a thread of this process, on a free port."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import torch
import uvicorn

from alula.draft.choice import DrafterChoice
from alula.draft.drafter import Drafter
from alula.draft.load import load_drafter
from alula.draft.ngram import NgramDrafter
from alula.engine.config import EngineConfig
from alula.engine.engine import Engine
from alula.model.load import LoadedModel
from alula.server.app import build_app
from alula.server.bridge import Bridge
from alula.server.config import ServerConfig
from alula.server.run import DrainingServer, bind
from alula.server.traces import Traces
from alula.tree import TreeShape

ASSISTANT = 258
"""The tiny model's token before an answer."""


def scripted(text: str, end: int | None = None) -> Any:
    """A logits processor that makes the answer after the last ASSISTANT token be `text`, then `end`."""
    ids = [*_letters(text), *([] if end is None else [end])]

    def process(path: list[int], logits: torch.Tensor) -> torch.Tensor:
        place = len(path) - 1 - path[::-1].index(ASSISTANT)
        wanted = ids[min(len(path) - place - 1, len(ids) - 1)]
        forced = torch.full_like(logits, -1e9)
        forced[wanted] = 0.0
        return forced

    return process


def _letters(text: str) -> list[int]:
    """Ids of the byte tokenizer, whose vocabulary is sorted by letter."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]
    return [letters.index(letter) for letter in spelled]


@dataclass
class Running:
    url: str
    engine: Engine
    bridge: Bridge
    server: DrainingServer
    thread: threading.Thread

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", **({"api_key": "none", "max_retries": 0} | options))

    def idle(self, seconds: float = 20.0) -> None:
        """Wait until nothing runs; then nothing may be held either."""
        end = time.monotonic() + seconds
        while self.engine.has_work or self.bridge.samples:
            assert time.monotonic() < end, "requests go on"
            time.sleep(0.01)
        self.engine.cache.check_integrity()
        assert self.engine.cache.free_pages == self.engine.cache.total_pages


def build_engine(
    model: LoadedModel, folder: Path | None = None, drafter: Drafter | None = None, **settings: Any
) -> Engine:
    """The target is its own drafter where a folder is given, so that several tokens come at a time."""
    main = drafter or load_drafter(str(folder) if folder else "ngram", model)
    defaults = {"kv_cache_mib": 8, "page_size": 8, "shape": TreeShape(6, 5, 1), "check_integrity": True}
    return Engine(model, DrafterChoice(main, {"ngram": NgramDrafter()}), EngineConfig(**(defaults | settings)))


@contextmanager
def serving(
    engine: Engine, processors: dict[str, Any] | None = None, traces: Traces | None = None, **settings: Any
) -> Iterator[Running]:
    config = ServerConfig(**({"port": 0, "served_model_name": ("tiny",), "drain_s": 0.5} | settings))
    app = build_app(engine, config, processors=processors, traces=traces)
    taken = bind(config)
    settings_ = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=5)
    bridge: Bridge = app.state.service.bridge
    server = DrainingServer(settings_, bridge, config.drain_s)
    thread = threading.Thread(target=server.run, args=([taken],), daemon=True)
    host, port = taken.getsockname()[:2]
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield Running(f"http://{host}:{port}", engine, bridge, server, thread)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
