"""A smaller language model with the same tokenizer as drafter (Leviathan et al., arXiv 2211.17192).

It reads tokens, not features, and keeps all of its layers in the target's page table.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from alula.cache import KVLayer, KVShape
from alula.model.decoder import Decoder
from alula.tree import AttentionInput


class LanguageModel:
    """A decoder as draft model; its state is its LM-head input.

    target_vocab: size of the target's vocabulary. Padded vocabularies of one tokenizer may differ in size: ids
    that only one of the two has are never proposed, and read as its last id.
    """

    def __init__(self, decoder: Decoder, target_vocab: int) -> None:
        self._decoder = decoder
        self._last_id = decoder.config.vocab_size - 1
        self._shared_vocab = min(target_vocab, decoder.config.vocab_size)
        self.vocabulary_C = torch.arange(self._shared_vocab) if self._shared_vocab < target_vocab else None

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        return self._decoder.kv_shapes

    def fuse(self, features_TF: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a language model reads no features")

    def step(
        self,
        tokens_T: torch.Tensor,
        states_TD: torch.Tensor,
        where: AttentionInput,
        layers: Sequence[KVLayer],
        keep: torch.Tensor | None = None,
    ) -> torch.Tensor:
        final_TD = self._decoder.forward(tokens_T.clamp(max=self._last_id), where, layers).final_TD
        return final_TD if keep is None else final_TD[keep]

    def logits(self, states_RD: torch.Tensor) -> torch.Tensor:
        logits_RV = self._decoder.logits(states_RD)
        return logits_RV[:, : self._shared_vocab].contiguous()
