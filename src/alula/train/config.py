"""What `alula train` is told. Imports nothing heavy: `alula train --help` must be quick."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg, subcommand

from alula.config import AlulaError, check_floor
from alula.train.making import MakingConfig, at_least
from alula.train.methods.options import Eagle1Options, Eagle3Options, LMOptions, MedusaOptions


@dataclass(frozen=True)
class Recipe:
    """What the optimiser does, whatever the method."""

    matrix_rate: float = 0.004
    """Peak rate of Muon, for the inner matrices."""
    other_rate: float = 1e-4
    """Peak rate of AdamW, for everything else: norms, biases, LM head."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the rates come down after the warm-up."""
    final_share: float = 0.03
    """Share of the peak at which cosine and linear end."""
    warmup_tokens: int = 20_000
    """Learned tokens over which the rates rise to their peak."""
    total_tokens: int = 2_000_000
    """Learned tokens until the end, repeats counted."""
    tokens_per_batch: int = 2048
    """Learned tokens of one forward."""
    accumulate: int = 1
    """Batches of one optimiser step, whose gradients are averaged; all processes together."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's."""
    clip: float = 1.0
    """Largest norm of the whole gradient."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Of the drafter's inner matrix products; weights, norms, loss and optimiser stay in fp32."""

    def __post_init__(self) -> None:
        for name in ("tokens_per_batch", "accumulate", "total_tokens"):
            _check(name, getattr(self, name), whole=True, least=1)
        _check("warmup_tokens", self.warmup_tokens, whole=True, least=0)
        for name in ("matrix_rate", "other_rate", "final_share"):
            _check(name, getattr(self, name), least=0)
        if not (isinstance(self.clip, (int, float)) and self.clip > 0):
            raise AlulaError(f"clip is {self.clip!r}: give a number above 0")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise AlulaError(f"betas is {self.betas!r}: give two numbers of at least 0 and below 1")
        _check_choice("schedule", self.schedule, "cosine", "linear", "constant")
        _check_choice("precision", self.precision, "fp32", "bf16")

    def share(self, tokens: int) -> float:
        """Share of the peak rates after so many learned tokens."""
        if tokens < self.warmup_tokens:
            return (tokens + 1) / (self.warmup_tokens + 1)
        span = max(self.total_tokens - self.warmup_tokens, 1)
        done = min((tokens - self.warmup_tokens) / span, 1.0)
        falling = {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done, "constant": 1.0}
        left = falling[self.schedule]
        return left if self.schedule == "constant" else self.final_share + (1 - self.final_share) * left


@dataclass(frozen=True)
class Served:
    """Evaluation by the serving path: what it serves, and with which trees."""

    held_out: int = 6
    """Prompts of held-out conversations, at most."""
    prompts: int = 6
    """The first prompts of each of ``sets``."""
    sets: tuple[str, ...] = ("default",)
    """alula's own prompt sets by name, or files of JSON lines with `turns` or `prompt`."""
    tokens: int = 64
    """Longest answer, greedy."""
    nodes: int = 16
    """Rows verified per step: the draft tree with its root."""
    depth: int = 6
    """Levels of the draft tree."""
    branch: int = 4
    """Children tried per node."""
    floor: float = 0.0
    """Least probability that the drafter gives the whole path to a node; 0 is none."""
    kv_cache_mib: int = 384
    """Memory of the KV cache while prompts are served, MiB."""

    def __post_init__(self) -> None:
        for name in ("held_out", "prompts"):
            _check(f"served.{name}", getattr(self, name), whole=True, least=0)
        for name in ("tokens", "nodes", "depth", "branch", "kv_cache_mib"):
            _check(f"served.{name}", getattr(self, name), whole=True, least=1)
        check_floor("served.floor", self.floor)


def _check(name: str, value: object, *, whole: bool = False, least: float) -> None:
    kinds = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value < math.inf:
        raise AlulaError(f"{name} is {value!r}: give a {'whole number' if whole else 'number'} of at least {least}")


