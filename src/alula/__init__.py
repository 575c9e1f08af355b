"""alula: EAGLE-style speculative decoding, same text, sooner."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from alula.config import AlulaError
    from alula.draft.static import StaticTree, default_static_tree
    from alula.engine.config import EngineConfig
    from alula.engine.engine import Engine
    from alula.engine.llm import LLM
    from alula.engine.request import CompletionOutput, Request, RequestOutput
    from alula.sequence import FinishReason, SamplingParams, TokenEvent, TokenLogprobs
    from alula.structured import StructuredOutputsParams
    from alula.tree import TreeShape

__all__ = [
    "LLM",
    "AlulaError",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "FinishReason",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "StaticTree",
    "StructuredOutputsParams",
    "TokenEvent",
    "TokenLogprobs",
    "TreeShape",
    "default_static_tree",
]

_HOMES = {
    "alula.config": ("AlulaError",),
    "alula.draft.static": ("StaticTree", "default_static_tree"),
    "alula.engine.config": ("EngineConfig",),
    "alula.engine.engine": ("Engine",),
    "alula.engine.llm": ("LLM",),
    "alula.engine.request": ("CompletionOutput", "Request", "RequestOutput"),
    "alula.sequence": ("FinishReason", "SamplingParams", "TokenEvent", "TokenLogprobs"),
    "alula.structured": ("StructuredOutputsParams",),
    "alula.tree": ("TreeShape",),
}


def __getattr__(name: str) -> object:
    """Public names load what they need when first used, so that `import alula` alone stays cheap."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'alula' has no attribute {name!r}")
