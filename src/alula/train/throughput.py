"""How fast training is, against what the machine's matrix products could do at most."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from alula.config import ModelConfig
from alula.train.batch import make_batch
from alula.train.config import Recipe
from alula.train.data import Conversation
from alula.train.features import FeatureStore
from alula.train.methods.method import Method

_SIZE = 512
"""Of the square matrices that are multiplied: nearly full speed, and many tries even on a busy core."""
_LARGE = 4096
"""Elsewhere than on a CPU: smaller ones do not fill a GPU."""
_SECONDS = 0.5
"""How long the ceiling is looked for."""


@dataclass(frozen=True)
class Throughput:
    """flop_per_token: of one learned token, forward and backward, the target's reading included where features are
    computed on the fly. flop_per_second: the measured ceiling of matrix products in the format of training."""

    flop_per_token: float
    flop_per_second: float

    @property
    def most_tokens_per_second(self) -> float:
        """What the ceiling allows."""
        return self.flop_per_second / self.flop_per_token

    def share(self, tokens_per_second: float) -> float:
        """Of the ceiling."""
        return tokens_per_second / self.most_tokens_per_second

    def sentence(self) -> str:
        """For the user, before the first step."""
        return (
            f"a learned token costs {self.flop_per_token / 1e9:.2f} GFLOP, matrix products run at "
            f"{self.flop_per_second / 1e9:.0f} GFLOP/s: at most {self.most_tokens_per_second:.0f} tokens/s"
        )


def matmul_ceiling(precision: str, device: torch.device | str = "cpu") -> float:
    """FLOP per second of the fastest of several square products in ``fp32`` or ``bf16``, in this process's threads."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    generator = torch.Generator().manual_seed(0)
    size = _SIZE if torch.device(device).type == "cpu" else _LARGE
    a, b = (torch.randn(size, size, generator=generator).to(device, dtype) for _ in range(2))
    best, until = float("inf"), time.perf_counter() + _SECONDS
    while time.perf_counter() < until or best == float("inf"):
        started = time.perf_counter()
        (a @ b)[0, 0].item()
        best = min(best, time.perf_counter() - started)
    return float(2 * size**3 / best)


def measure(
    method: Method, store: FeatureStore, conversations: Sequence[Conversation], recipe: Recipe, target: ModelConfig
) -> Throughput:
    """Of losses and gradients on the first conversations, which change nothing: counting takes other paths through
    torch, whose last bits differ, so no step of the training itself is counted. Without the optimiser's products."""
    from torch.utils.flop_counter import FlopCounterMode

    chosen, read = _first(conversations, recipe.tokens_per_batch), store.computed_tokens
    batch = make_batch(chosen, store.get(chosen))
    with FlopCounterMode(display=False) as counter:
        losses = method.losses(batch, torch.Generator().manual_seed(0))
        torch.autograd.backward(torch.stack([loss.value * loss.weight for loss in losses]).sum())
    method.module.zero_grad(set_to_none=True)
    # The target's kernels are not torch's: its reading is reckoned from its sizes.
    flop = counter.get_total_flops() + (store.computed_tokens - read) * reading_flop(target)
    return Throughput(flop / len(batch.token_M), matmul_ceiling(recipe.precision, batch.token_M.device))


def _first(conversations: Sequence[Conversation], tokens: int) -> list[Conversation]:
    """So many that they have about so many learned tokens."""
    chosen: list[Conversation] = []
    for conversation in conversations:
        if chosen and sum(len(c.learned) for c in chosen) + len(conversation.learned) > tokens:
            break
        chosen.append(conversation)
    return chosen


def reading_flop(config: ModelConfig) -> float:
    """FLOP with which the target reads one token of a text: two per weight of every layer, without attention."""
    width = config.hidden_size
    attention = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim * width
    return float(2 * config.num_layers * (attention + 3 * width * config.intermediate_size))
