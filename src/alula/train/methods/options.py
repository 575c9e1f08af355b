"""The settings of each method. Imports nothing heavy: `alula train --help` must be quick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias


@dataclass(frozen=True)
class Eagle3Options:
    """An EAGLE-3 head."""

    name: ClassVar[str] = "eagle3"

    steps: int = 7
    """Steps of the training-time test."""
    step_decay: float = 0.8
    """Weight of step i is step_decay ** i."""
    chain_fraction: float = 1.0
    """Share of the chains continued beyond step 0, drawn anew for each batch; below 1 saves time."""
    candidates: int = 0
    """Draft ids whose logits are made per batch (sampled softmax); 0 makes all."""
    draft_vocab_size: int = 12_288
    """Tokens the head can propose."""
    intermediate_size: int | None = None
    """Width of the head's MLP; the target's by default."""
    rope_theta: float = 10_000.0
    """Base of the head's rotary embedding, written to its config.json."""


MethodOptions: TypeAlias = Eagle3Options
"""What `alula.train.methods.select.maker` takes."""
