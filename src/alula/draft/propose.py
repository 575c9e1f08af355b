"""From draft logits to the children of the frontier.

Suffixes: F frontier rows, C draft vocabulary, K children per row, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from alula.draft.expand import Frontier, Growth, StaticGrowth
from alula.draft.policy import TreePolicy
from alula.kernels.protocol import Kernels
from alula.sampling.columns import DraftColumns
from alula.sampling.processors import Context
from alula.sampling.proposal import draft_shapers, proposal_keys, proposal_log_q, sample_children
from alula.sequence import Sequence as TokenSequence
from alula.tree import DraftTree, FloatArray, IntArray

NOISE_SCALE = 0.8
"""The c of log softmax((log q + G) / c): what a noisy key says about the chance that the target takes the token.

Fitted by likelihood on random pairs of p and q that accept the first, the best two or the best four children as often
as a briefly trained head on SmolLM2 does at temperature 1 (0.40, 0.54, 0.65). Better heads want less (0.6 where the
first child is accepted half the time), poorer ones more. It only decides which nodes are worth their place.
"""


class Proposer:
    """Proposes the children of one draft, for the sequences that grow a tree in it.

    vocabulary: target ids of the draft ids, None where they are the same. target_size: V.
    """

    def __init__(
        self,
        policy: TreePolicy,
        sequences: Sequence[TokenSequence],
        vocabulary: DraftColumns | None,
        target_size: int,
        kernels: Kernels,
    ) -> None:
        self._policy, self._sequences, self._kernels = policy, sequences, kernels
        self._vocabulary, self._target_size = vocabulary, target_size
        self._shapers = draft_shapers(sequences, vocabulary)
        greedy = [sequence.params.is_greedy for sequence in sequences]
        shaped = any(sequence.params.shapes_logits or sequence.grammar is not None for sequence in sequences)
        self._plain = all(greedy) and not shaped
        self._draws_B = np.array([policy.sampled and not flag for flag in greedy])
        self._drawn: list[dict[int, torch.Tensor]] = [{} for _ in sequences]

    def expand(
        self,
        growth: Growth,
        logits_FC: torch.Tensor,
        paths: Sequence[tuple[int, ...]],
        *,
        rows_F: IntArray | None = None,
    ) -> None:
        """One level: children of every frontier row from its logits and the tokens on its path.

        rows_F: which row of the logits is whose, for drafters that give several frontier rows the same.
        """
        frontier = growth.frontier
        if self._plain:
            columns_FK, logs_FK = self._best(logits_FC, min(frontier.children, logits_FC.shape[1]))
            if rows_F is not None:
                columns_FK, logs_FK = columns_FK[rows_F], logs_FK[rows_F]
        else:
            if rows_F is not None:
                logits_FC = logits_FC[torch.from_numpy(rows_F).to(logits_FC.device)]
            columns_FK, logs_FK = self._shaped(growth, frontier, logits_FC, paths)
        growth.grow(columns_FK if self._vocabulary is None else self._vocabulary.ids_C[columns_FK], logs_FK)

    def finish(self, growth: Growth) -> list[DraftTree]:
        """The trees, with the distributions that sampled children came from."""
        trees = growth.trees()
        return [
            replace(tree, sampled=True, proposals=drawn) if draws else tree
            for tree, drawn, draws in zip(trees, self._drawn, self._draws_B, strict=True)
        ]

    def _best(self, keys_FC: torch.Tensor, count: int) -> tuple[IntArray, FloatArray]:
        """Columns of the largest keys, and the log softmax of the keys there."""
        top_FK, columns_FK = self._kernels.topk(keys_FC, count)
        logs_FK = top_FK - self._kernels.logsumexp(keys_FC)[:, None]
        return columns_FK.cpu().numpy(), logs_FK.cpu().numpy()

    def _shaped(
        self, growth: Growth, frontier: Frontier, logits_FC: torch.Tensor, paths: Sequence[tuple[int, ...]]
    ) -> tuple[IntArray, FloatArray]:
        lane_F, count = frontier.lane_F, min(frontier.children, logits_FC.shape[1])
        contexts = [Context.at(self._sequences[lane], path) for lane, path in zip(lane_F, paths, strict=True)]
        if isinstance(growth, StaticGrowth) and self._draws_B[lane_F].any():
            return self._mixed(growth, logits_FC, contexts, count)
        return self._points(logits_FC, contexts, lane_F, count)

    def _points(
        self, logits_FC: torch.Tensor, contexts: Sequence[Context], lane_F: IntArray, count: int
    ) -> tuple[IntArray, FloatArray]:
        """The columns with the largest keys; a noisy key tells less of the chance of acceptance than log q does."""
        keys_FC = proposal_keys(
            logits_FC,
            contexts,
            vocabulary=self._vocabulary,
            rule=self._policy.rule,
            noise_scale=NOISE_SCALE,
            sampler=self._kernels.sampler,
            shapers=[self._shapers[lane] for lane in lane_F],
        )
        return self._best(keys_FC, count)

    def _mixed(
        self, growth: StaticGrowth, logits_FC: torch.Tensor, contexts: Sequence[Context], count: int
    ) -> tuple[IntArray, FloatArray]:
        """Rows whose children are drawn, beside rows of greedy sequences."""
        lane_F, nodes_F = growth.frontier.lane_F, growth.nodes_F
        shapers = [self._shapers[lane] for lane in lane_F]
        log_q_FC = proposal_log_q(
            logits_FC, contexts, vocabulary=self._vocabulary, kernels=self._kernels, shapers=shapers
        )
        columns_FK, q_FV = sample_children(
            log_q_FC, count, contexts, nodes_F, vocabulary=self._vocabulary, target_size=self._target_size
        )
        logs_FK = np.take_along_axis(log_q_FC.cpu().numpy(), np.maximum(columns_FK, 0), 1)
        logs_FK = np.where(columns_FK >= 0, logs_FK, -np.inf)
        draws_F = self._draws_B[lane_F]
        for row in np.flatnonzero(draws_F):
            self._drawn[lane_F[row]][nodes_F[row]] = q_FV[row]
        best, best_logs = self._best(log_q_FC, count)
        chosen = np.where(draws_F[:, None], np.maximum(columns_FK, 0), best)
        return chosen, np.where(draws_F[:, None], logs_FK, best_logs)
