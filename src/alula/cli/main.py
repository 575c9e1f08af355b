"""Parses the command line. Nothing heavy is imported before a command runs, so `--help` is quick."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import Annotated, TypeAlias

import tyro

from alula.cli.ablate import Ablate, ablate
from alula.cli.bench import Bench
from alula.cli.chat import Chat
from alula.cli.convert import Convert
from alula.cli.errors import guarded
from alula.cli.generate import Generate
from alula.cli.prove import Prove
from alula.cli.serve import Serve
from alula.cli.synth import Synth
from alula.cli.train import Train, train
from alula.version import alula_version

Command: TypeAlias = (
    Annotated[Generate, tyro.conf.subcommand("generate")]
    | Annotated[Chat, tyro.conf.subcommand("chat")]
    | Annotated[Prove, tyro.conf.subcommand("prove")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
    | Annotated[Serve, tyro.conf.subcommand("serve")]
    | Annotated[Synth, tyro.conf.subcommand("synth")]
    | Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Ablate, tyro.conf.subcommand("ablate")]
    | Annotated[Convert, tyro.conf.subcommand("convert")]
)

_DESCRIPTION = (
    "Speculative decoding with a small head on a big language model: the same text, sooner. "
    "`alula --version` says which alula this is."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 done, 1 a proof failed, 2 a mistake in the input, 130 interrupted."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal of another encoding gets escapes, not a crash
    if arguments == ["--version"]:
        print(f"alula {alula_version()}")
        return 0
    if arguments[:1] == ["train"]:
        return guarded(lambda: train(arguments[1:]))
    if arguments[:1] == ["ablate"]:
        return guarded(lambda: ablate(arguments[1:]))
    command: Generate | Chat | Prove | Bench | Serve | Synth | Train | Ablate | Convert = tyro.cli(
        Command, prog="alula", description=_DESCRIPTION, args=arguments, config=(tyro.conf.FlagCreatePairsOff,)
    )
    return guarded(command.run)
