"""The draft vocabulary: the most frequent tokens of the answers, as official EAGLE-3 heads store it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from alula.config import AlulaError
from alula.train.data import Conversation


@dataclass(frozen=True)
class DraftVocabulary:
    """C draft ids and the target ids they stand for, ascending."""

    target_ids_C: Tensor
    """int64, strictly ascending, on the CPU."""
    vocab_size: int
    """V, the target's."""

    @property
    def size(self) -> int:
        """C."""
        return len(self.target_ids_C)

    def d2t(self) -> Tensor:
        """int64 [C]: the offset from a draft id to its target id."""
        return self.target_ids_C - torch.arange(self.size)

    def t2d(self) -> Tensor:
        """bool [V]: whether a target id is in the draft vocabulary."""
        known_V = torch.zeros(self.vocab_size, dtype=torch.bool)
        known_V[self.target_ids_C] = True
        return known_V

    def draft_ids(self) -> Tensor:
        """int64 [V]: the draft id of each target id, -1 where there is none."""
        ids_V = torch.full((self.vocab_size,), -1)
        ids_V[self.target_ids_C] = torch.arange(self.size)
        return ids_V

    def coverage(self, conversations: Iterable[Conversation]) -> float:
        """Share of the masked tokens that are in the vocabulary."""
        known = set(self.target_ids_C.tolist())
        total = covered = 0
        for conversation in conversations:
            learned = [conversation.tokens[m] for m in conversation.learned]
            total += len(learned)
            covered += sum(token in known for token in learned)
        return covered / total if total else 0.0


def vocabulary_from_d2t(d2t_C: Tensor, vocab_size: int) -> DraftVocabulary:
    """The vocabulary that a head's ``d2t`` offsets describe."""
    return DraftVocabulary(d2t_C.long() + torch.arange(len(d2t_C)), vocab_size)


def expected_counts(hidden: Iterable[Tensor], lm_head_VD: Tensor) -> Tensor:
    """How often the target would have said each token [V]: its probabilities summed over the answers' states [M, D].

    Counting probabilities instead of the tokens that happened to be drawn knows tokens that were never drawn.
    """
    total_V = torch.zeros(len(lm_head_VD), device=lm_head_VD.device)
    with torch.inference_mode():
        for hidden_MD in hidden:
            total_V += (hidden_MD.float() @ lm_head_VD.float().T).softmax(-1).sum(0)
    return total_V


def choose_vocabulary(
    conversations: Iterable[Conversation], *, size: int, vocab_size: int, expected_V: Tensor | None = None
) -> DraftVocabulary:
    """The ``size`` most frequent tokens: counts of the answers plus ``expected_V``; ties go to the lowest ids.

    Byte-pair ids ascend with the order of the merges, so among tokens never seen the lowest are the likeliest.
    """
    if not 0 < size <= vocab_size:
        raise AlulaError(f"draft_vocab_size must be between 1 and {vocab_size}, not {size}")
    counts_V = torch.zeros(vocab_size, dtype=torch.float64)
    for conversation in conversations:
        tokens = torch.tensor([conversation.tokens[m] for m in conversation.learned])
        counts_V += torch.bincount(tokens, minlength=vocab_size)
    if expected_V is not None:
        counts_V += expected_V.cpu()
    ranked_V = counts_V.sort(descending=True, stable=True).indices
    return DraftVocabulary(ranked_V[:size].sort().values, vocab_size)
