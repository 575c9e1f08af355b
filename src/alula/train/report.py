"""What the user is told while training runs, on standard error: sentences and a bar, in a log a line a minute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from alula.model.progress import Pace
from alula.train.data import Conversation
from alula.train.throughput import Throughput
from alula.train.trainer import Trainer


class Report:
    """Of rank 0; the others are silent."""

    def __init__(self, speaks: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self._speaks = speaks
        self._console = Console(stderr=True)
        columns = (BarColumn(), TextColumn("{task.fields[figures]}"), TimeElapsedColumn(), TimeRemainingColumn())
        hidden = not speaks or not self._console.is_terminal
        self._bar = Progress(
            TextColumn("{task.description}"), *columns, console=self._console, disable=hidden, transient=True
        )
        self._task = self._bar.add_task("training", total=None, figures="", visible=False)
        self._pace = Pace()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, sentence: str) -> None:
        """One line."""
        if self._speaks:
            self._console.print(sentence, markup=False, highlight=False, soft_wrap=True)

    def data(self, train: Sequence[Conversation], held: Sequence[Conversation]) -> None:
        """What there is to learn from."""
        tokens = sum(len(c.learned) for c in train)
        self.say(f"data: {len(train):,} conversations with {tokens:,} learned tokens, {len(held):,} held out")

    def opening(self, trainer: Trainer, facts: Mapping[str, Any]) -> None:
        """What is about to be trained."""
        if "draft_vocabulary" in facts:
            known = facts["draft_vocabulary"]
            coverage = known["held_out_coverage"]
            self.say(f"draft vocabulary: {known['size']} tokens, which cover {coverage:.2%} of the held-out answers")
        at = f", going on from step {trainer.progress.step}" if trainer.progress.step else ""
        self.say(f"method: {trainer.method.name}, {trainer.trainable / 1e6:.2f} million trainable parameters{at}")

    def begin(self, trainer: Trainer) -> None:
        """Show the bar."""
        total = trainer.recipe.total_tokens
        self._bar.update(self._task, total=total, completed=trainer.progress.tokens, visible=True)
        self._bar.start()

    def step(self, trainer: Trainer, entry: Mapping[str, Any], throughput: Throughput) -> None:
        """After an optimiser step."""
        first = next((f"{name.replace('_', ' ')} {value:.2f}" for name, value in entry.items() if "loss" in name), "")
        rate = entry["tokens_per_second"]
        speed = f"{rate:.0f} tokens/s ({throughput.share(rate):.0%} of the ceiling)"
        self._bar.update(self._task, completed=trainer.progress.tokens, figures=f"{first}, {speed}")
        if not self._console.is_terminal and self._pace.is_due():
            progress, total = trainer.progress, trainer.recipe.total_tokens
            self.say(f"step {progress.step}, {progress.tokens:,} of {total:,} tokens: {first}, {speed}")

    def cost(self, figures: Mapping[str, Any], throughput: Throughput) -> None:
        """Of the whole run, its evaluations and checkpoints included; see `alula.train.meter`."""
        rate, memory = figures["tokens_per_second"], figures["peak_memory_bytes"] / 2**20
        self.say(
            f"{rate:.0f} learned tokens/s over the run, {throughput.share(rate):.0%} of the ceiling; at most "
            f"{memory:,.0f} MiB of memory ({figures['memory_of']})"
        )

    def evaluation(self, trainer: Trainer, figures: Mapping[str, Any], kept: bool) -> None:
        """After an evaluation. kept: it is the best so far."""
        where = f"step {trainer.progress.step}, {trainer.progress.tokens:,} tokens"
        served = figures.get("served")
        if served is None:
            self.say(f"{where}: kept, since nothing is served to compare")
            return
        depths = " ".join(f"{rate:.2f}" for rate in served["acceptance_by_depth"].values())
        self.say(
            f"{where}: served tau {served['tau']:.3f} (estimated in training {served['estimate']['tau']:.3f}), "
            f"acceptance {served['acceptance_rate']:.3f}, by depth {depths}{'; the best so far' if kept else ''}"
        )
