"""A tiny made-up target and data for the training tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from alula.train.batch import Batch, make_batch
from alula.train.data import Conversation
from alula.train.features import FeatureStore
from alula.train.head import Eagle3Head, HeadConfig
from alula.train.methods.eagle3 import Eagle3Method
from alula.train.methods.options import Eagle3Options
from alula.train.vocabulary import DraftVocabulary

VOCAB, HIDDEN, DRAFT = 40, 16, 24
SIZES = HeadConfig(
    hidden_size=HIDDEN,
    intermediate_size=24,
    heads=4,
    kv_heads=2,
    head_dim=8,
    vocab_size=VOCAB,
    draft_vocab_size=DRAFT,
    taps=(1, 2, 3),
)


class FakeTarget:
    """States depend on the last two tokens, so there is something to learn."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.embedding_VD = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.lm_head_VD = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.norm_D = torch.rand(HIDDEN, generator=generator) + 0.5
        self._mix = torch.randn(4, HIDDEN, HIDDEN, generator=generator) / HIDDEN**0.5
        self.calls = 0

    def states(self, tokens: Sequence[Sequence[int]], taps: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        self.calls += len(tokens)
        return [self._states(torch.tensor(text)) for text in tokens]

    def _states(self, tokens_n: Tensor) -> tuple[Tensor, Tensor]:
        now = self.embedding_VD[tokens_n]
        before = torch.cat([torch.zeros(1, HIDDEN), now[:-1]])
        taps = torch.cat([(now + 0.5 * before) @ self._mix[i] * (i + 1) for i in range(3)], -1)
        return taps, (now @ self._mix[3] + 0.3 * before) * self.norm_D


def conversations(count: int, *, seed: int = 1) -> list[Conversation]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        prompt, answer = torch.randint(3, 8, (2,), generator=generator).tolist()
        tokens = torch.randint(0, VOCAB, (prompt + answer,), generator=generator).tolist()
        made.append(Conversation(tuple(tokens), (False,) * prompt + (True,) * answer))
    return made


def vocabulary() -> DraftVocabulary:
    return DraftVocabulary(torch.arange(DRAFT) + 5, VOCAB)


def random_head(target: FakeTarget) -> Eagle3Head:
    torch.manual_seed(3)
    head = Eagle3Head(SIZES, target.embedding_VD)
    with torch.no_grad():
        for norm in (head.norm, head.midlayer.hidden_norm, head.midlayer.input_layernorm):
            norm.weight.uniform_(0.5, 1.5)
    return head


def eagle3(target: FakeTarget, options: Eagle3Options | None = None) -> Eagle3Method:
    return Eagle3Method(options or Eagle3Options(), random_head(target), vocabulary(), target)


def store(target: FakeTarget) -> FeatureStore:
    return FeatureStore(target, taps=SIZES.taps, dtype=torch.float32)


def batch(target: FakeTarget, chosen: Sequence[Conversation]) -> Batch:
    return make_batch(chosen, store(target).get(chosen))
