"""The oracle: every token from a forward over the whole prefix, in a cache made for it and thrown away.

It shares the model, its kernels and the rule with the engine, and nothing else: no pages, no prefix, no tree.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from alula.bench.prove import Difference
from alula.cache import KVLayer
from alula.draft.drafter import NoDrafter
from alula.model.load import LoadedModel
from alula.sequence import PlanItem, SamplingParams, Sequence, StepPlan
from alula.tree import ROOT_ONLY, AttentionInput, DraftTree
from alula.verify import load_rule


class Oracle:
    """Chooses tokens the dear way; parameters must have their seed."""

    def __init__(self, model: LoadedModel, params: SamplingParams) -> None:
        self._model = model
        self._params = params
        self._verify = load_rule("coupled", NoDrafter(), model.kernels)

    def check(self, index: int, prompt: Seq[int], output: Seq[int]) -> Difference | None:
        """The first token of `output` that the oracle would not have chosen there, or None."""
        for place, token in enumerate(output):
            chosen = self.choose(len(prompt), [*prompt, *output[:place]])
            if chosen != token:
                return Difference(index, place, token, chosen)
        return None

    def choose(self, prompt_len: int, tokens: list[int]) -> int:
        """The token after `tokens`."""
        with torch.inference_mode():
            logits_1V = self._logits(tokens)
            sequence = self._sequence(prompt_len, tokens)
            root = sequence.root_position
            plan = StepPlan((PlanItem(sequence, range(root, root), ROOT_ONLY),))
            verdict = self._verify(logits_1V, [DraftTree.root_only(tokens[-1])], plan)[0]
        assert verdict is not None
        return verdict.tokens[0]

    def _logits(self, tokens: list[int]) -> torch.Tensor:
        decoder, device, count = self._model.decoder, self._model.device, len(tokens)
        layers = tuple(KVLayer.zeros(shape, count, self._model.dtype, device) for shape in decoder.kv_shapes)
        rows = torch.tensor(tokens, dtype=torch.int64, device=device)
        hidden = decoder.forward(rows, _straight(count, device), layers, ())
        return decoder.logits(hidden.final_TD[-1:])

    def _sequence(self, prompt_len: int, tokens: list[int]) -> Sequence:
        params, model = self._params, self._model
        assert params.seed is not None
        return Sequence(
            id=0,
            prompt_len=prompt_len,
            tokens=tokens,
            params=params,
            seed=params.seed,
            eos_ids=frozenset(model.eos_ids),
            bad_words=model.tokenizer.bad_words(params.bad_words),
        )


def _straight(count: int, device: torch.device | str) -> AttentionInput:
    """One page of `count` slots; row t reads keys 0 .. t."""
    places = torch.arange(count, device=device)
    nothing = torch.zeros(count, dtype=torch.int32, device=device)
    return AttentionInput(
        positions_T=places,
        slots_T=places.clone(),
        sequence_T=nothing,
        page_table_BP=torch.zeros(1, 1, dtype=torch.int32, device=device),
        prefix_T=(places + 1).to(torch.int32),
        tail_TE=torch.zeros(count, 1, dtype=torch.int32, device=device),
        tail_len_T=nothing.clone(),
        first_T=nothing.clone(),
        page_size=count,
    )
