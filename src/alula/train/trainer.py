"""The training loop: one screen, resumable at every step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from alula.config import AlulaError
from alula.train.batch import Batch, make_batch
from alula.train.config import Recipe
from alula.train.data import Conversation, plan_batches
from alula.train.distributed import OneProcess, Processes
from alula.train.evaluate import StepFigures, expected_length
from alula.train.features import FeatureStore
from alula.train.methods.method import Method
from alula.train.muon import Muon
from alula.train.sharding import Losses, gathered, spread


@dataclass
class Progress:
    """Where the data stands; saved with every checkpoint."""

    step: int = 0
    tokens: int = 0
    epoch: int = 0
    plan: list[list[str]] = field(default_factory=list)
    """Batches of this epoch, as conversation keys."""
    cursor: int = 0
    """Next batch of the plan."""


class Trainer:
    """One method, its optimisers, one data order.

    ``read_data`` is asked again at every epoch's start, so a data set may grow while training runs; batches are
    named by content, so an interrupted epoch is finished as it was planned.

    processes: the batches of a step are dealt out in turn, so that n processes do what one does with as many batches
    a step. losses: the method's, but for what spreads its weights over processes (`alula.train.sharding`).
    Raises AlulaError where ``recipe.accumulate`` cannot be dealt out evenly.
    """

    def __init__(
        self,
        method: Method,
        store: FeatureStore,
        recipe: Recipe,
        read_data: Callable[[], Sequence[Conversation]],
        *,
        seed: int,
        processes: Processes | None = None,
        losses: Losses | None = None,
    ) -> None:
        self.method, self.store, self.recipe, self.read_data = method, store, recipe, read_data
        self.processes: Processes = processes or OneProcess()
        self._losses = losses or method.losses
        if recipe.accumulate % self.processes.count:
            raise AlulaError(
                f"accumulate is {recipe.accumulate}: give a multiple of the number of processes, {self.processes.count}"
            )
        self.seed = seed
        self.generator = torch.Generator().manual_seed(seed)
        self.progress = Progress()
        self.optimizers = _optimizers(method, recipe)
        self._by_key: dict[str, Conversation] = {}

    @property
    def finished(self) -> bool:
        """Whether the recipe's tokens are used up."""
        return self.progress.tokens >= self.recipe.total_tokens

    @property
    def trainable(self) -> int:
        """How many numbers are trained."""
        return sum(p.numel() for p in self.method.module.parameters() if p.requires_grad)

    def train_step(self) -> dict[str, float]:
        """One optimiser step on the next batches; returns the log line's figures."""
        started = time.perf_counter()
        chosen = [self._next_keys() for _ in range(self.recipe.accumulate)]
        learned = sum(len(self._by_key[key].learned) for keys in chosen for key in keys)
        figures = self._gradients(chosen)
        parameters = [p for p in self.method.module.parameters() if p.requires_grad]
        norm = gathered(torch.nn.utils.clip_grad_norm_(parameters, self.recipe.clip))
        if not torch.isfinite(norm):
            raise AlulaError(
                f"the gradient of step {self.progress.step + 1} is not finite: lower recipe.matrix_rate or "
                "recipe.other_rate, with --change, and go on from the checkpoint, which is sound"
            )
        share = self.recipe.share(self.progress.tokens)
        for optimizer, peak in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak * share
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.progress.step += 1
        self.progress.tokens += learned
        seconds = time.perf_counter() - started
        return {
            **figures,
            "gradient_norm": norm.item(),
            "lr_share": share,
            "tokens_per_second": learned / seconds,
        }

    def state(self) -> dict[str, Any]:
        """Everything needed to go on as if never interrupted; whole tensors, which all processes have to ask for."""
        state: dict[str, Any] = {
            **self.method.saved(),
            "head": self.method.module.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer, _ in self.optimizers],
            "generator": self.generator.get_state(),
            "progress": asdict(self.progress),
        }
        return {name: gathered(value) for name, value in state.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up a saved ``state``."""
        now = self.method.module.state_dict()
        self.method.module.load_state_dict({name: spread(value, now[name]) for name, value in state["head"].items()})
        for (optimizer, _), saved in zip(self.optimizers, state["optimizers"], strict=True):
            _restore(optimizer, saved)
        self.generator.set_state(state["generator"])
        self.progress = Progress(**state["progress"])

    def start_epoch(self) -> None:
        """Leave what is planned, since the data has changed."""
        self.progress.plan, self.progress.cursor = [], 0

    def _gradients(self, chosen: Sequence[Sequence[str]]) -> dict[str, float]:
        """Leave the mean gradient of the step's batches; the mean of each loss."""
        names: list[str] = []
        totals = torch.zeros(0)
        for place, keys in enumerate(chosen):
            if place % self.processes.count != self.processes.rank:
                continue
            with self._autocast():
                losses = self._losses(self._batch(keys), self._draws(place))
            torch.autograd.backward(torch.stack([loss.value * loss.weight for loss in losses]).sum() / len(chosen))
            values = torch.tensor([loss.value.item() for loss in losses]) / len(chosen)
            names, totals = [loss.name for loss in losses], totals + values if len(totals) else values
        self.processes.add([p for p in self.method.module.parameters() if p.requires_grad], totals)
        return dict(zip(names, totals.tolist(), strict=True))

    def _autocast(self) -> torch.autocast:
        device = next(self.method.module.parameters()).device.type
        return torch.autocast(device, torch.bfloat16, enabled=self.recipe.precision == "bf16")

    def _draws(self, place: int) -> torch.Generator:
        """The generator of one batch: a step of a single batch goes on with the data order's, one of several has one
        for each, so that a batch draws the same whichever process has it."""
        if self.recipe.accumulate == 1:
            return self.generator
        seed = hash((self.seed, self.progress.step, place)) % 2**63
        return torch.Generator().manual_seed(seed)

    def _next_keys(self) -> list[str]:
        """The conversations of the next batch; a new plan at the end of an epoch."""
        progress = self.progress
        if progress.cursor >= len(progress.plan):
            progress.epoch += bool(progress.plan)
            progress.plan = self.processes.agree(self._plan)
            progress.cursor = 0
            if self.processes.rank:
                self._by_key = {}  # only rank 0 has read the data that it planned
        if not self._by_key:
            self._reload()
        keys = progress.plan[progress.cursor]
        if not all(key in self._by_key for key in keys):
            raise AlulaError(
                "data lacks a conversation that this epoch has planned for: give the same files, or start a new epoch "
                "with --change data"
            )
        progress.cursor += 1
        return keys

    def _batch(self, keys: Sequence[str]) -> Batch:
        chosen = [self._by_key[key] for key in keys]
        return make_batch(chosen, self.store.get(chosen))

    def _plan(self) -> list[list[str]]:
        tokens = self.recipe.tokens_per_batch
        return plan_batches(self._reload(), tokens_per_batch=tokens, generator=self.generator)

    def _reload(self) -> Sequence[Conversation]:
        conversations = self.read_data()
        self._by_key = {c.key: c for c in conversations}
        return conversations


def _optimizers(method: Method, recipe: Recipe) -> list[tuple[torch.optim.Optimizer, float]]:
    """(optimiser, its peak rate): Muon for the method's matrices, AdamW for what else is trained."""
    matrices = method.matrices()
    inner = {id(p) for p in matrices}
    others = [p for p in method.module.parameters() if p.requires_grad and id(p) not in inner]
    optimizers: list[tuple[torch.optim.Optimizer, float]] = [
        (Muon(matrices, lr=recipe.matrix_rate), recipe.matrix_rate)
    ]
    if others:
        adam = torch.optim.AdamW(others, lr=recipe.other_rate, betas=recipe.betas, weight_decay=0.0, fused=True)
        optimizers.append((adam, recipe.other_rate))
    return optimizers


def _restore(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    spread_out = {
        place: {
            name: spread(value, parameters[place]) if isinstance(value, torch.Tensor) else value
            for name, value in values.items()
        }
        for place, values in saved["state"].items()
    }
    optimizer.load_state_dict({**saved, "state": spread_out})


def figures_entry(figures: Sequence[StepFigures]) -> dict[str, Any]:
    """An evaluation as a log entry."""
    return {
        "top1": [round(f.top1, 4) for f in figures],
        "top4": [round(f.top4, 4) for f in figures],
        "conditional_top1": [round(f.conditional_top1, 4) for f in figures],
        "conditional_top4": [round(f.conditional_top4, 4) for f in figures],
        "length_top1": round(expected_length(figures, branch=1), 3),
        "length_top4": round(expected_length(figures, branch=4), 3),
    }
