"""The one target forward of a step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from alula.cache import PagedCache, Transaction
from alula.engine.batch import Packed, Span, pack
from alula.model.decoder import Decoder
from alula.sequence import PlanItem, StepPlan
from alula.tree import DraftTree


@dataclass(frozen=True)
class Scored:
    """What one target forward computed.

    logits_RV: fp32, one row per tree node, trees in plan order.
    features: per plan item [chunk + nodes, F], or None when the drafter taps nothing.
    prompt_logits: per plan item, fp32 [chunk, V] where prompt logprobs were asked for.
    """

    logits_RV: torch.Tensor
    features: tuple[torch.Tensor | None, ...]
    prompt_logits: tuple[torch.Tensor | None, ...]


class Runner:
    """Runs the target over packed rows of the paged cache; `taps` are the features its drafter wants."""

    def __init__(self, decoder: Decoder, cache: PagedCache, taps: tuple[int, ...]) -> None:
        self._decoder = decoder
        self._cache = cache
        self._taps = taps

    def pack(self, plan: StepPlan, trees: Seq[DraftTree | None], txn: Transaction) -> Packed:
        return pack(plan, trees, txn, self._cache.page_size, self._decoder.device)

    def forward(self, plan: StepPlan, packed: Packed) -> Scored:
        spans = packed.spans
        hidden = self._decoder.forward(packed.tokens_T, packed.where, self._cache.target_layers, self._taps)
        asked = [span.chunk if _wants_prompt_logits(item) else 0 for item, span in zip(plan.items, spans, strict=True)]
        features = tuple(_span_features(hidden.features_TF, span) for span in spans)
        if not any(asked):
            nothing = (None,) * len(spans)
            return Scored(self._decoder.logits(_tree_rows(hidden.final_TD, spans)), features, nothing)
        prompts = [row for span, count in zip(spans, asked, strict=True) for row in span.rows[:count]]
        nodes = [row for span in spans for row in span.tree]
        logits_RV = self._decoder.logits(hidden.final_TD[nodes + prompts])
        parts = torch.split(logits_RV[len(nodes) :], asked)
        return Scored(logits_RV[: len(nodes)], features, tuple(part if len(part) else None for part in parts))


def _tree_rows(final_TD: torch.Tensor, spans: Seq[Span]) -> torch.Tensor:
    """The rows of nodes; no copy where there are no others."""
    if not any(span.chunk for span in spans):
        return final_TD
    return final_TD[[row for span in spans for row in span.tree]]


def _wants_prompt_logits(item: PlanItem) -> bool:
    return item.sequence.params.prompt_logprobs is not None and item.chunk.start < item.sequence.prompt_len


def _span_features(features_TF: torch.Tensor | None, span: Span) -> torch.Tensor | None:
    if features_TF is None or features_TF.shape[0] == len(span.rows):
        return features_TF
    return features_TF[span.rows.start : span.rows.stop]
