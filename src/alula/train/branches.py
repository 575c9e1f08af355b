"""Draft trees of an EAGLE head in training, grown with the attention of the training-time test."""

from __future__ import annotations

from torch import Tensor

from alula.train.head import ChainHead, Chains, Memory


class HeadBranches:
    """Implements `alula.train.simulate.Branches`: a path is a chain whose later tokens are its own.

    chains: of one text; its starts are the roots' pairs. vocabulary_C: target ids of the draft ids.
    """

    def __init__(self, head: ChainHead, chains: Chains, vocabulary_C: Tensor | None) -> None:
        self.vocabulary_C = vocabulary_C
        self._head, self._memory, self._depth = head, Memory(head, chains), 0
        self._hidden_1FD = self._memory.first()

    def logits(self) -> Tensor:
        """[F, C] at the ends of the paths."""
        return self._head.logits(self._head.readout(self._hidden_1FD[0]))

    def descend(self, origin_F: Tensor, tokens_F: Tensor) -> None:
        """One more step of every path."""
        self._depth += 1
        self._memory.keep(origin_F)
        self._hidden_1FD = self._memory.step(self._hidden_1FD[:, origin_F], self._depth, tokens_F[None])
