"""Medusa: residual blocks on the LM head's input, cross-entropy per head with decaying weights (arXiv 2401.10774,
section 2.2), here against the target's whole distribution."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alula.config import AlulaError
from alula.draft.medusa_files import MedusaConfig, read_medusa, save_medusa
from alula.kernels.stack import FINAL
from alula.train.batch import Batch
from alula.train.checkpoint import on_cpu
from alula.train.data import Conversation
from alula.train.features import FeatureTarget
from alula.train.loss import mean_cross_entropy, teacher
from alula.train.methods.guesses import best_tokens
from alula.train.methods.method import Guesses, Loss, Method, Setting
from alula.train.methods.options import MedusaOptions
from alula.train.simulate import Branches


class ResidualBlock(nn.Module):
    """x + silu(Wx + b). W and b start at zero, so a new head says what the target itself said."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return x + F.silu(self.linear(x))


class MedusaModule(nn.ModuleList):
    """K heads of L blocks; the parameters have the public names."""

    def __init__(self, heads: int, layers: int, width: int) -> None:
        super().__init__([nn.Sequential(*(ResidualBlock(width) for _ in range(layers))) for _ in range(heads)])


@dataclass(frozen=True)
class MedusaMaker:
    """Implements `Maker`."""

    options: MedusaOptions

    def taps(self, layers: int) -> tuple[int, ...]:
        return (FINAL,)

    def fresh(self, setting: Setting) -> Method:
        width = setting.model.config.hidden_size
        module = MedusaModule(self.options.heads, self.options.layers, width).to(setting.model.device)
        return MedusaMethod(self.options, module, setting.store.target)

    def resumed(self, setting: Setting, state: Mapping[str, Any]) -> Method:
        return self.fresh(setting)

    def continued(self, setting: Setting, folder: Path) -> Method:
        sizes = setting.model.config
        files = read_medusa(folder, hidden_size=sizes.hidden_size, vocab_size=sizes.vocab_size)
        for name in ("heads", "layers"):
            theirs, ours = getattr(files.config, name), getattr(self.options, name)
            if theirs != ours:
                raise AlulaError(f"start_from {folder}: it has {theirs} {name}, and this run {ours}: give as many")
        module = MedusaModule(self.options.heads, self.options.layers, sizes.hidden_size)
        if set(files.weights) != set(module.state_dict()):
            raise AlulaError(f"start_from {folder}: its heads have LM heads of their own: give heads that share one")
        module.load_state_dict({name: tensor.float() for name, tensor in files.weights.items()})
        return MedusaMethod(self.options, module.to(setting.model.device), setting.store.target)


class MedusaMethod:
    """Implements `Method`."""

    name = MedusaOptions.name

    def __init__(self, options: MedusaOptions, heads: MedusaModule, target: FeatureTarget) -> None:
        self.options, self.heads = options, heads
        self.lm_head_VD = target.lm_head_VD.detach().float()

    @property
    def module(self) -> nn.Module:
        return self.heads

    @property
    def steps(self) -> int:
        return self.options.heads

    def matrices(self) -> list[nn.Parameter]:
        return [p for p in self.heads.parameters() if p.ndim == 2]

    def losses(self, batch: Batch, generator: torch.Generator) -> list[Loss]:
        """Mean cross-entropy of each head."""
        taught = teacher(batch.hidden_MD, self.lm_head_VD, self.options.candidates, generator)
        weight_ND, losses = self.lm_head_VD[taught.ids_N], []
        for step, (_, index_R, hidden_RD) in enumerate(self._states(batch)):
            value = mean_cross_entropy(hidden_RD, weight_ND, taught, index_R)
            losses.append(Loss(f"loss_{step}", value, self.options.step_decay**step))
        return losses

    def guesses(self, batch: Batch, *, steps: int, width: int) -> Iterator[Guesses]:
        """Of as many steps as there are heads."""
        for _, (flat_R, index_R, hidden_RD) in zip(range(steps), self._states(batch), strict=False):
            yield Guesses(flat_R, index_R, *best_tokens(self._logits, hidden_RD, width))

    def branches(self, batch: Batch) -> Branches:
        return MedusaBranches(self, batch)

    def saved(self) -> dict[str, Any]:
        return {}

    def facts(self, held: Sequence[Conversation]) -> dict[str, Any]:
        return {}

    def export(self, folder: Path, provenance: Mapping[str, Any] | None) -> None:
        vocabulary, width = self.lm_head_VD.shape
        config = MedusaConfig(self.options.heads, self.options.layers, width, vocabulary)
        save_medusa(folder, config, on_cpu(self.heads.state_dict()), provenance)

    def logits_at(self, features_RD: Tensor, head: int) -> Tensor:
        """[R, V]"""
        return self._logits(self.heads[head](features_RD))

    def _logits(self, hidden_RD: Tensor) -> Tensor:
        return F.linear(hidden_RD, self.lm_head_VD)

    def _states(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Per head (flat positions, learned indexes, LM-head inputs [R, D]) of the rows that have a target."""
        columns_A = torch.arange(batch.chains.starts_BA.shape[1], device=batch.chains.starts_BA.device)
        features_MD = _at_starts(batch)
        for step, head in enumerate(self.heads):
            flat_R, index_R = batch.rows(step, columns_A)
            yield flat_R, index_R, head(features_MD[flat_R])


class MedusaBranches:
    """Implements `alula.train.simulate.Branches`: every path of a level has the proposals of its root."""

    vocabulary_C: Tensor | None = None

    def __init__(self, method: MedusaMethod, batch: Batch) -> None:
        self._method, self._features_AD = method, _at_starts(batch)
        self._roots_F, self._depth = torch.arange(len(self._features_AD), device=self._features_AD.device), 0

    def logits(self) -> Tensor:
        """[F, V] at the ends of the paths; beyond the last head nothing is likelier than anything else."""
        if self._depth >= self._method.steps:
            return self._features_AD.new_full((len(self._roots_F), len(self._method.lm_head_VD)), float("-inf"))
        return self._method.logits_at(self._features_AD, self._depth)[self._roots_F]

    def descend(self, origin_F: Tensor, tokens_F: Tensor) -> None:
        """One more step of every path."""
        self._roots_F = self._roots_F[origin_F]
        self._depth += 1


def _at_starts(batch: Batch) -> Tensor:
    """The feature of every chain's start, in the order of the flattened starts."""
    index_BA = batch.chains.starts_BA
    features_BAD = batch.chains.features_BSF.gather(
        1, index_BA[..., None].expand(-1, -1, batch.chains.features_BSF.shape[-1])
    )
    return features_BAD.flatten(0, 1)
