"""Conversations and their features, packed into the tensors of one training step.

Shapes: B texts, S entries of a text, A chains of a text, M learned tokens of the batch, R rows of one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from alula.train.data import Conversation
from alula.train.features import Features
from alula.train.head import Chains


@dataclass(frozen=True)
class Batch:
    """One training step's input. Chain a of text b predicts, at step i, token ``starts_BA + 2 + i``."""

    chains: Chains
    texts_BX: Tensor
    """int64: all tokens, padded with 0."""
    valid_BA: Tensor
    """bool: False where ``starts_BA`` is padding."""
    learned_BX: Tensor
    """int64: for each token of each text its index among the M learned ones, -1 if it is not one."""
    hidden_MD: Tensor
    """fp32: LM-head input before each learned token."""
    choice_M: Tensor
    """int64: the target's most likely token there."""
    token_M: Tensor
    """int64: the token of the text there."""

    def rows(self, step: int, columns_A: Tensor) -> tuple[Tensor, Tensor]:
        """(flat positions [R] in [B, A'], learned index [R]) of the step's predictions that have a target."""
        predicted_BA = self.chains.starts_BA[:, columns_A] + 2 + step
        inside_BA = predicted_BA < self.learned_BX.shape[1]
        index_BA = self.learned_BX.gather(1, predicted_BA.clamp(max=self.learned_BX.shape[1] - 1))
        usable_BA = self.valid_BA[:, columns_A] & inside_BA & (index_BA >= 0)
        flat_R = usable_BA.reshape(-1).nonzero()[:, 0]
        return flat_R, index_BA.reshape(-1)[flat_R]


def make_batch(conversations: Sequence[Conversation], features: Sequence[Features]) -> Batch:
    """Pad and pack, on the device of the features.

    Entry p of a text is the pair (f_p, t_{p+1}), so a text of n tokens has n - 1 entries.
    """
    texts = len(conversations)
    longest = max(len(c.tokens) for c in conversations)
    chains = max(len(c.learned) for c in conversations)
    place = features[0].taps_nF.device
    texts_BX = torch.zeros(texts, longest, dtype=torch.long)
    features_BSF = torch.zeros(texts, longest - 1, features[0].taps_nF.shape[1], device=place)
    starts_BA = torch.zeros(texts, chains, dtype=torch.long)
    valid_BA = torch.zeros(texts, chains, dtype=torch.bool)
    learned_BX = torch.full((texts, longest), -1)
    total = 0
    for b, (conversation, known) in enumerate(zip(conversations, features, strict=True)):
        entries, learned = len(conversation.tokens) - 1, torch.tensor(conversation.learned)
        texts_BX[b, : entries + 1] = torch.tensor(conversation.tokens)
        features_BSF[b, :entries] = known.taps_nF[:-1]
        starts_BA[b, : len(learned)] = learned - 2
        valid_BA[b, : len(learned)] = True
        learned_BX[b, learned] = torch.arange(total, total + len(learned))
        total += len(learned)
    texts_BX = texts_BX.to(place)
    return Batch(
        Chains(texts_BX[:, 1:], features_BSF, starts_BA.to(place)),
        texts_BX,
        valid_BA.to(place),
        learned_BX.to(place),
        torch.cat([known.hidden_MD for known in features]).float(),
        torch.cat([known.choice_M for known in features]),
        torch.tensor([c.tokens[m] for c in conversations for m in c.learned], device=place),
    )
