"""One loaded model, and as many engines on it as a comparison needs."""

from __future__ import annotations

import torch

from alula.bench.random_head import random_head
from alula.draft.build import build_head
from alula.draft.drafter import Drafter
from alula.draft.load import load_drafter, target_parts
from alula.draft.policy import TreePolicy
from alula.engine.acceptance_check import warn_if_never_accepted
from alula.engine.config import EngineConfig
from alula.engine.engine import Engine
from alula.model.load import LoadedModel

RANDOM = "random"
"""Name of the drafter with random weights."""


class Session:
    """Weights are loaded once, drafters once per name; each engine has a cache of its own."""

    def __init__(self, model: LoadedModel, rule: str, allow_unverified: bool = False) -> None:
        self.model = model
        self._rule = rule
        self._allow_unverified = allow_unverified
        self._drafters: dict[str, Drafter] = {}

    def drafter(self, name: str) -> Drafter:
        """`auto`, `none`, `ngram`, a path, or `random`. Raises AlulaError for what cannot be loaded."""
        if name not in self._drafters:
            self._drafters[name] = self._load(name)
        return self._drafters[name]

    def engine(self, drafter: str, config: EngineConfig) -> Engine:
        return Engine(self.model, self.drafter(drafter), config)

    def setup(self) -> dict[str, object]:
        """What the numbers hold for."""
        return {
            "model": self.model.name,
            "dtype": self.model.format,
            **({} if self.model.picked is None else {"dtype_picked": self.model.picked}),
            "device": str(self.model.device),
            "threads": torch.get_num_threads(),
            "kernels": self.model.kernels.describe(),
            "row_invariant": self.model.kernels.row_invariant,
        }

    def _load(self, name: str) -> Drafter:
        if name == RANDOM:
            return random_drafter(self.model, self._rule)
        drafter = load_drafter(name, self.model, rule=self._rule, allow_unverified=self._allow_unverified)
        warn_if_never_accepted(name, self.model, drafter, EngineConfig(rule=self._rule))
        return drafter


def random_drafter(model: LoadedModel, rule: str) -> Drafter:
    return build_head(random_head(model.config), target_parts(model), TreePolicy(rule))
