"""Medusa heads of random weights, and what they say in plain torch."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn import functional as F

from alula.draft.load import target_provenance
from alula.draft.medusa import MedusaDrafter, MedusaHeads
from alula.draft.medusa_files import MedusaConfig, save_medusa
from alula.draft.policy import TreePolicy
from alula.kernels.protocol import Kernels
from alula.model.load import LoadedModel
from tests.draft.heads import TARGET_HIDDEN, VOCAB, lm_head_weight, target_parts

CONFIG = MedusaConfig(heads=3, layers=2, hidden_size=TARGET_HIDDEN, vocab_size=VOCAB)


def random_weights(config: MedusaConfig = CONFIG, *, own: bool = False) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    width, weights = config.hidden_size, {}
    for head in range(config.heads):
        for layer in range(config.layers):
            weights[f"{head}.{layer}.linear.weight"] = torch.randn(width, width, generator=generator) / width**0.5
            weights[f"{head}.{layer}.linear.bias"] = torch.randn(width, generator=generator)
        if own:
            weights[f"{head}.{config.layers}.weight"] = torch.randn(config.vocab_size, width, generator=generator)
    return weights


def make_medusa(policy: TreePolicy | None = None, kernels: Kernels | None = None) -> MedusaDrafter:
    parts = target_parts(kernels)
    heads = MedusaHeads(CONFIG, random_weights(), parts.logits, parts.kernels)
    return MedusaDrafter(heads, policy or TreePolicy(), parts.kernels, VOCAB)


def dense_logits(feature_D: torch.Tensor, head: int) -> torch.Tensor:
    """[V]"""
    weights, state_D = random_weights(), feature_D
    for layer in range(CONFIG.layers):
        name = f"{head}.{layer}.linear"
        state_D = state_D + F.silu(weights[f"{name}.weight"] @ state_D + weights[f"{name}.bias"])
    return lm_head_weight() @ state_D


def save_random_medusa(folder: Path, target: LoadedModel) -> Path:
    """Heads for that target on disk, with provenance."""
    config = MedusaConfig(3, 1, target.config.hidden_size, target.config.vocab_size)
    save_medusa(folder, config, random_weights(config), {"target": target_provenance(target)})
    return folder
