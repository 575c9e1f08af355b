"""`alula ablate`: tables of heads that differ in one thing.

Its flags are the fields of `alula.train.ablation_config.AblationConfig`. torch is imported only once they are parsed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Annotated, Literal, Self

import tyro

from alula.model.progress import Pace
from alula.train.ablation_config import AblationConfig

TITLES = {"inputs": "What an EAGLE-1 head reads", "losses": "What an EAGLE-1 head is trained for"}


@dataclass(frozen=True)
class Ablate:
    """Train EAGLE-1 heads that differ in one thing, and compare how often their drafts are right.

    `inputs`: the feature alone, the token alone, both, and the feature with the token after it. `losses`:
    regression, cross-entropy, both at three weights, with and without noise.
    """

    def run(self) -> int:
        return ablate(())


@dataclass(frozen=True)
class _Arguments:
    table: Annotated[Literal["inputs", "losses"], tyro.conf.Positional]
    """Which table."""
    config: Annotated[AblationConfig, tyro.conf.arg(name="")]


def ablate(arguments: Sequence[str]) -> int:
    """Parse what comes after `ablate` and run."""
    given = tyro.cli(
        _Arguments,
        prog="alula ablate",
        description=Ablate.__doc__,
        args=list(arguments),
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    from alula.train.ablation import run_ablation
    from alula.train.ablation_report import ablation_table, draw_ablation
    from alula.train.plot import available

    name, output = given.table, given.config.output
    with _Bar() as bar:
        results = run_ablation(name, given.config, bar)
    print(f"{TITLES[name]}: acceptance when n of the features it has read are its own\n")
    print(ablation_table(results))
    print(f"\nall figures are in {output / f'{name}.json'}")
    if available():
        draw_ablation(results, TITLES[name], output / f"{name}.png")
        print(f"the picture is {output / f'{name}.png'}")
    else:
        print("no picture was drawn: for one, install matplotlib (pip install 'alula[plot]') and run this again")
    return 0


class _Bar:
    """Implements `alula.train.ablation.Watcher` on standard error."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import Progress

        console = Console(stderr=True)
        self._progress = Progress(console=console, disable=not console.is_terminal)
        self._task = self._progress.add_task("", total=None)
        self._pace = Pace()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def say(self, sentence: str) -> None:
        self._progress.console.print(sentence, markup=False, highlight=False, soft_wrap=True)

    def begin(self, what: str, tokens: int) -> None:
        self._progress.update(self._task, description=what, total=tokens, completed=0)

    def step(self, tokens: int) -> None:
        self._progress.update(self._task, completed=tokens)
        if not self._progress.console.is_terminal and self._pace.is_due():
            task = self._progress.tasks[self._task]
            self.say(f"{task.description}: {tokens:,} of {task.total or 0:,.0f} tokens")
