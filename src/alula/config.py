"""What a model is, as plain validated values, and the error every user mistake ends in."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TypeGuard


class AlulaError(ValueError):
    """A mistake in what the user gave. The message is one sentence that names the field and the mend."""


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_floor(name: str, value: object) -> None:
    """Raises AlulaError for what is no floor of a path's probability."""
    if not (_is_number(value) and 0 <= value < 1):
        raise AlulaError(f"{name} is {value!r}: give a number of at least 0 and below 1")


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: base and, optionally, a scaling that does not depend on the length."""

    theta: float = 10_000.0
    """Base of the inverse frequencies theta ** (-2i / head_dim)."""
    scaling: str = "default"
    """`default`, `linear` (all frequencies over factor) or `llama3` (low frequencies over factor, a ramp between)."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original_max_position / low_freq_factor are fully scaled."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original_max_position / high_freq_factor are left alone."""
    original_max_position: int = 8192

    def __post_init__(self) -> None:
        if self.scaling not in ("default", "linear", "llama3"):
            raise AlulaError(
                f"rope_type is {self.scaling!r}: alula reads 'default', 'linear' and 'llama3', since scaling that "
                "depends on the length would change tokens already computed"
            )
        for name in ("theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 < value < math.inf:
                raise AlulaError(f"rope {name} is {value!r}: give a number above 0")
        if self.scaling == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise AlulaError(
                f"rope high_freq_factor is {self.high_freq_factor}: give more than low_freq_factor "
                f"({self.low_freq_factor})"
            )


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only transformer by flags. Raises AlulaError for sizes that do not fit together."""

    family: str
    """Where the flags came from: llama, mistral, qwen2, qwen3 or gemma3_text."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    """Context limit: the number of positions the model was made for."""
    norm_eps: float = 1e-6
    activation: str = "silu"
    """`silu` or `gelu_tanh`, on the gate half of the MLP."""
    rope: Rope = Rope()
    local_rope: Rope | None = None
    """RoPE of the layers with a sliding window, where it differs (Gemma 3)."""
    windows: tuple[int, ...] = ()
    """Per layer, how many keys a row sees, itself included; 0 is all. Empty means 0 everywhere."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm of each query and key head before RoPE."""
    norm_offset: bool = False
    """Norm weights are stored as w - 1 (Gemma)."""
    sandwich_norms: bool = False
    """A norm after attention and after the MLP too, before the residual is added (Gemma)."""
    embedding_scale: float = 1.0
    attention_scale: float = 0.0
    """Factor on the scores; 0 means head_dim ** -0.5."""
    attention_softcap: float = 0.0
    final_softcap: float = 0.0
    tied_head: bool = False
    """The LM head is the embedding matrix."""
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_model(self)

    @property
    def scale(self) -> float:
        return self.attention_scale or float(self.head_dim) ** -0.5

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    def layer_rope(self, layer: int) -> Rope:
        return self.local_rope if self.local_rope and self.window(layer) else self.rope


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position_embeddings",
)


def _check_model(config: ModelConfig) -> None:
    for name in _SIZES:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise AlulaError(f"{name} is {value!r}: give a whole number of at least 1")
    for field in fields(config):
        if field.type == "bool" and not isinstance(getattr(config, field.name), bool):
            raise AlulaError(f"{field.name} is {getattr(config, field.name)!r}: give true or false")
    for name in ("norm_eps", "embedding_scale", "attention_scale", "attention_softcap", "final_softcap"):
        value = getattr(config, name)
        if not _is_number(value) or not 0 <= value < math.inf:
            raise AlulaError(f"{name} is {value!r}: give a number of at least 0")
    if config.num_heads % config.num_kv_heads:
        raise AlulaError(
            f"num_kv_heads is {config.num_kv_heads}, which does not divide num_heads {config.num_heads}: "
            "correct one of them"
        )
    if config.head_dim % 2:
        raise AlulaError(f"head_dim is {config.head_dim}: RoPE turns pairs, so give an even number")
    if config.activation not in ("silu", "gelu_tanh"):
        raise AlulaError(f"activation is {config.activation!r}: alula has 'silu' and 'gelu_tanh'")
    if config.windows and len(config.windows) != config.num_layers:
        raise AlulaError(f"windows has {len(config.windows)} entries: give one per layer ({config.num_layers})")
    if any(isinstance(w, bool) or not isinstance(w, int) or w < 0 for w in config.windows):
        raise AlulaError(f"windows is {config.windows}: give whole numbers of at least 0")
    if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < config.vocab_size for i in config.eos_ids):
        raise AlulaError(f"eos_ids is {config.eos_ids}: give ids below vocab_size {config.vocab_size}")
