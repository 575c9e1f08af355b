"""Steps, and between them what makes a run safe and honest: checkpoints, served evaluations, the best one kept."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alula.train.batch import make_batch
from alula.train.checkpoint import CHECKPOINT, save_state
from alula.train.config import TrainConfig
from alula.train.data import Conversation
from alula.train.evaluate import evaluate
from alula.train.interrupt import Interruption, Stopped
from alula.train.logs import RunLog, read_log
from alula.train.meter import Meter
from alula.train.methods.method import Method
from alula.train.plot import available, draw
from alula.train.report import Report
from alula.train.served import ServedEvaluation
from alula.train.throughput import Throughput
from alula.train.trainer import Trainer, figures_entry

HEAD, LAST = "head", "last"


class Keeper:
    """What a run writes. Only rank 0 has one.

    method: what is exported and evaluated; a whole copy, where the trainer has a part of the weights only. held:
    conversations whose figures go into the log. record: what a checkpoint keeps beside the trainer's state. facts:
    provenance, known before training. meter: what the run costs.
    """

    def __init__(
        self,
        config: TrainConfig,
        trainer: Trainer,
        method: Method,
        evaluation: ServedEvaluation,
        held: Sequence[Conversation],
        record: Mapping[str, Any],
        facts: Mapping[str, Any],
        report: Report,
        meter: Meter,
    ) -> None:
        self._meter = meter
        self._folder, self._trainer, self._method, self._evaluation = config.output, trainer, method, evaluation
        self._held, self._record, self._facts, self._report = held, record, facts, report
        self._draws = available()
        if not self._draws:
            report.say("matplotlib is not installed, so there will be no picture of the run")
        self.log = RunLog(config.output, step=trainer.progress.step, tensorboard=config.tensorboard)
        self._best = self._best_so_far()

    def save(self, state: Mapping[str, Any]) -> None:
        """The checkpoint. state: the trainer's."""
        save_state(self._folder / CHECKPOINT, {**self._record, **state})

    def evaluate(self, state: Mapping[str, Any]) -> None:
        """Export to last/, serve it, log what was found, and keep it as head/ if nothing served better so far."""
        if self._method is not self._trainer.method:
            self._method.module.load_state_dict(state["head"])
        self._export(LAST, {})
        figures = self._figures()
        self._export(LAST, figures)
        tau = figures.get("served", {}).get("tau")
        kept = tau is None or self._best is None or tau > self._best
        if kept:
            self._export(HEAD, figures)
            self._best = tau
        self.log.add({**self._reached(), "evaluation": {**figures, "kept": kept}, "run": self._cost()})
        self._report.evaluation(self._trainer, figures, kept)
        if self._draws:
            draw(read_log(self.log.path), self._folder / "training.png")

    def _figures(self) -> dict[str, Any]:
        method, store, figures = self._method, self._trainer.store, dict[str, Any]()
        if self._held:
            batches = [make_batch([c], store.get([c])) for c in self._held]
            figures = figures_entry(evaluate(method, batches, steps=method.steps))
        if self._evaluation.prompts:
            figures["served"] = self._evaluation.run(self._folder / LAST, method, store)
        return figures

    def _export(self, name: str, figures: Mapping[str, Any]) -> None:
        training = {**self._reached(), "evaluation": figures, "run": self._cost()}
        self._method.export(self._folder / name, {**self._facts, "training": training})

    def _cost(self) -> dict[str, Any]:
        return self._meter.figures(self._trainer.progress.tokens)

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
    """Runs the trainer to its end, or to the first signal. ``keeper`` is None on ranks that write nothing; what is due,
    and whether there was a signal, rank 0 says."""

    def __init__(
        self,
        config: TrainConfig,
        trainer: Trainer,
        keeper: Keeper | None,
        throughput: Throughput,
        report: Report,
        meter: Meter,
        interruption: Interruption,
    ) -> None:
        self._meter, self._interruption = meter, interruption
        self._config, self._trainer, self._keeper = config, trainer, keeper
        self._throughput, self._report = throughput, report
        self._saved = self._evaluated = time.monotonic()

    def run(self) -> None:
        """Until the recipe's tokens are used up. A new run begins with an evaluation, as a trial of it.

        Raises Stopped after a signal, once the step in which it came is saved.
        """
        trainer = self._trainer
        if trainer.progress.step == 0:
            # Start values are saved too: a fit made again may differ in its last bits.
            self._keep(save=True, evaluate=True)
        self._report.begin(trainer)
        while not trainer.finished:
            self._step()
        self._keep(save=True, evaluate=True)
        self._report.cost(self._meter.figures(trainer.progress.tokens), self._throughput)
        if self._keeper is not None:
            self._keeper.log.close()

    def _step(self) -> None:
        trainer = self._trainer
        entry = trainer.train_step()
        self._report.step(trainer, entry, self._throughput)
        if self._keeper is not None:
            self._keeper.log.add({"step": trainer.progress.step, "tokens": trainer.progress.tokens, **entry})
        save, evaluate, number = trainer.processes.agree(self._due)
        self._keep(save=save, evaluate=evaluate)
        if number:
            where = self._config.output / CHECKPOINT
            raise Stopped(
                number,
                f"stopped after step {trainer.progress.step}, which is saved in {where}: the same command goes on",
            )

    def _due(self) -> tuple[bool, bool, int]:
        """Whether it is time for (a checkpoint, an evaluation), and the number of a signal that came, or 0.

        The end of the run sees to its own."""
        if self._interruption.number:
            return True, False, self._interruption.number
        now, every, config = time.monotonic(), self._config.evaluate_steps, self._config
        by_step = every > 0 and self._trainer.progress.step % every == 0
        evaluate = by_step or now - self._evaluated >= 60 * config.evaluate_minutes
        save = evaluate or now - self._saved >= 60 * config.save_minutes
        going_on = not self._trainer.finished
        return save and going_on, evaluate and going_on, 0

    def _keep(self, *, save: bool, evaluate: bool) -> None:
        if not save and not evaluate:
            return
        state = self._trainer.state()
        if self._keeper is not None:
            if save:
                self._keeper.save(state)
            if evaluate:
                self._keeper.evaluate(state)
        self._trainer.processes.meet()
        now = time.monotonic()
        self._saved, self._evaluated = now, now if evaluate else self._evaluated
