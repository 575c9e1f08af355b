"""What `alula train` is told. Imports nothing heavy: `alula train --help` must be quick."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Recipe:
    """What the loss and the optimiser do."""

    steps: int = 7
    """Steps of the training-time test."""
    step_decay: float = 0.8
    """Weight of step i is step_decay ** i."""
    chain_fraction: float = 1.0
    """Share of the chains continued beyond step 0, drawn anew for each batch; below 1 saves time."""
    candidates: int = 0
    """Draft ids whose logits are made per batch (sampled softmax); 0 makes all."""
    matrix_rate: float = 0.004
    """Peak rate of Muon, for the matrices of fc and the layer (linear warm-up, then cosine)."""
    other_rate: float = 1e-4
    """Peak rate of AdamW, for norms and LM head, which start as the target's."""
    final_share: float = 0.03
    """The cosine ends at this share of the peak."""
    warmup_tokens: int = 20_000
    """Learned tokens of the warm-up."""
    total_tokens: int = 2_000_000
    """Learned tokens until the end, repeats counted."""
    tokens_per_batch: int = 2048
    """Learned tokens of one optimiser step."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's."""
    clip: float = 1.0
    """Largest norm of the whole gradient."""

    def share(self, tokens: int) -> float:
        """Share of the peak rates after so many learned tokens."""
        if tokens < self.warmup_tokens:
            return (tokens + 1) / (self.warmup_tokens + 1)
        span = max(self.total_tokens - self.warmup_tokens, 1)
        done = min((tokens - self.warmup_tokens) / span, 1.0)
        return self.final_share + (1 - self.final_share) * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True)
class TrainConfig:
    """A training run. The same command, given again, goes on where it was interrupted."""

    output: Path
    """Folder of the run: data.jsonl, features/, checkpoint.pt, log.jsonl and head/ (the result)."""
    model: str = "smollm2"
    """The target: a built-in name, a Hugging Face folder or hub id, or a GGUF file."""
    data: tuple[Path, ...] = ()
    """JSON-lines files of conversations; none lets the target write its own."""
    start_from: Path | None = None
    """Folder of a head of the same sizes to go on from, with its own draft vocabulary; none starts from a fit."""
    answer_tokens: int = 300_000
    """How many answer tokens the target writes when no data is given."""
    draft_vocab_size: int = 12_288
    """Tokens the head can propose."""
    intermediate_size: int | None = None
    """Width of the head's MLP; the target's by default."""
    rope_theta: float = 10_000.0
    """Base of the head's rotary embedding, written to its config.json."""
    max_tokens: int = 1024
    """Longer conversations are cut here."""
    held_out_one_in: int = 24
    """One conversation in so many is kept for evaluation."""
    evaluated: int = 24
    """Held-out conversations looked at in each evaluation, at most."""
    save_minutes: float = 5.0
    """Between checkpoints, each with an evaluation and an exported head."""
    dtype: str = "bfloat16"
    """Numeric format in which the target runs and features are kept."""
    threads: int | None = None
    """torch's thread count."""
    seed: int = 0
    """Start values, data order and data."""
    recipe: Recipe = field(default_factory=Recipe)
    """Loss and optimiser."""
