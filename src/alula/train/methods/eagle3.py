"""EAGLE-3: training-time test, cross-entropy against the target's distribution over the draft vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from alula.draft.head_config import default_taps
from alula.train.batch import Batch, make_batch
from alula.train.branches import HeadBranches
from alula.train.checkpoint import export_head, read_start
from alula.train.data import Conversation
from alula.train.features import FeatureTarget
from alula.train.head import Eagle3Head, HeadConfig, unroll
from alula.train.initial import new_head, tap_sizes
from alula.train.loss import mean_cross_entropy, teacher
from alula.train.methods.guesses import head_guesses
from alula.train.methods.method import SAMPLES, Guesses, Loss, Method, Setting
from alula.train.methods.options import Eagle3Options
from alula.train.simulate import Branches
from alula.train.vocabulary import DraftVocabulary, choose_vocabulary, expected_counts


@dataclass(frozen=True)
class Eagle3Maker:
    """Implements `Maker`."""

    options: Eagle3Options

    def taps(self, layers: int) -> tuple[int, ...]:
        return default_taps(layers)

    def fresh(self, setting: Setting) -> Method:
        store, fitted_on = setting.store, setting.train[:SAMPLES]
        sizes = self._sizes(setting)
        samples = [make_batch([c], store.get([c])) for c in fitted_on]
        expected_V = expected_counts((store.get([c])[0].hidden_MD for c in fitted_on), store.target.lm_head_VD)
        vocabulary = choose_vocabulary(
            setting.train, size=self.options.draft_vocab_size, vocab_size=sizes.vocab_size, expected_V=expected_V
        )
        head = new_head(sizes, store.target, vocabulary, samples, seed=setting.seed)
        return Eagle3Method(self.options, head, vocabulary, store.target)

    def resumed(self, setting: Setting, state: Mapping[str, Any]) -> Method:
        sizes, target = self._sizes(setting), setting.store.target
        vocabulary = DraftVocabulary(state["target_ids"], sizes.vocab_size)
        head = _blank(replace(sizes, draft_vocab_size=vocabulary.size), target)
        return Eagle3Method(self.options, head, vocabulary, target)

    def continued(self, setting: Setting, folder: Path) -> Method:
        """The folder's draft vocabulary is kept, whatever ``draft_vocab_size`` says. Without conversations the taps are
        not scaled, which matters to training only."""
        sizes, store = self._sizes(setting), setting.store
        samples = [make_batch([c], store.get([c])) for c in setting.train[:SAMPLES]]
        scale_F = tap_sizes(samples, sizes) if samples else torch.ones(len(store.taps) * sizes.hidden_size)
        weights, vocabulary = read_start(folder, sizes, scale_F)
        head = _blank(replace(sizes, draft_vocab_size=vocabulary.size), store.target)
        head.load_state_dict(weights)
        return Eagle3Method(self.options, head, vocabulary, store.target)

    def _sizes(self, setting: Setting) -> HeadConfig:
        sizes = setting.model.config
        return HeadConfig(
            hidden_size=sizes.hidden_size,
            intermediate_size=self.options.intermediate_size or sizes.intermediate_size,
            heads=sizes.num_heads,
            kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            vocab_size=sizes.vocab_size,
            draft_vocab_size=self.options.draft_vocab_size,
            taps=setting.store.taps,
            rope_theta=self.options.rope_theta,
            rms_norm_eps=sizes.norm_eps,
            fc_norm=self.options.fc_norm,
            norm_output=self.options.norm_output,
        )


def _blank(sizes: HeadConfig, target: FeatureTarget) -> Eagle3Head:
    """With whatever weights, where the target is."""
    return Eagle3Head(sizes, target.embedding_VD.float()).to(target.embedding_VD.device)


class Eagle3Method:
    """Implements `Method`."""

    name = Eagle3Options.name

    def __init__(
        self, options: Eagle3Options, head: Eagle3Head, vocabulary: DraftVocabulary, target: FeatureTarget
    ) -> None:
        self.options, self.head, self.vocabulary = options, head, vocabulary
        place = target.lm_head_VD.device
        self._target_ids_C = vocabulary.target_ids_C.to(place)
        self.draft_rows_CD = target.lm_head_VD[self._target_ids_C].float().contiguous()
        self.known_V = vocabulary.t2d().to(place)

    @property
    def module(self) -> nn.Module:
        return self.head

    @property
    def steps(self) -> int:
        return self.options.steps

    def matrices(self) -> list[nn.Parameter]:
        return [p for name, p in self.head.named_parameters() if p.ndim == 2 and not name.startswith("lm_head")]

    def losses(self, batch: Batch, generator: torch.Generator) -> list[Loss]:
        """Mean cross-entropy of each step of the training-time test."""
        taught = teacher(batch.hidden_MD, self.draft_rows_CD, self.options.candidates, generator)
        weight_CD = self.head.lm_head.weight[taught.ids_N]
        known_M = self.known_V[batch.choice_M]
        kept_A = self._kept(batch.chains.starts_BA.shape[1], generator)
        losses = []
        for step, result in enumerate(unroll(self.head, batch.chains, steps=self.steps, kept_A=kept_A)):
            flat_R, index_R = batch.rows(step, result.columns_A)
            flat_R, index_R = flat_R[known_M[index_R]], index_R[known_M[index_R]]
            hidden_RD = self.head.readout(result.hidden_BAD.flatten(0, 1)[flat_R])
            value = mean_cross_entropy(hidden_RD, weight_CD, taught, index_R, acceptance=self.options.acceptance)
            losses.append(Loss(f"loss_{step}", value, self.options.step_decay**step))
        return losses

    def guesses(self, batch: Batch, *, steps: int, width: int) -> Iterator[Guesses]:
        return head_guesses(self.head, batch, batch.chains, self._target_ids_C, steps=steps, width=width)

    def branches(self, batch: Batch) -> Branches:
        return HeadBranches(self.head, batch.chains, self._target_ids_C)

    def saved(self) -> dict[str, Any]:
        return {"target_ids": self.vocabulary.target_ids_C}

    def facts(self, held: Sequence[Conversation]) -> dict[str, Any]:
        coverage = round(self.vocabulary.coverage(held), 4)
        return {"draft_vocabulary": {"size": self.vocabulary.size, "held_out_coverage": coverage}}

    def export(self, folder: Path, provenance: Mapping[str, Any] | None) -> None:
        export_head(folder, self.head, self.vocabulary, provenance)

    def _kept(self, chains: int, generator: torch.Generator) -> Tensor:
        """The chains continued beyond step 0, ascending."""
        count = max(1, round(self.options.chain_fraction * chains))
        return torch.randperm(chains, generator=generator)[:count].sort().values.to(self.known_V.device)
