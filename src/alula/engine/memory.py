"""Bytes that the parts of an engine hold."""

from __future__ import annotations

from typing import Any

import torch

from alula.engine.engine import Engine


def memory_bytes(engine: Engine, drafter_weights: int) -> dict[str, int]:
    """drafter_weights: as `drafter_weight_bytes` counts them; the rest is cheap to find.

    target_kv, draft_kv and features: the whole cache's, in use or not. tentative_slots: what the trees of the sequences
    that run now may take beyond their tokens.
    """
    layout, pages, shape = engine.cache.layout, engine.cache.total_pages, engine.config.shape
    features = layout.feature_size * layout.dtype.itemsize
    tentative = max(shape.nodes, 1 + engine.drafter.scratch(shape)) - 1
    return {
        "drafter_weights": drafter_weights,
        "target_kv": pages * layout.target_page_bytes,
        "draft_kv": pages * (layout.extra_page_bytes - features),
        "features": pages * features,
        "tentative_slots": len(engine.scheduler.running) * tentative * layout.page_bytes // layout.page_size,
    }


def drafter_weight_bytes(engine: Engine) -> int:
    """Without what the drafter shares with the target."""
    drafter = getattr(engine.drafter, "main", engine.drafter)
    decoder = engine.model.decoder
    known = {id(decoder), id(engine.model.kernels)}
    found = _storages(getattr(drafter, "model", None), known)
    shared = _storages(decoder, set())
    return sum(size for place, size in found.items() if place not in shared)


def _storages(root: Any, known: set[int]) -> dict[int, int]:
    """Address -> bytes of all tensors that are reached through attributes and collections; `known` ids are left out."""
    found: dict[int, int] = {}
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if id(value) in known:
            continue
        known.add(id(value))
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, (list, tuple)):
            waiting += value
        elif type(value).__module__.startswith("alula."):
            waiting += [getattr(value, name, None) for name in (*getattr(value, "__dict__", ()), *_slots(value))]
    return found


def _slots(value: Any) -> tuple[str, ...]:
    return tuple(getattr(type(value), "__slots__", ()))
