"""The settings of each method. Imports nothing heavy: `alula train --help` must be quick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from alula.config import AlulaError


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
    fc_norm: bool = False
    """A norm per tap before `fc` (EAGLE-3.1)."""
    norm_output: bool = False
    """Normed states are fed back (EAGLE-3.1)."""
    acceptance: float = 0.0
    """Share of the loss that raises the chance of acceptance, sum min(p, q), itself; the rest is cross-entropy."""

    def __post_init__(self) -> None:
        _at_least_one(self, "steps", "draft_vocab_size")
        _between_0_and_1(self, "step_decay", "chain_fraction", "acceptance")


@dataclass(frozen=True)
class Eagle1Options:
    """An EAGLE-1/2 head: it predicts the target's next feature, and shares the target's embedding and LM head."""

    name: ClassVar[str] = "eagle1"

    regression: float = 1.0
    """Weight of SmoothL1 between its feature and the target's."""
    classification: float = 0.1
    """Weight of the cross-entropy of the two features' distributions; lambda in the paper."""
    noise: float = 0.1
    """Uniform noise of at most this much is added to the features it reads."""
    candidates: int = 0
    """Token ids whose logits are made per batch (sampled softmax); 0 makes all."""
    intermediate_size: int | None = None
    """Width of the head's MLP; the target's by default."""
    rope_theta: float = 10_000.0
    """Base of the head's rotary embedding, written to its config.json."""

    def __post_init__(self) -> None:
        for name in ("regression", "classification", "noise"):
            if not getattr(self, name) >= 0:
                raise AlulaError(f"{name} is {getattr(self, name)}: give a number of at least 0")
        if not self.regression + self.classification > 0:
            raise AlulaError("regression and classification are both 0: give one of them a weight")


@dataclass(frozen=True)
class MedusaOptions:
    """Medusa heads: each guesses one token further ahead from the LM head's input, and shares the target's LM head."""

    name: ClassVar[str] = "medusa"

    heads: int = 5
    """How many tokens ahead they guess together."""
    layers: int = 1
    """Residual blocks of each."""
    step_decay: float = 0.8
    """Weight of head i is step_decay ** i."""
    candidates: int = 0
    """Token ids whose logits are made per batch (sampled softmax); 0 makes all."""

    def __post_init__(self) -> None:
        _at_least_one(self, "heads", "layers")
        _between_0_and_1(self, "step_decay")


@dataclass(frozen=True)
class LMOptions:
    """A small language model with the target's tokenizer, distilled from it; it reads tokens only."""

    name: ClassVar[str] = "lm"

    hidden_size: int = 192
    """Its width; the embedding, which is also its LM head, starts as the target's on this many directions."""
    layers: int = 2
    """Decoder layers."""
    heads: int = 6
    """Attention heads; divides hidden_size into an even number."""
    kv_heads: int = 2
    """Heads of keys and values; divides heads."""
    intermediate_size: int = 512
    """Width of its MLPs."""
    train_embedding: bool = False
    """Train the embedding too; frozen, it costs neither gradients nor optimiser state."""
    candidates: int = 0
    """Token ids whose logits are made per batch (sampled softmax); 0 makes all."""

    def __post_init__(self) -> None:
        _at_least_one(self, "hidden_size", "layers", "heads", "kv_heads", "intermediate_size")
        if self.heads % self.kv_heads:
            raise AlulaError(f"kv_heads is {self.kv_heads}: give a divisor of heads, {self.heads}")
        if self.hidden_size % (2 * self.heads):
            raise AlulaError(
                f"hidden_size is {self.hidden_size}: give a multiple of twice the {self.heads} heads, since RoPE turns "
                "pairs"
            )


MethodOptions: TypeAlias = Eagle3Options | Eagle1Options | MedusaOptions | LMOptions
"""What `alula.train.methods.select.maker` takes."""


def _at_least_one(options: object, *names: str) -> None:
    for name in names:
        if getattr(options, name) < 1:
            raise AlulaError(f"{name} is {getattr(options, name)}: give a whole number of at least 1")


def _between_0_and_1(options: object, *names: str) -> None:
    for name in names:
        if not 0 <= getattr(options, name) <= 1:
            raise AlulaError(f"{name} is {getattr(options, name)}: give a number from 0 to 1")
