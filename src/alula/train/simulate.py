"""Acceptance as training sees it: the drafter in training draws the trees that serving would, along a known text.

The trees, the walk over them and the counts are those of the serving path; the states are those of the training-time
test: whole texts read at once, the head in the numbers it is trained in. Where the served figures differ from these,
serving feeds the head something else than training did.

Shapes: A roots, F frontier rows of all roots, K children of a row, C draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from alula.draft.expand import Growth
from alula.draft.policy import TreePolicy
from alula.engine.metrics import DraftStats
from alula.sequence import Verdict
from alula.tree import ROOT_ONLY, DraftTree, IntArray, TreeShape


class Branches(Protocol):
    """Paths of a drafter in training, from many roots of one text, that need not follow the text."""

    @property
    def vocabulary_C(self) -> Tensor | None:
        """int64: the target id of each draft id; None where they are the same."""

    def logits(self) -> Tensor:
        """[F, C] at the ends of the paths; at first these are the roots."""

    def descend(self, origin_F: Tensor, tokens_F: Tensor) -> None:
        """New paths: those at ``origin_F``, each with one more token."""


@dataclass(frozen=True)
class Written:
    """A text that was served: its prompt's length, all tokens, and how many tokens it might have had at most."""

    prompt: int
    tokens: tuple[int, ...]
    max_tokens: int

    @property
    def roots(self) -> range:
        """Where a tree may stand: every new token but the last, at its index."""
        return range(self.prompt, len(self.tokens) - 1)

    def shape(self, root: int, shape: TreeShape) -> TreeShape:
        """No deeper than tokens could still be committed, as the scheduler has it."""
        depth = min(shape.depth, self.max_tokens - (root + 1 - self.prompt) - 1)
        return replace(shape, depth=depth) if depth > 0 else ROOT_ONLY


def simulate(written: Written, branches: Branches, policy: TreePolicy, shape: TreeShape) -> DraftStats:
    """The figures of serving ``written`` with the trees that ``branches`` gives; its roots are ``written.roots``."""
    shapes = [written.shape(root, shape) for root in written.roots]
    tokens_A = np.array([written.tokens[root] for root in written.roots], np.int64)
    trees = _trees(policy.growth(tokens_A, shapes), branches) if shapes else []
    stats = DraftStats()
    # The forward that reads the prompt drafts nothing and gives the first token.
    stats.record(DraftTree.root_only(written.tokens[written.prompt - 1]), Verdict((), written.tokens[:1]), 1)
    root = written.prompt
    while root < len(written.tokens) - 1:
        tree, text = trees[root - written.prompt], written.tokens[root + 1 :]
        verdict = _walk(tree, text)
        kept = min(len(verdict.tokens), len(text))
        stats.record(tree, verdict, kept)
        root += kept
    return stats


def _trees(growth: Growth, branches: Branches) -> list[DraftTree]:
    with torch.inference_mode():
        roots_AC = branches.logits()
        while len(frontier := growth.frontier):
            if frontier.origin_F[0] >= 0:
                branches.descend(_beside(roots_AC, frontier.origin_F), _beside(roots_AC, frontier.tokens_F))
                logits_FC = branches.logits()
            else:
                logits_FC = roots_AC[_beside(roots_AC, frontier.lane_F)]
            best = logits_FC.log_softmax(-1).topk(min(frontier.children, logits_FC.shape[1]))
            tokens_FK = best.indices if branches.vocabulary_C is None else branches.vocabulary_C[best.indices]
            growth.grow(tokens_FK.cpu().numpy(), best.values.float().cpu().numpy())
    return growth.trees()


def _beside(other: Tensor, numbers: IntArray) -> Tensor:
    """On the device of another tensor."""
    return torch.from_numpy(numbers).to(other.device)


def _walk(tree: DraftTree, text: Sequence[int]) -> Verdict:
    """Down the tree as far as it carries the text."""
    node, path, checked = 0, list[int](), 0
    for token in text:
        checked += len(tree.children[node])
        child = next((c for c in tree.children[node] if tree.tokens_N[c] == token), None)
        if child is None:
            break
        path.append(child)
        node = child
    return Verdict(tuple(path), tuple(text[: len(path) + 1]), checked)
