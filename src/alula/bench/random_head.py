"""An EAGLE-3 head of random weights: the worst drafter there is, which must not change the text either."""

from __future__ import annotations

import torch

from alula.config import ModelConfig
from alula.draft.dialects import HeadFiles
from alula.draft.head_config import HeadConfig, default_taps
from alula.draft.head_tensors import expected_shapes

DRAFT_VOCABULARY = 8192


def random_head(target: ModelConfig, *, seed: int = 0) -> HeadFiles:
    """A head in the target's own sizes, over a random part of its vocabulary, in fp32."""
    config = _config(target)
    generator = torch.Generator().manual_seed(seed)
    shapes = expected_shapes(config, len(default_taps(target.num_layers)))
    weights = {name: _weight(name, shape, generator) for name, shape in shapes.items()}
    if config.draft_vocab_size < config.vocab_size:
        chosen = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size].sort().values
        weights["d2t"] = chosen - torch.arange(config.draft_vocab_size)
    return HeadFiles(config, weights, provenance=None)


def _config(target: ModelConfig) -> HeadConfig:
    return HeadConfig(
        kind="eagle3",
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_attention_heads=target.num_heads,
        num_key_value_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        rms_norm_eps=target.norm_eps,
        vocab_size=target.vocab_size,
        draft_vocab_size=min(target.vocab_size, DRAFT_VOCABULARY),
        target_hidden_size=target.hidden_size,
    )


def _weight(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape)
    return torch.randn(shape, generator=generator).mul_(float(shape[1]) ** -0.5)
