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
        hidden = self._decoder.forward(packed.tokens_T, packed.where, self._cache.target_layers, self._taps)
        pairs = list(zip(plan.items, packed.spans, strict=True))
        asked = [span.chunk if _wants_prompt_logits(item) else 0 for item, span in pairs]
        rows = [row for span in packed.spans for row in span.tree]
        rows += [span.start + i for span, count in zip(packed.spans, asked, strict=True) for i in range(count)]
        final_TD = hidden.final_TD
        logits = self._decoder.logits(final_TD if rows == list(range(len(final_TD))) else final_TD[rows])
        tree_rows = sum(span.nodes for span in packed.spans)
        return Scored(
            logits_RV=logits[:tree_rows],
            features=tuple(_span_features(hidden.features_TF, span) for span in packed.spans),
            prompt_logits=tuple(part if len(part) else None for part in torch.split(logits[tree_rows:], asked)),
        )


def _wants_prompt_logits(item: PlanItem) -> bool:
    return item.sequence.params.prompt_logprobs is not None and item.chunk.start < item.sequence.prompt_len


def _span_features(features_TF: torch.Tensor | None, span: Span) -> torch.Tensor | None:
    return None if features_TF is None else features_TF[span.start : span.tree.stop]
