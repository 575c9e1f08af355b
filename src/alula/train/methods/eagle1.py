"""EAGLE-1/2: SmoothL1 on the target's next feature, and cross-entropy of the distributions that it leads to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alula.config import AlulaError
from alula.draft.dialects import read_head, save_official
from alula.kernels.stack import FINAL
from alula.train.batch import Batch, make_batch
from alula.train.branches import HeadBranches
from alula.train.checkpoint import check_sizes, on_cpu, serving_config
from alula.train.data import Conversation
from alula.train.eagle1_head import Eagle1Head, Inputs, new_eagle1_head
from alula.train.head import Chains, HeadConfig, unroll
from alula.train.loss import mean_cross_entropy, teacher
from alula.train.methods.guesses import head_guesses
from alula.train.methods.method import SAMPLES, Guesses, Loss, Method, Setting
from alula.train.methods.options import Eagle1Options
from alula.train.simulate import Branches

_STEPS = 5
"""Steps looked at in evaluations: the acceptance after 0 to 4 own features (0-alpha to 4-alpha)."""


@dataclass(frozen=True)
class Eagle1Maker:
    """Implements `Maker`."""

    options: Eagle1Options
    inputs: Inputs = "advanced"

    def taps(self, layers: int) -> tuple[int, ...]:
        return (FINAL,)

    def fresh(self, setting: Setting) -> Method:
        samples = [make_batch([c], setting.store.get([c])) for c in setting.train[:SAMPLES]]
        target = setting.store.target
        head = new_eagle1_head(self._sizes(setting), target, samples, seed=setting.seed, inputs=self.inputs)
        return Eagle1Method(self.options, head)

    def resumed(self, setting: Setting, state: Mapping[str, Any]) -> Method:
        return Eagle1Method(self.options, self._blank(setting))

    def continued(self, setting: Setting, folder: Path) -> Method:
        files, sizes = read_head(folder), self._sizes(setting)
        check_sizes(folder, files.config, serving_config(sizes, "eagle1"))
        head = self._blank(setting)
        weights = {name: tensor.float() for name, tensor in files.weights.items() if name != "embed_tokens.weight"}
        zeros = {"fc.bias": torch.zeros_like(head.fc.bias), "input_scale_I": head.input_scale_I}
        head.load_state_dict(zeros | weights)
        return Eagle1Method(self.options, head)

    def _blank(self, setting: Setting) -> Eagle1Head:
        return Eagle1Head(self._sizes(setting), setting.store.target, self.inputs).to(setting.model.device)

    def _sizes(self, setting: Setting) -> HeadConfig:
        sizes = setting.model.config
        return HeadConfig(
            hidden_size=sizes.hidden_size,
            intermediate_size=self.options.intermediate_size or sizes.intermediate_size,
            heads=sizes.num_heads,
            kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            vocab_size=sizes.vocab_size,
            draft_vocab_size=sizes.vocab_size,
            taps=(FINAL,),
            rope_theta=self.options.rope_theta,
            rms_norm_eps=sizes.norm_eps,
        )


class Eagle1Method:
    """Implements `Method`."""

    name = Eagle1Options.name
    steps = _STEPS

    def __init__(self, options: Eagle1Options, head: Eagle1Head) -> None:
        self.options, self.head = options, head

    @property
    def module(self) -> nn.Module:
        return self.head

    def matrices(self) -> list[nn.Parameter]:
        return [p for p in self.head.parameters() if p.ndim == 2]

    def losses(self, batch: Batch, generator: torch.Generator) -> list[Loss]:
        """Of step 0; a term whose weight is 0 is not made."""
        (result,) = unroll(self.head, self._noisy(self.head.chains(batch), generator), steps=1)
        flat_R, index_R = batch.rows(0, result.columns_A)
        found_RD, losses = result.hidden_BAD.flatten(0, 1)[flat_R], list[Loss]()
        if self.options.regression:
            value = F.smooth_l1_loss(found_RD.float(), batch.hidden_MD[index_R])
            losses.append(Loss("loss_regression", value, self.options.regression))
        if self.options.classification:
            taught = teacher(batch.hidden_MD, self.head.lm_head_VD, self.options.candidates, generator)
            value = mean_cross_entropy(found_RD, self.head.lm_head_VD[taught.ids_N], taught, index_R)
            losses.append(Loss("loss_classification", value, self.options.classification))
        return losses

    def guesses(self, batch: Batch, *, steps: int, width: int) -> Iterator[Guesses]:
        return head_guesses(self.head, batch, self.head.chains(batch), None, steps=steps, width=width)

    def branches(self, batch: Batch) -> Branches:
        return HeadBranches(self.head, batch.chains, None)

    def saved(self) -> dict[str, Any]:
        return {}

    def facts(self, held: Sequence[Conversation]) -> dict[str, Any]:
        return {}

    def export(self, folder: Path, provenance: Mapping[str, Any] | None) -> None:
        if self.head.inputs != "advanced":
            raise AlulaError(f"inputs is {self.head.inputs!r}: only a head on advanced tokens can be served")
        config, limit = self.head.config, self.head.config.max_position_embeddings
        weights = on_cpu(self.head.official_weights())
        save_official(folder, serving_config(config, "eagle1"), weights, provenance, max_position_embeddings=limit)

    def _noisy(self, chains: Chains, generator: torch.Generator) -> Chains:
        """The features as a drafter may find them: off by a little."""
        clean_BSF: Tensor = chains.features_BSF
        if not self.options.noise:
            return chains
        noise_BSF = torch.rand(clean_BSF.shape, generator=generator).to(clean_BSF.device) * 2 - 1
        return Chains(chains.tokens_BS, clean_BSF + noise_BSF * self.options.noise, chains.starts_BA)
