"""From states to proposals on held-out texts.

Shapes: R rows that have a target at one step, K proposals of a row, D hidden, C draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from alula.train.batch import Batch
from alula.train.head import ChainHead, Chains, unroll
from alula.train.methods.method import Guesses

_BLOCK = 1024
"""Rows whose logits exist at one time."""


def best_tokens(
    logits: Callable[[Tensor], Tensor], hidden_RD: Tensor, width: int, vocabulary_C: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(target ids [R, K], their log probabilities) of LM-head inputs, the likeliest first.

    vocabulary_C: the target id of each draft id, None where they are the same.
    """
    best = [logits(part).log_softmax(-1).topk(width) for part in torch.split(hidden_RD, _BLOCK)]
    columns_RK = torch.cat([part.indices for part in best])
    tokens_RK = columns_RK if vocabulary_C is None else vocabulary_C[columns_RK]
    return tokens_RK, torch.cat([part.values for part in best])


def head_guesses(
    head: ChainHead, batch: Batch, chains: Chains, vocabulary_C: Tensor | None, *, steps: int, width: int
) -> Iterator[Guesses]:
    """Of a head that lives on its own states after step 0. chains: the batch's, as this head reads them."""
    for step, result in enumerate(unroll(head, chains, steps=steps)):
        flat_R, index_R = batch.rows(step, result.columns_A)
        hidden_RD = head.readout(result.hidden_BAD.flatten(0, 1)[flat_R])
        yield Guesses(flat_R, index_R, *best_tokens(head.logits, hidden_RD, width, vocabulary_C))
