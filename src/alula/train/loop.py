"""Steps, and between them what makes a run safe and honest: checkpoints, served evaluations, the best one kept."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alula.config import ModelConfig
from alula.train.checkpoint import CHECKPOINT, save_state
from alula.train.config import TrainConfig
from alula.train.data import Conversation
from alula.train.logs import RunLog, read_log
from alula.train.plot import available, draw
from alula.train.report import Report
from alula.train.served import ServedEvaluation
from alula.train.throughput import Throughput, counted, matmul_ceiling, reading_flop
from alula.train.trainer import Trainer, figures_entry

HEAD, LAST = "head", "last"


class Keeper:
    """What a run writes. Only rank 0 has one.

    held: conversations whose figures go into the log. record: what a checkpoint keeps beside the trainer's state.
    facts: provenance, known before training.
    """

    def __init__(
        self,
        config: TrainConfig,
        trainer: Trainer,
        evaluation: ServedEvaluation,
        held: Sequence[Conversation],
        record: Mapping[str, Any],
        facts: Mapping[str, Any],
        report: Report,
    ) -> None:
        self._folder, self._trainer, self._evaluation = config.output, trainer, evaluation
        self._held, self._record, self._facts, self._report = held, record, facts, report
        self._draws = available()
        if not self._draws:
            report.say("matplotlib is not installed, so there will be no picture of the run")
        self.log = RunLog(config.output, step=trainer.progress.step, tensorboard=config.tensorboard)
        self._best = self._best_so_far()

    def save(self) -> None:
        """The checkpoint."""
        save_state(self._folder / CHECKPOINT, {**self._record, **self._trainer.state()})

    def evaluate(self) -> None:
        """Export to last/, serve it, log what was found, and keep it as head/ if nothing served better so far."""
        trainer, evaluation = self._trainer, self._evaluation
        self._export(LAST, {})
        figures = figures_entry(trainer.evaluate(self._held, steps=trainer.method.steps)) if self._held else {}
        if evaluation.prompts:
            figures["served"] = evaluation.run(self._folder / LAST, trainer.method, trainer.store)
        self._export(LAST, figures)
        tau = figures.get("served", {}).get("tau")
        kept = tau is None or self._best is None or tau > self._best
        if kept:
            self._export(HEAD, figures)
            self._best = tau
        self.log.add({**self._reached(), "evaluation": {**figures, "kept": kept}})
        self._report.evaluation(trainer, figures, kept)
        if self._draws:
            draw(read_log(self.log.path), self._folder / "training.png")

    def _export(self, name: str, figures: Mapping[str, Any]) -> None:
        training = {**self._reached(), "evaluation": figures}
        self._trainer.method.export(self._folder / name, {**self._facts, "training": training})

    def _reached(self) -> dict[str, int]:
        return {"step": self._trainer.progress.step, "tokens": self._trainer.progress.tokens}

    def _best_so_far(self) -> float | None:
        """The served tau of head/, measured again where it was measured otherwise; None without one."""
        folder = self._folder / HEAD
        served = _served_figures(folder / "provenance.json")
        if served is None or not self._evaluation.prompts:
            return None
        if not self._evaluation.settings().items() <= served.items():
            self._report.say(f"{folder} was evaluated with other settings, and is served again to compare")
            served = self._evaluation.run(folder)
        tau: float = served["tau"]
        return tau


def _served_figures(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["training"]["evaluation"]["served"]
    except (ValueError, KeyError, TypeError):
        return None
    return found


class Loop:
    """Runs the trainer to its end; ``keeper`` is None on ranks that write nothing."""

    def __init__(
        self, config: TrainConfig, trainer: Trainer, keeper: Keeper | None, target: ModelConfig, report: Report
    ) -> None:
        self._config, self._trainer, self._keeper = config, trainer, keeper
        self._target, self._report = target, report
        self._throughput: Throughput | None = None
        self._saved = self._evaluated = time.monotonic()
        self._since = (trainer.progress.tokens, 0.0)

    def run(self) -> None:
        """Until the recipe's tokens are used up. A new run begins with an evaluation, as a trial of it."""
        trainer, keeper = self._trainer, self._keeper
        if keeper is not None and trainer.progress.step == 0:
            keeper.evaluate()
            self._saved = self._evaluated = time.monotonic()
        self._report.begin(trainer)
        while not trainer.finished:
            self._step()
        if keeper is not None:
            keeper.save()
            keeper.evaluate()
            keeper.log.close()
        trainer.processes.meet()

    def _step(self) -> None:
        trainer, keeper = self._trainer, self._keeper
        entry = trainer.train_step() if self._throughput else self._counted_step()
        self._report.step(trainer, entry, self._throughput)
        if keeper is None:
            return
        keeper.log.add({"step": trainer.progress.step, "tokens": trainer.progress.tokens, **entry})
        if self._is_due():
            keeper.save()
            keeper.evaluate()
            self._saved = self._evaluated = time.monotonic()
        elif time.monotonic() - self._saved >= 60 * self._config.save_minutes:
            keeper.save()
            self._saved = time.monotonic()

    def _is_due(self) -> bool:
        every = self._config.evaluate_steps
        by_step = every > 0 and self._trainer.progress.step % every == 0
        by_clock = time.monotonic() - self._evaluated >= 60 * self._config.evaluate_minutes
        return (by_step or by_clock) and not self._trainer.finished

    def _counted_step(self) -> dict[str, float]:
        """The first step, whose matrix products are counted to say what the ceiling allows."""
        trainer, target = self._trainer, self._target
        tokens, read = trainer.progress.tokens, trainer.store.computed_tokens
        entry: dict[str, float] = {}
        flop = counted(lambda: entry.update(trainer.train_step()))
        # The target's kernels are not torch's: its reading is reckoned from its sizes.
        flop += (trainer.store.computed_tokens - read) * reading_flop(target)
        precision = trainer.recipe.precision
        self._throughput = Throughput(flop / (trainer.progress.tokens - tokens), matmul_ceiling(precision))
        self._report.say(self._throughput.sentence())
        return entry
