"""Log probabilities as they are reported: raw ones of the model's logits, or processed ones of the final distribution.

Shape suffixes: N rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from alula.sampling.distribution import probabilities, row_mass
from alula.sequence import SamplingParams, TokenLogprobs
from alula.tree import FloatArray, IntArray

if TYPE_CHECKING:
    import torch


def most_likely(row_V: FloatArray, count: int) -> IntArray:
    """The `count` best ids that are not masked, by (logit descending, id ascending)."""
    count = min(count, len(row_V))
    if count == 0:
        return np.zeros(0, np.int64)
    least = np.partition(row_V, len(row_V) - count)[len(row_V) - count]
    ids = np.flatnonzero((row_V >= least) & (row_V > -np.inf))
    best: IntArray = ids[np.argsort(-row_V[ids], kind="stable")][:count]
    return best


def raw_logprobs(row_V: FloatArray, token: int, count: int) -> TokenLogprobs:
    """log-softmax of the model's own logits: before masks, penalties, temperature and cuts (as OpenAI reports)."""
    offset = float(row_V.max()) + math.log(row_mass(row_V))
    return _report(row_V, token, count, lambda id_: float(row_V[id_]) - offset)


def processed_logprobs(row_V: FloatArray, params: SamplingParams, token: int, count: int) -> TokenLogprobs:
    """Of the distribution the token was drawn from, given shaped logits; ids that were cut are not listed.

    A greedy request has no temperature: it reports the log-softmax of its shaped logits.
    """
    if params.is_greedy:
        return raw_logprobs(row_V, token, count)
    target_V = probabilities(row_V[None], [params])[0]
    is_rounded = params.top_p < 1.0 or params.min_p > 0.0  # where kernels may keep a token more, see `choose`
    if is_rounded and target_V[token] == 0.0:
        best = int(row_V.argmax())
        target_V[token] = target_V[best] * math.exp((float(row_V[token]) - float(row_V[best])) / params.temperature)
        target_V /= target_V.sum()
    order_V = np.where(target_V > 0, row_V, np.float32(-np.inf))
    return _report(order_V, token, count, lambda id_: math.log(target_V[id_]) if target_V[id_] > 0 else -math.inf)


def prompt_logprobs(logits_NV: torch.Tensor, tokens_N: Sequence[int], count: int) -> list[TokenLogprobs]:
    """Raw log probabilities of prompt tokens; row i of the logits is the one that predicts tokens_N[i]."""
    import torch

    rows_NV = logits_NV.detach().to("cpu", torch.float32).contiguous().numpy()
    return [raw_logprobs(row_V, token, count) for row_V, token in zip(rows_NV, tokens_N, strict=True)]


def _report(row_V: FloatArray, token: int, count: int, logprob: Callable[[int], float]) -> TokenLogprobs:
    own = row_V[token]
    rank = 1 + int(np.count_nonzero(row_V > own)) + int(np.count_nonzero(row_V[:token] == own))
    top = tuple((int(id_), logprob(int(id_))) for id_ in most_likely(row_V, count))
    return TokenLogprobs(token, logprob(token), rank, top)
