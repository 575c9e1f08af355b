"""What steps drafted, for requests that want to see it."""

from __future__ import annotations

from dataclasses import replace

from alula.sequence import StepTrace, TokenEvent, Verdict
from alula.tree import DraftTree


def traced(event: TokenEvent, tree: DraftTree, verdict: Verdict, step: int) -> TokenEvent:
    """The event with its trace. step: which of the sequence's target forwards it was, from 1."""
    kept = len(event.tokens)
    trace = StepTrace(
        step=step,
        tokens=tuple(tree.tokens_N.tolist()),
        parents=tuple(tree.parents_N.tolist()),
        scores=tuple(tree.scores_N.tolist()),
        path=verdict.path[:kept],
        checked=verdict.checked,
        committed=kept,
    )
    return replace(event, trace=trace)
