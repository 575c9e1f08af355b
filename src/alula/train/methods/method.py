"""The seam between the trainer and what it trains.

The trainer owns data order, schedule, clipping, accumulation and the state that a run resumes from. A method owns
what differs: the trainable module, its losses on a batch, its start values, and how it becomes a folder that serves.

Shapes: R rows that have a target at one step, K proposals of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from alula.model.load import LoadedModel
from alula.train.batch import Batch
from alula.train.data import Conversation
from alula.train.features import FeatureStore
from alula.train.simulate import Branches

SAMPLES = 200
"""Conversations that start values are fitted on."""


@dataclass(frozen=True)
class Loss:
    """One term of the objective, the mean over its rows; the gradient is that of the sum of weight x value."""

    name: str
    """Its name in the log."""
    value: Tensor
    weight: float


@dataclass(frozen=True)
class Guesses:
    """What a drafter proposes at one step of a chain, where the text has a token to compare with."""

    flat_R: Tensor
    """int64: position of each row in the flattened ``starts_BA``."""
    index_R: Tensor
    """int64: the learned token that each row is to guess."""
    tokens_RK: Tensor
    """int64: target ids, the likeliest first."""
    log_q_RK: Tensor
    """fp32: their log probabilities under the drafter."""


class Method(Protocol):
    """A drafter in training."""

    @property
    def name(self) -> str:
        """What the command line calls it."""

    @property
    def module(self) -> nn.Module:
        """All that is trained, and what is saved with it."""

    @property
    def steps(self) -> int:
        """How many tokens ahead it is trained to guess."""

    def matrices(self) -> list[nn.Parameter]:
        """The parameters that Muon moves; AdamW moves the other trainable ones."""

    def losses(self, batch: Batch, generator: torch.Generator) -> list[Loss]:
        """The terms of the objective on one batch, not yet differentiated.

        generator: a CPU generator for everything drawn at random, so that a resumed run draws the same.
        """

    def guesses(self, batch: Batch, *, steps: int, width: int) -> Iterator[Guesses]:
        """What it proposes on held-out texts, step by step; ``width`` proposals a row."""

    def branches(self, batch: Batch) -> Branches:
        """Draft trees in training, from the pairs at which the chains of a batch of one text start."""

    def saved(self) -> dict[str, Any]:
        """What a checkpoint keeps beside ``module.state_dict()`` so that `Maker.resumed` can build it again."""

    def facts(self, held: Sequence[Conversation]) -> dict[str, Any]:
        """For provenance and log: what was chosen from the data, judged on held-out conversations."""

    def export(self, folder: Path, provenance: Mapping[str, Any] | None) -> None:
        """Write a folder that `alula.draft.load.load_drafter` takes. It appears whole or not at all."""


@dataclass(frozen=True)
class Setting:
    """What a method is made for."""

    model: LoadedModel
    store: FeatureStore
    """The target as training sees it, and its features at `Maker.taps`."""
    train: Sequence[Conversation]
    """Training conversations; start values are fitted on the first few."""
    seed: int


class Maker(Protocol):
    """Makes one method, as its options say."""

    def taps(self, layers: int) -> tuple[int, ...]:
        """The target features it needs of a target of so many layers: inputs of layers, -1 for the LM head's input."""

    def fresh(self, setting: Setting) -> Method:
        """With start values. Raises AlulaError for options that do not fit the target."""

    def resumed(self, setting: Setting, state: Mapping[str, Any]) -> Method:
        """Built for a saved state, which the trainer then restores; start values are not made."""

    def continued(self, setting: Setting, folder: Path) -> Method:
        """From a folder that ``export`` wrote. Raises AlulaError, naming the field, where sizes differ."""
