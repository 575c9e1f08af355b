"""What training needs from the target for each conversation, computed on the fly or stored once.

Shapes: n tokens of a conversation, M learned tokens, F = taps x hidden, D hidden.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from alula.train.data import Conversation


class FeatureTarget(Protocol):
    """The frozen target, as far as training needs it."""

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
    """Of one conversation, stored in the serving dtype."""

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
            hidden_MD = hidden_nD[torch.tensor(conversation.learned) - 1]
            choice_M = (hidden_MD @ target.lm_head_VD.T).argmax(-1)
            results.append(Features(taps_nF.to(dtype), hidden_MD.to(dtype), choice_M))
    return results


class FeatureStore:
    """Features by conversation; with a directory, each is computed once and read from there afterwards."""

    def __init__(
        self, target: FeatureTarget, *, taps: Sequence[int], dtype: torch.dtype, directory: Path | None = None
    ) -> None:
        self.target, self.taps, self.dtype, self.directory = target, tuple(taps), dtype, directory
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)

    def get(self, conversations: Sequence[Conversation]) -> list[Features]:
        """Features of the conversations, in order."""
        found = {c.key: features for c in conversations if (features := self._read(c)) is not None}
        missing = [c for c in conversations if c.key not in found]
        if missing:
            computed = compute_features(self.target, missing, taps=self.taps, dtype=self.dtype)
            for conversation, features in zip(missing, computed, strict=True):
                self._write(conversation, features)
                found[conversation.key] = features
        return [found[c.key] for c in conversations]

    def _path(self, conversation: Conversation) -> Path | None:
        return None if self.directory is None else self.directory / f"{conversation.key}.safetensors"

    def _read(self, conversation: Conversation) -> Features | None:
        path = self._path(conversation)
        if path is None or not path.exists():
            return None
        from safetensors.torch import load_file

        tensors = load_file(path)
        return Features(tensors["taps"], tensors["hidden"], tensors["choice"])

    def _write(self, conversation: Conversation, features: Features) -> None:
        path = self._path(conversation)
        if path is None:
            return
        from safetensors.torch import save_file

        tensors = {"taps": features.taps_nF, "hidden": features.hidden_MD, "choice": features.choice_M}
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, unfinished)
        unfinished.replace(path)
