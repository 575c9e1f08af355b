"""The training loop: one screen, resumable at every step."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from alula.train.batch import Batch, make_batch
from alula.train.data import Conversation, plan_batches
from alula.train.evaluate import StepFigures, evaluate, expected_length
from alula.train.features import FeatureStore
from alula.train.head import Eagle3Head, unroll
from alula.train.loss import choose_candidates, soft_cross_entropy, target_distribution
from alula.train.muon import Muon
from alula.train.vocabulary import DraftVocabulary


@dataclass(frozen=True)
class Recipe:
    """What the loss and the optimiser do."""

    steps: int = 7
    """Steps of the training-time test."""
    step_decay: float = 0.8
    """Weight of step i is step_decay ** i."""
    chain_fraction: float = 1.0
    """Share of the chains continued beyond step 0, drawn anew for each batch; below 1 saves time."""
    candidates: int = 0
    """Draft ids whose logits are made per batch (sampled softmax); 0 makes all."""
    matrix_rate: float = 0.004
    """Peak rate of Muon, for the matrices of fc and the layer (linear warm-up, then cosine)."""
    other_rate: float = 1e-4
    """Peak rate of AdamW, for norms and LM head, which start as the target's."""
    final_share: float = 0.03
    """The cosine ends at this share of the peak."""
    warmup_tokens: int = 20_000
    """Learned tokens of the warm-up."""
    total_tokens: int = 2_000_000
    """Learned tokens until the end, repeats counted."""
    tokens_per_batch: int = 2048
    """Learned tokens of one optimiser step."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's."""
    clip: float = 1.0
    """Largest norm of the whole gradient."""

    def share(self, tokens: int) -> float:
        """Share of the peak rates after so many learned tokens."""
        if tokens < self.warmup_tokens:
            return (tokens + 1) / (self.warmup_tokens + 1)
        span = max(self.total_tokens - self.warmup_tokens, 1)
        done = min((tokens - self.warmup_tokens) / span, 1.0)
        return self.final_share + (1 - self.final_share) * 0.5 * (1 + math.cos(math.pi * done))


@dataclass
class Progress:
    """Where the data stands; saved with every checkpoint."""

    step: int = 0
    tokens: int = 0
    epoch: int = 0
    plan: list[list[str]] = field(default_factory=list)
    """Batches of this epoch, as conversation keys."""
    cursor: int = 0
    """Next batch of the plan."""


