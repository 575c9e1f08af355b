"""Small heads of random weights, of every kind and flag."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from alula.draft.build import TargetParts, build_head
from alula.draft.dialects import HeadFiles, save_official
from alula.draft.head_config import HeadConfig, default_taps
from alula.draft.head_tensors import expected_shapes
from alula.draft.load import target_provenance
from alula.draft.neural import NeuralDrafter
from alula.draft.policy import TreePolicy
from alula.kernels.protocol import Kernels
from alula.kernels.select import load_kernels
from alula.model.load import LoadedModel

VOCAB = 61
LAYERS = 12
TARGET_HIDDEN = 32


def head_config(kind: str = "eagle3", **changes: Any) -> HeadConfig:
    base = HeadConfig(
        kind=kind,  # type: ignore[arg-type]
        hidden_size=TARGET_HIDDEN,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB if kind == "eagle1" else 40,
        target_hidden_size=TARGET_HIDDEN,
    )
    return replace(base, **changes)


def random_weights(config: HeadConfig, *, seed: int = 0, fc_bias: bool = False) -> dict[str, torch.Tensor]:
    """Spread widely enough that the best children differ from row to row."""
    generator = torch.Generator().manual_seed(seed)
    taps = 1 if config.kind == "eagle1" else len(config.taps or (0, 0, 0))
    shapes = expected_shapes(config, taps)
    if fc_bias:
        shapes["fc.bias"] = (config.hidden_size,)
    if config.hidden_size != config.target_hidden_size:
        shapes["embed_tokens.weight"] = (config.vocab_size, config.hidden_size)
    weights = {}
    for name, shape in shapes.items():
        spread = torch.randn(shape, generator=generator)
        weights[name] = 1 + 0.3 * spread if "norm" in name else spread * (2 / shape[-1] ** 0.5)
    if config.draft_vocab_size < config.vocab_size:
        chosen = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size].sort().values
        weights["d2t"] = chosen - torch.arange(config.draft_vocab_size)
        weights["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
        weights["t2d"][chosen] = True
    return weights


def target_parts(
    kernels: Kernels | None = None, *, seed: int = 7, positions: int = 256, dtype: torch.dtype = torch.float32
) -> TargetParts:
    """What a target would share: a random embedding and LM head."""
    generator = torch.Generator().manual_seed(seed)
    kernels = kernels or load_kernels("torch")
    embedding_VD = torch.randn(VOCAB, TARGET_HIDDEN, generator=generator).to(dtype)
    lm_head = kernels.prepare_linear(lm_head_weight().to(dtype), out_dtype=torch.float32)
    return TargetParts(embedding_VD, lambda x_RD: kernels.linear(x_RD, lm_head), LAYERS, positions, kernels)


def lm_head_weight() -> torch.Tensor:
    return torch.randn(VOCAB, TARGET_HIDDEN, generator=torch.Generator().manual_seed(8)) * 0.3


def random_features(config: HeadConfig, count: int, *, seed: int = 3) -> torch.Tensor:
    width = config.target_hidden_size * len(config.tap_layers(LAYERS))
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def random_tokens(count: int, *, seed: int = 5) -> list[int]:
    tokens: list[int] = torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return tokens


def make_drafter(
    config: HeadConfig | None = None,
    *,
    policy: TreePolicy | None = None,
    kernels: Kernels | None = None,
    seed: int = 0,
    positions: int = 256,
) -> NeuralDrafter:
    config = config or head_config()
    weights = random_weights(config, seed=seed)
    weights.pop("t2d", None)
    parts = target_parts(kernels, positions=positions)
    return build_head(HeadFiles(config, weights, None), parts, policy or TreePolicy())


def save_random_head(folder: Path, target: LoadedModel, *, seed: int = 0, kind: str = "eagle3") -> Path:
    """A head for that target on disk, in the official layout, with provenance."""
    sizes = target.config
    config = head_config(
        kind,
        hidden_size=sizes.hidden_size,
        target_hidden_size=sizes.hidden_size,
        vocab_size=sizes.vocab_size,
        draft_vocab_size=sizes.vocab_size if kind == "eagle1" else sizes.vocab_size // 2,
        head_dim=sizes.head_dim,
        taps=None if kind == "eagle1" else default_taps(sizes.num_layers),
    )
    save_official(folder, config, random_weights(config, seed=seed), {"target": target_provenance(target)})
    return folder
