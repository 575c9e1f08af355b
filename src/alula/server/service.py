"""What all endpoints share: the model's parts they may read, the settings, the way to the engine."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from alula.config import AlulaError
from alula.engine.engine import Engine
from alula.sequence import LogitsProcessor, SamplingParams
from alula.server.bridge import Bridge
from alula.server.config import ServerConfig
from alula.server.errors import ApiError
from alula.server.traces import Traces
from alula.text import Tokenizer
from alula.version import alula_version

_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Service:
    """names: what requests may call the model, the first one is what replies say. defaults: of sampling parameters.

    processors: what `logits_processors` may name. created: time at which the model was loaded, Unix seconds.
    """

    bridge: Bridge
    config: ServerConfig
    names: tuple[str, ...]
    defaults: Mapping[str, float]
    processors: Mapping[str, LogitsProcessor]
    fingerprint: str
    created: int
    traces: Traces | None = None

    @property
    def engine(self) -> Engine:
        """Its limits and its model may be read from any thread; whatever changes belongs to the bridge's."""
        return self.bridge.engine

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.model.tokenizer

    @property
    def max_len(self) -> int:
        """Most tokens of prompt and output: the context, or what the whole cache holds."""
        return min(self.engine.max_len, self.engine.cache.total_pages * self.engine.config.page_size)

    def now(self) -> int:
        """Unix seconds."""
        return int(time.time())

    def card(self, name: str) -> dict[str, Any]:
        """An entry of /v1/models."""
        engine = self.engine
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "alula",
            "root": engine.model.name,
            "max_model_len": self.max_len,
            "drafters": sorted({*getattr(engine.drafter, "names", (engine.drafter.name,)), "none"}),
            "rule": engine.config.rule,
        }

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            raise ApiError(
                404, f"model {name!r} is not served: give {self.names[0]!r}", code="model_not_found", param="model"
            )


def import_what_requests_use() -> None:
    """The first requests come on several threads at once. Two that import such packages for the first time meet
    halves of them, and one of the requests fails with an ImportError.
    """
    import_module("xgrammar")
    import_module("transformers.utils.chat_template_utils")


def fingerprint(engine: Engine) -> str:
    """Changes with whatever may change the text of a seed."""
    model, shape = engine.model, engine.config
    parts = [alula_version(), model.name, model.format, model.kernels.describe(), shape.rule, model.config]
    return f"alula-{hashlib.sha256(repr(parts).encode()).hexdigest()[:12]}"


def load_processors(entries: tuple[str, ...]) -> dict[str, LogitsProcessor]:
    """`NAME=PACKAGE.MODULE:FUNCTION` each. Raises AlulaError for what cannot be imported."""
    found = {}
    for entry in entries:
        name, _, place = entry.partition("=")
        module, _, function = place.partition(":")
        if not (name and module and function):
            raise AlulaError(f"logits_processor is {entry!r}: give NAME=PACKAGE.MODULE:FUNCTION")
        try:
            found[name] = getattr(import_module(module), function)
        except Exception as error:  # noqa: BLE001 (what a module of the user's may raise)
            reason = f"{type(error).__name__}: {error}"
            raise AlulaError(f"logits_processor {name!r} cannot be loaded ({reason}): check {place!r}") from None
        if not callable(found[name]):
            raise AlulaError(f"logits_processor {name!r} is no function: check {place!r}")
    return found


def read_defaults(folder: Path) -> dict[str, float]:
    """Sampling parameters of a checkpoint's generation_config.json. Raises AlulaError where there is none."""
    path = folder / "generation_config.json"
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise AlulaError(f"generation_config: {path} does not exist: leave the flag out") from None
    except (ValueError, RecursionError) as error:
        raise AlulaError(f"{path} is not valid JSON ({error}): download it again") from None
    if not isinstance(values, dict):
        raise AlulaError(f"{path} holds no JSON object: download it again")
    found = {name: values[name] for name in _DEFAULTS if values.get(name) is not None}
    try:
        SamplingParams(**found)
    except ValueError as error:
        raise AlulaError(f"generation_config: {path} cannot be used ({error}): leave the flag out") from None
    return {"temperature": 0.0} if values.get("do_sample") is False else found
