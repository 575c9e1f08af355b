"""Settings of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from alula.config import AlulaError
from alula.tree import TreeShape

RULES = ("coupled", "rejection")


@dataclass(frozen=True)
class EngineConfig:
    """Raises AlulaError, naming the field and the mend, for a value out of range."""

    rule: str = "coupled"
    """How drafts are verified: `coupled` (same text as plain decoding) or `rejection` (same distribution)."""
    shape: TreeShape = field(default_factory=TreeShape)
    """Limits of the draft tree; nodes counts the root."""
    max_num_seqs: int = 16
    """Sequences running at once."""
    max_num_batched_tokens: int = 256
    """Rows of one target forward: prompt chunks and tree nodes together."""
    max_model_len: int | None = None
    """Longest prompt plus output, in tokens; None takes the model's own limit."""
    page_size: int = 16
    """Tokens in one cache page."""
    kv_cache_mib: int = 384
    """Memory of the paged KV cache, MiB, drafter included."""
    enable_prefix_caching: bool = True
    """Reuse the KV of prompt beginnings that are still in the cache."""
    check_integrity: bool = False
    """Verify the cache's books after every step (for tests)."""

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise AlulaError(f"rule is {self.rule!r}: give one of {', '.join(RULES)}")
        for name in ("max_num_seqs", "max_num_batched_tokens", "page_size", "kv_cache_mib", "max_model_len"):
            value = getattr(self, name)
            if value is None and name == "max_model_len":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise AlulaError(f"{name} is {value!r}: give a whole number of at least 1")
        if not isinstance(self.shape, TreeShape):
            raise AlulaError(f"shape is {self.shape!r}: give a TreeShape")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise AlulaError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, below max_num_seqs {self.max_num_seqs}: "
                "raise it, so that every running sequence gets a row"
            )
