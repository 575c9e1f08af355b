"""`alula train`: a head for a model.

Its flags are the fields of `alula.train.config.TrainConfig`. torch is imported only once they are parsed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import tyro


@dataclass(frozen=True)
class Train:
    """Train a drafter for a model, on conversations that the model writes itself or on given ones.

    The same command, given again, goes on where it stopped. Started by torchrun, its processes share the work.
    """

    def run(self) -> int:
        return train(())


def train(arguments: Sequence[str]) -> int:
    """Parse the flags after `train` and run."""
    from alula.cli.synth import Bar
    from alula.train.config import TrainConfig

    config = tyro.cli(
        TrainConfig,
        prog="alula train",
        description=Train.__doc__,
        args=list(arguments),
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    from alula.train.interrupt import Stopped
    from alula.train.run import run

    try:
        run(config, Bar)
    except Stopped as stopped:
        if os.environ.get("RANK", "0") == "0":
            print(f"alula: {stopped}", file=sys.stderr)
        return stopped.code
    head = config.output / "head"
    print(f"the head is in {head}: use it with --drafter {head}")
    return 0
