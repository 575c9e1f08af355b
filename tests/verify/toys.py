"""A toy target and a toy drafter whose logits depend on the last token alone, and the statistics to judge outputs.

Suffixes: B trials, V vocabulary, N tree nodes, k children.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from alula.sampling.processors import Context
from alula.sampling.proposal import proposal_keys, proposal_log_q, sample_children
from alula.sequence import PlanItem, SamplingParams, StepPlan, Verdict
from alula.sequence import Sequence as TokenSequence
from alula.tree import DraftTree, IntArray, TreeShape

Verify = Callable[..., list[Verdict | None]]
Parents = Sequence[int]
"""Per node its parent, the root's -1; siblings side by side, parents before children."""

CHAIN_3: Parents = (-1, 0, 1, 2)
BUSHY: Parents = (-1, 0, 0, 1, 1, 2)
PAIR: Parents = (-1, 0, 0)
SHAPE = TreeShape(nodes=64, depth=8, branch=8)


def table(size: int, seed: int, scale: float = 1.5) -> torch.Tensor:
    """Logits [V, V]: row = last token."""
    return torch.from_numpy((np.random.default_rng(seed).standard_normal((size, size)) * scale).astype(np.float32))


def sequences(params: SamplingParams, seeds: Sequence[int], prompt: Sequence[int] = (0,)) -> list[TokenSequence]:
    return [TokenSequence(i, len(prompt), list(prompt), params, seed) for i, seed in enumerate(seeds)]


def plan_of(rows: Sequence[TokenSequence]) -> StepPlan:
    return StepPlan(tuple(PlanItem(sequence, range(0), SHAPE) for sequence in rows))


def logits_of(target_VV: torch.Tensor, trees: Sequence[DraftTree]) -> torch.Tensor:
    return target_VV[np.concatenate([tree.tokens_N for tree in trees])]


def children_of(parents: Parents) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for node, parent in enumerate(parents[1:], start=1):
        found.setdefault(parent, []).append(node)
    return found


@dataclass
class Drafter:
    """Grows trees of one fixed shape for all trials at once.

    kind: `sampled` draws children from q; `top` takes the largest of log q; `coupled` the largest of log q + noise.
    """

    logits_VV: torch.Tensor
    parents: Parents
    kind: str = "top"

    def draft(self, rows: Sequence[TokenSequence]) -> list[DraftTree]:
        tokens_BN = np.zeros((len(rows), len(self.parents)), np.int64)
        tokens_BN[:, 0] = [row.tokens[-1] for row in rows]
        proposals: dict[int, tuple[torch.Tensor, ...]] = {}
        for node, children in children_of(self.parents).items():
            columns, q_BV = self._children(rows, tokens_BN, node, len(children))
            tokens_BN[:, children] = columns
            if q_BV is not None:
                proposals[node] = q_BV.unbind(0)
        return [self._tree(b, tokens_BN[b], proposals) for b in range(len(rows))]

    def _children(
        self, rows: Sequence[TokenSequence], tokens_BN: IntArray, node: int, k: int
    ) -> tuple[IntArray, torch.Tensor | None]:
        contexts = [Context.at(row, path) for row, path in zip(rows, self._paths(tokens_BN, node), strict=True)]
        logits_BV = self.logits_VV[tokens_BN[:, node]]
        if self.kind == "sampled":
            columns, q_BV = sample_children(proposal_log_q(logits_BV, contexts), k, contexts, [node] * len(rows))
            return columns, q_BV
        keys_BV = proposal_keys(logits_BV, contexts, rule="coupled" if self.kind == "coupled" else "rejection")
        return np.argsort(-keys_BV.numpy(), axis=1, kind="stable")[:, :k], None

    def _paths(self, tokens_BN: IntArray, node: int) -> list[tuple[int, ...]]:
        nodes: list[int] = []
        while node:
            nodes.insert(0, node)
            node = self.parents[node]
        return [tuple(row) for row in tokens_BN[:, nodes].tolist()]

    def _tree(self, b: int, tokens_N: IntArray, proposals: dict[int, tuple[torch.Tensor, ...]]) -> DraftTree:
        own = {node: rows[b] for node, rows in proposals.items()}
        scores = np.zeros(len(tokens_N), np.float32)
        tree = DraftTree(tokens_N, self._parents_N, scores, bool(proposals), own)
        vars(tree)["children"] = self._children_N  # the same for every trial: counted once
        return tree

    @cached_property
    def _parents_N(self) -> IntArray:
        return np.array(self.parents)

    @cached_property
    def _children_N(self) -> tuple[tuple[int, ...], ...]:
        return DraftTree(self._parents_N, self._parents_N, np.zeros(len(self.parents), np.float32)).children


def one_step(
    verify: Verify, target_VV: torch.Tensor, rows: Sequence[TokenSequence], trees: Sequence[DraftTree]
) -> list[Verdict]:
    verdicts = verify(logits_of(target_VV, trees), trees, plan_of(rows))
    assert all(verdict is not None and verdict.error is None for verdict in verdicts)
    return [verdict for verdict in verdicts if verdict is not None]


def generate(
    verify: Verify,
    target_VV: torch.Tensor,
    rows: Sequence[TokenSequence],
    draft: Callable[[Sequence[TokenSequence]], list[DraftTree]],
    length: int,
) -> IntArray:
    """Outputs [B, length]: steps until every sequence has that many tokens."""
    while short := [row for row in rows if len(row.output) < length]:
        for row, verdict in zip(short, one_step(verify, target_VV, short, draft(short)), strict=True):
            row.tokens.extend(verdict.tokens)
    return np.array([row.output[:length] for row in rows])


def plain(rows: Sequence[TokenSequence]) -> list[DraftTree]:
    return [DraftTree.root_only(row.tokens[-1]) for row in rows]


def joint_law(law_VV: NDArray[np.float64], root: int, length: int) -> NDArray[np.float64]:
    """Probability of every output of this length, first token slowest, for rows of a Markov law."""
    size = len(law_VV)
    probability, last = np.ones(1), np.array([root])
    for _ in range(length):
        probability = (probability[:, None] * law_VV[last]).ravel()
        last = np.tile(np.arange(size), len(probability) // size)
    return probability


def codes(outputs_BL: IntArray, size: int) -> IntArray:
    code = np.zeros(len(outputs_BL), np.int64)
    for column in outputs_BL.T:
        code = code * size + column
    return code


def p_value(observed: IntArray, expected: NDArray[np.float64]) -> float:
    """Of a chi-square test of counts of codes against their probabilities; cells expected below 5 are pooled."""
    counts = np.bincount(observed, minlength=len(expected)).astype(np.float64)
    wanted = expected * counts.sum()
    if counts[expected <= 0].any():
        return 0.0
    small = wanted < 5
    if small.any():
        counts = np.append(counts[~small], counts[small].sum())
        wanted = np.append(wanted[~small], wanted[small].sum())
    counts, wanted = counts[wanted > 0], wanted[wanted > 0]
    statistic = float(((counts - wanted) ** 2 / wanted).sum())
    half = torch.tensor([(len(wanted) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