class Trainer:
    """One head, one optimiser, one data order.

    ``read_data`` is asked again at every epoch's start, so a data set may grow while training runs; batches are
    named by content, so an interrupted epoch is finished as it was planned.
    """

    def __init__(
        self,
        head: Eagle3Head,
        vocabulary: DraftVocabulary,
        store: FeatureStore,
        recipe: Recipe,
        read_data: Callable[[], Sequence[Conversation]],
        *,
        seed: int,
    ) -> None:
        self.head, self.vocabulary, self.store, self.recipe, self.read_data = head, vocabulary, store, recipe, read_data
        self.draft_rows_CD = store.target.lm_head_VD[vocabulary.target_ids_C].float().contiguous()
        self.known_V = vocabulary.t2d()
        self.generator = torch.Generator().manual_seed(seed)
        self.progress = Progress()
        self.optimizers = _optimizers(head, recipe)
        self._by_key: dict[str, Conversation] = {}

    @property
    def finished(self) -> bool:
        """Whether the recipe's tokens are used up."""
        return self.progress.tokens >= self.recipe.total_tokens

    def train_step(self) -> dict[str, float]:
        """One optimiser step on the next batch; returns the log line's figures."""
        started = time.perf_counter()
        batch = self._next_batch()
        losses = self._backward(batch)
        norm = torch.nn.utils.clip_grad_norm_(self.head.parameters(), self.recipe.clip)
        share = self.recipe.share(self.progress.tokens)
        for optimizer, peak in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak * share
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.progress.step += 1
        self.progress.tokens += len(batch.token_M)
        seconds = time.perf_counter() - started
        figures = {f"loss_{i}": loss for i, loss in enumerate(losses)}
        return {
            **figures,
            "gradient_norm": norm.item(),
            "lr_share": share,
            "tokens_per_second": len(batch.token_M) / seconds,
        }

    def evaluate(self, conversations: Sequence[Conversation], *, steps: int) -> list[StepFigures]:
        """Figures on held-out conversations."""
        batches = [make_batch([c], self.store.get([c])) for c in conversations]
        return evaluate(self.head, batches, self.vocabulary.draft_ids(), steps=steps)

    def state(self) -> dict[str, Any]:
        """Everything needed to go on as if never interrupted."""
        return {
            "head": self.head.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer, _ in self.optimizers],
            "generator": self.generator.get_state(),
            "progress": asdict(self.progress),
            "target_ids": self.vocabulary.target_ids_C,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up a saved ``state``."""
        self.head.load_state_dict(state["head"])
        for (optimizer, _), saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.generator.set_state(state["generator"])
        self.progress = Progress(**state["progress"])

    def _next_batch(self) -> Batch:
        progress = self.progress
        if progress.cursor >= len(progress.plan):
            progress.epoch += bool(progress.plan)
            conversations = self._reload()
            progress.plan = plan_batches(
                conversations, tokens_per_batch=self.recipe.tokens_per_batch, generator=self.generator
            )
            progress.cursor = 0
        elif not self._by_key:
            self._reload()
        keys = progress.plan[progress.cursor]
        progress.cursor += 1
        chosen = [self._by_key[key] for key in keys]
        return make_batch(chosen, self.store.get(chosen))

    def _reload(self) -> Sequence[Conversation]:
        conversations = self.read_data()
        self._by_key = {c.key: c for c in conversations}
        return conversations

    def _backward(self, batch: Batch) -> list[float]:
        """Gradients of the whole training-time test; mean loss per step."""
        probabilities_MC = target_distribution(batch.hidden_MD, self.draft_rows_CD)
        candidates = choose_candidates(probabilities_MC, self.recipe.candidates, self.generator)
        probabilities_MC = probabilities_MC[:, candidates.ids_N]
        probabilities_MC = probabilities_MC / probabilities_MC.sum(-1, keepdim=True)
        weight_CD = self.head.lm_head.weight[candidates.ids_N]
        known_M = self.known_V[batch.choice_M]
        losses: list[Tensor] = []
        kept_A = self._kept(batch.chains.starts_BA.shape[1])
        for step, result in enumerate(unroll(self.head, batch.chains, steps=self.recipe.steps, kept_A=kept_A)):
            flat_R, index_R = batch.rows(step, result.columns_A)
            flat_R, index_R = flat_R[known_M[index_R]], index_R[known_M[index_R]]
            hidden_RD = self.head.norm(result.hidden_BAD.flatten(0, 1)[flat_R])
            share_R = hidden_RD.new_full((len(flat_R),), 1 / max(len(flat_R), 1))
            losses.append(
                soft_cross_entropy(hidden_RD, weight_CD, probabilities_MC, index_R, share_R, candidates.correction_N)
            )
        weighted = [loss * self.recipe.step_decay**i for i, loss in enumerate(losses)]
        total: Tensor = torch.stack(weighted).sum()
        torch.autograd.backward(total)
        return [loss.item() for loss in losses]

    def _kept(self, chains: int) -> Tensor:
        """The chains continued beyond step 0, ascending."""
        count = max(1, round(self.recipe.chain_fraction * chains))
        return torch.randperm(chains, generator=self.generator)[:count].sort().values


def _optimizers(head: Eagle3Head, recipe: Recipe) -> list[tuple[torch.optim.Optimizer, float]]:
    """(optimiser, its peak rate): Muon for the inner matrices, AdamW for norms and LM head."""
    matrices = [p for name, p in head.named_parameters() if p.ndim == 2 and not name.startswith("lm_head")]
    others = [p for name, p in head.named_parameters() if p.ndim != 2 or name.startswith("lm_head")]
    adam = torch.optim.AdamW(others, lr=recipe.other_rate, betas=recipe.betas, weight_decay=0.0, fused=True)
    return [(Muon(matrices, lr=recipe.matrix_rate), recipe.matrix_rate), (adam, recipe.other_rate)]


def append_log(path: Path, entry: Mapping[str, Any]) -> None:
    """Add one JSON line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def figures_entry(figures: Sequence[StepFigures]) -> dict[str, Any]:
    """An evaluation as a log entry."""
    return {
        "top1": [round(f.top1, 4) for f in figures],
        "top4": [round(f.top4, 4) for f in figures],
        "conditional_top1": [round(f.conditional_top1, 4) for f in figures],
        "conditional_top4": [round(f.conditional_top4, 4) for f in figures],
        "length_top1": round(expected_length(figures, branch=1), 3),
        "length_top4": round(expected_length(figures, branch=4), 3),
    }
