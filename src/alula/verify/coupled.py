"""Rule `coupled`: the target chooses every token itself; a child is accepted when it carries that token.

The token at absolute position i is argmax_x (log p(x) + G(x)), with Gumbel noise keyed by (seed, sample, i, x); at
temperature 0 it is argmax_x of the logits. Nothing about the drafter enters the choice, so the text does not depend
on it (Daliri, Musco and Suresh, arXiv 2408.07978; lists of drafts: Rowan et al., arXiv 2506.05632).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from alula.sampling.distribution import choose
from alula.sequence import StepPlan, Verdict
from alula.tree import DraftTree, FloatArray
from alula.verify.walk import Argmax, Walk, run

if TYPE_CHECKING:
    import torch

    from alula.kernels.protocol import Sampler


def verify(
    logits_RV: torch.Tensor,
    trees: Sequence[DraftTree | None],
    plan: StepPlan,
    *,
    argmax: Argmax | None = None,
    sampler: Sampler | None = None,
) -> list[Verdict | None]:
    """Verdicts aligned with `plan.items`, None where an item has no tree. Pure: nothing given is changed.

    logits_RV: target logits of all tree nodes, trees in plan order, each in node order.
    argmax: for plain greedy rows that are not in host memory; there numpy's is used.
    sampler: of the kernel set, see `choose`.
    A sequence for which no token can be chosen gets `Verdict.error`; the others are not affected.
    """
    return run(logits_RV, trees, plan, partial(_decide, sampler=sampler), argmax=argmax)


def _decide(shaped_BV: FloatArray, walks: Sequence[Walk], sampler: Sampler | None) -> list[tuple[int, int | None]]:
    chosen_B = choose(
        shaped_BV,
        [walk.sequence.params for walk in walks],
        [walk.sequence.seed for walk in walks],
        [walk.sequence.sample for walk in walks],
        [len(walk.sequence.tokens) + len(walk.tokens) for walk in walks],
        sampler,
    )
    return [(token, walk.child_with(token)) for walk, token in zip(walks, chosen_B.tolist(), strict=True)]
