"""A small language model distilled from the target: cross-entropy against its distribution at every learned token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alula.train.batch import Batch, make_batch
from alula.train.data import Conversation
from alula.train.loss import mean_cross_entropy, teacher
from alula.train.methods.guesses import best_tokens
from alula.train.methods.method import SAMPLES, Guesses, Loss, Method, Setting
from alula.train.methods.options import LMOptions
from alula.train.simulate import Branches
from alula.train.student import blank_student, read_student, start_student, student_config, write_student

_STEPS = 5
"""Steps looked at in evaluations."""


@dataclass(frozen=True)
class LMMaker:
    """Implements `Maker`."""

    options: LMOptions

    def taps(self, layers: int) -> tuple[int, ...]:
        return ()

    def fresh(self, setting: Setting) -> Method:
        method = self._blank(setting)
        samples = [make_batch([c], setting.store.get([c])) for c in setting.train[:SAMPLES]]
        start_student(method.student, self.options, setting.store.target, samples, seed=setting.seed)
        return method

    def resumed(self, setting: Setting, state: Mapping[str, Any]) -> Method:
        return self._blank(setting)

    def continued(self, setting: Setting, folder: Path) -> Method:
        method = self._blank(setting)
        weights = read_student(folder, student_config(self.options, setting.model))
        method.student.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
        return method

    def _blank(self, setting: Setting) -> LMMethod:
        config = student_config(self.options, setting.model)
        student = blank_student(config, train_embedding=self.options.train_embedding)
        return LMMethod(self.options, student.to(setting.model.device), setting)


class LMMethod:
    """Implements `Method`."""

    name = LMOptions.name
    steps = _STEPS

    def __init__(self, options: LMOptions, student: nn.Module, setting: Setting) -> None:
        self.options, self.student = options, student
        self._target_model = setting.model
        self._lm_head_VD = setting.store.target.lm_head_VD.detach().float()

    @property
    def module(self) -> nn.Module:
        return self.student

    def matrices(self) -> list[nn.Parameter]:
        return [p for name, p in self.student.named_parameters() if p.ndim == 2 and ".layers." in name]

    def losses(self, batch: Batch, generator: torch.Generator) -> list[Loss]:
        taught = teacher(batch.hidden_MD, self._lm_head_VD, self.options.candidates, generator)
        hidden_ME, index_M = self._learned(batch)
        value = mean_cross_entropy(hidden_ME, self.embedding_VE[taught.ids_N], taught, index_M)
        return [Loss("loss_0", value, 1.0)]

    def guesses(self, batch: Batch, *, steps: int, width: int) -> Iterator[Guesses]:
        """It reads nothing of its own making, so a token's proposals are the same at every step."""
        hidden_ME, index_M = self._learned(batch)
        order_M = index_M.argsort()
        tokens_MK, log_q_MK = best_tokens(self._logits, hidden_ME[order_M], width)
        columns_A = torch.arange(batch.chains.starts_BA.shape[1], device=index_M.device)
        for step in range(steps):
            flat_R, index_R = batch.rows(step, columns_A)
            yield Guesses(flat_R, index_R, tokens_MK[index_R], log_q_MK[index_R])

    def branches(self, batch: Batch) -> Branches:
        return LMBranches(self, batch)

    def saved(self) -> dict[str, Any]:
        return {}

    def facts(self, held: Sequence[Conversation]) -> dict[str, Any]:
        return {}

    def export(self, folder: Path, provenance: Mapping[str, Any] | None) -> None:
        config = student_config(self.options, self._target_model)
        write_student(folder, self.student, config, self._target_model, provenance)

    @property
    def embedding_VE(self) -> Tensor:
        return self.student.get_parameter("model.embed_tokens.weight")

    def states(self, tokens_BX: Tensor, **where: Tensor) -> Tensor:
        """LM-head inputs [B, X, E]. where: ``position_ids`` and ``attention_mask``, causal by default."""
        states_BXE: Tensor = self.student.get_submodule("model")(
            input_ids=tokens_BX, use_cache=False, **where
        ).last_hidden_state
        return states_BXE

    def _logits(self, hidden_RE: Tensor) -> Tensor:
        return F.linear(hidden_RE, self.embedding_VE)

    def _learned(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(LM-head inputs before the learned tokens [M, E], which learned token each is for [M])"""
        text_M, token_M = (batch.learned_BX >= 0).nonzero(as_tuple=True)
        return self.states(batch.texts_BX)[text_M, token_M - 1], batch.learned_BX[text_M, token_M]


class LMBranches:
    """Implements `alula.train.simulate.Branches`: the text and all paths in one forward with a tree's mask."""

    vocabulary_C: Tensor | None = None

    def __init__(self, method: LMMethod, batch: Batch) -> None:
        self._method = method
        text_X = batch.texts_BX[0]
        count = len(text_X)
        self._tokens_T, self._positions_T = text_X, torch.arange(count, device=text_X.device)
        self._sees_TT = torch.ones(count, count, dtype=torch.bool, device=text_X.device).tril()
        self._ends_F = batch.chains.starts_BA[0] + 1

    def logits(self) -> Tensor:
        """[F, V] at the ends of the paths."""
        unseen_TT = ~self._sees_TT
        mask_TT = torch.zeros(unseen_TT.shape, device=unseen_TT.device).masked_fill(unseen_TT, float("-inf"))
        states_TE = self._method.states(
            self._tokens_T[None], position_ids=self._positions_T[None], attention_mask=mask_TT[None, None]
        )[0]
        return F.linear(states_TE[self._ends_F], self._method.embedding_VE)

    def descend(self, origin_F: Tensor, tokens_F: Tensor) -> None:
        """One more row for every path: it sees what its parent sees, and itself."""
        parents_F, before, added = self._ends_F[origin_F], len(self._tokens_T), len(tokens_F)
        place = tokens_F.device
        self._tokens_T = torch.cat([self._tokens_T, tokens_F])
        self._positions_T = torch.cat([self._positions_T, self._positions_T[parents_F] + 1])
        sees_FT = torch.cat([self._sees_TT[parents_F], torch.eye(added, dtype=torch.bool, device=place)], 1)
        unseen_TF = torch.zeros(before, added, dtype=torch.bool, device=place)
        self._sees_TT = torch.cat([torch.cat([self._sees_TT, unseen_TF], 1), sees_FT])
        self._ends_F = torch.arange(before, before + added, device=place)
