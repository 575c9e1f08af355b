"""What training needs from the target for each conversation, computed whenever it is asked for.

`alula.train.shards` keeps it on disk instead. Shapes: n tokens of a conversation, M learned tokens, F = taps x
hidden, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from alula.train.data import Conversation


class FeatureTarget(Protocol):
    """The frozen target, as far as training needs it; all its tensors are on one device, where training happens."""

    embedding_VD: Tensor
    """Input embedding."""
    lm_head_VD: Tensor
    """Output embedding."""
    norm_D: Tensor
    """Weight of the final norm."""

    def states(self, tokens: Sequence[Sequence[int]], taps: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Per text: inputs of the tapped layers [n, F] side by side, and the LM head's inputs [n, D]."""
        ...


@dataclass(frozen=True)
class Features:
    """Of one conversation, in the serving dtype."""

    taps_nF: Tensor
    """Features of all tokens."""
    hidden_MD: Tensor
    """LM-head input from which the target predicts each learned token (one token before it)."""
    choice_M: Tensor
    """int64: the target's most likely token there, over the whole vocabulary."""


def compute_features(
    target: FeatureTarget, conversations: Sequence[Conversation], *, taps: Sequence[int], dtype: torch.dtype
) -> list[Features]:
    """One target forward over a few conversations."""
    with torch.inference_mode():
        states = target.states([c.tokens for c in conversations], taps)
        results = []
        for conversation, (taps_nF, hidden_nD) in zip(conversations, states, strict=True):
            hidden_MD = hidden_nD[torch.tensor(conversation.learned, device=hidden_nD.device) - 1]
            choice_M = (hidden_MD @ target.lm_head_VD.T).argmax(-1)
            results.append(Features(taps_nF.to(dtype), hidden_MD.to(dtype), choice_M))
    return results


class FeatureStore:
    """Features by conversation.

    computed_tokens: how many tokens the target has read so far, for the accounts of throughput.
    """

    def __init__(self, target: FeatureTarget, *, taps: Sequence[int], dtype: torch.dtype) -> None:
        self.target, self.taps, self.dtype = target, tuple(taps), dtype
        self.computed_tokens = 0

    def prepare(self, conversations: Sequence[Conversation], say: Callable[[str], None]) -> None:
        """Whatever can be done once, before ``get`` is asked for these; ``say`` is told of it."""

    def get(self, conversations: Sequence[Conversation]) -> list[Features]:
        """Features of the conversations, in order."""
        return self.compute(conversations)

    def compute(self, conversations: Sequence[Conversation]) -> list[Features]:
        """By the target, in forwards of a limited size."""
        self.computed_tokens += sum(len(c.tokens) for c in conversations)
        return [
            features
            for group in forwards(conversations)
            for features in compute_features(self.target, group, taps=self.taps, dtype=self.dtype)
        ]


FORWARD_TOKENS = 4096
"""Tokens of one target forward, padding of the keys included."""


def forwards(conversations: Sequence[Conversation]) -> list[list[Conversation]]:
    """Runs of conversations that fit one forward; every text takes as much room as the longest beside it."""
    groups: list[list[Conversation]] = []
    longest = 0
    for conversation in conversations:
        longest = max(longest, len(conversation.tokens))
        if not groups or longest * (len(groups[-1]) + 1) > FORWARD_TOKENS:
            groups.append([])
            longest = len(conversation.tokens)
        groups[-1].append(conversation)
    return groups