def _check_choice(name: str, value: str, *known: str) -> None:
    if value not in known:
        raise AlulaError(f"{name} is {value!r}: give one of {', '.join(known)}")


@dataclass(frozen=True)
class TrainConfig:
    """A training run. The same command, given again, goes on where it was interrupted."""

    output: Path
    """Folder of the run: checkpoint, log, picture, last/ (the newest drafter) and head/ (the best one in service)."""
    model: str = "smollm2"
    """The target: a built-in name, a Hugging Face folder or hub id, or a GGUF file."""
    data: tuple[Path, ...] = ()
    """JSON-lines files of conversations; none lets the target write its own."""
    start_from: Path | None = None
    """Folder of a head of the same sizes to go on from, with its own draft vocabulary; none starts from a fit."""
    answer_tokens: int | None = None
    """How many answer tokens the target writes when no data is given; None is 300,000 from nothing, and all that
    synth.inputs bring."""
    synth: MakingConfig = field(default_factory=MakingConfig)
    """How it writes them, as `alula synth` does."""
    max_tokens: int = 1024
    """Longer conversations are cut here, or at the model's context limit."""
    held_out_one_in: int = 24
    """One conversation in so many is kept for evaluation."""
    evaluated: int = 24
    """Held-out conversations looked at in each evaluation, at most."""
    features: Literal["on-the-fly", "stored"] = "on-the-fly"
    """Computed each time that a text is trained on, or once and kept in output/features."""
    save_minutes: float = 5.0
    """Between checkpoints."""
    evaluate_minutes: float = 15.0
    """Between evaluations, each with a checkpoint."""
    evaluate_steps: int = 0
    """Optimiser steps between evaluations, besides those by the clock; 0 leaves it to the clock."""
    served: Served = field(default_factory=Served)
    """Evaluation by the serving path, which decides what head/ keeps."""
    fsdp: bool = False
    """Under torchrun, spread weights and optimiser over the processes, rather than give each a copy (DDP)."""
    tensorboard: bool = False
    """Also write the log for TensorBoard, to output/tensorboard."""
    change: tuple[str, ...] = ()
    """Settings that may differ from those of the checkpoint, as it names them: recipe.total_tokens, say."""
    dtype: str = "bfloat16"
    """Numeric format in which the target runs and features are kept."""
    device: str = "cpu"
    """Where target and drafter lie, by torch's name: cpu, cuda, cuda:1. Under torchrun, cuda is each one's own."""
    threads: int | None = None
    """torch's thread count."""
    seed: int = 0
    """Start values, data order and data."""
    recipe: Recipe = field(default_factory=Recipe)
    """Optimiser and schedule."""
    method: Annotated[
        Annotated[Eagle3Options, subcommand("eagle3", prefix_name=False)]
        | Annotated[Eagle1Options, subcommand("eagle1", prefix_name=False)]
        | Annotated[MedusaOptions, subcommand("medusa", prefix_name=False)]
        | Annotated[LMOptions, subcommand("lm", prefix_name=False)],
        arg(name=""),
    ] = field(default_factory=Eagle3Options)
    """What is trained, and its losses."""

    def __post_init__(self) -> None:
        if self.dtype == "auto":
            raise AlulaError("dtype is 'auto', which may be another format when the run goes on: give the format")
        for name in ("save_minutes", "evaluate_minutes"):
            _check(name, getattr(self, name), least=0)
        if self.answer_tokens is not None:
            at_least("answer_tokens", self.answer_tokens, 1)
        for name, least in (("max_tokens", 4), ("held_out_one_in", 2), ("evaluated", 0)):
            _check(name, getattr(self, name), whole=True, least=least)
        _check("evaluate_steps", self.evaluate_steps, whole=True, least=0)
        if self.data and self.synth != MakingConfig():
            raise AlulaError("synth says how data is written, and data is given: leave out one of them")
        _check_choice("features", self.features, "on-the-fly", "stored")
