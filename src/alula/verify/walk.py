"""The walk from the root of each tree along accepted nodes, in step over all sequences of a batch.

A rule only says how to move at a node; everything else is common: which rows are read, the shaping of logits,
reports, errors, and the short cut for plain greedy sequences. Nothing given is changed.

Shape suffixes: R rows of all trees in plan order, B sequences still walking, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from alula.config import AlulaError
from alula.sampling.distribution import first_argmax
from alula.sampling.logprobs import processed_logprobs, raw_logprobs
from alula.sampling.processors import Shaper, shape_rows
from alula.sequence import PlanItem, StepPlan, TokenLogprobs, Verdict
from alula.tree import DraftTree, FloatArray, IntArray

if TYPE_CHECKING:
    import torch

Argmax = Callable[["torch.Tensor"], "torch.Tensor"]
"""fp32 [R, V] -> int64 [R], the lowest id of equals."""
Decide = Callable[[FloatArray, "Sequence[Walk]"], "list[tuple[int, int | None]]"]
"""Shaped logits [B, V] of the walks' nodes -> per walk the emitted token, and the child that carries it, if any."""


class Walk:
    """One sequence's way down its tree. `tokens` are those of the path; once closed, one more."""

    __slots__ = (
        "checked",
        "error",
        "first_row",
        "is_open",
        "logprobs",
        "node",
        "path",
        "sequence",
        "shaper",
        "tokens",
        "tree",
    )

    def __init__(self, item: PlanItem, tree: DraftTree, first_row: int) -> None:
        self.sequence, self.tree, self.first_row = item.sequence, tree, first_row
        self.shaper = Shaper(item.sequence)
        self.node, self.checked, self.is_open = 0, 0, True
        self.path: list[int] = []
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.error: str | None = None

    @property
    def row(self) -> int:
        return self.first_row + self.node

    @property
    def children(self) -> tuple[int, ...]:
        return self.tree.children[self.node]

    @property
    def is_plain(self) -> bool:
        """Greedy on the model's own logits, with nothing to report: an argmax per row is all it takes."""
        params, free = self.sequence.params, self.sequence.grammar is None
        return free and params.is_greedy and not params.shapes_logits and params.logprobs is None

    def mask(self) -> torch.Tensor | None:
        """Ids that the sequence's grammar allows after the path; None allows all."""
        grammar = self.sequence.grammar
        return None if grammar is None else grammar.mask(self.tokens)

    def child_with(self, token: int) -> int | None:
        for child in self.children:
            if self.tree.tokens_N[child] == token:
                return child
        return None

    def move(self, token: int, child: int | None) -> None:
        """Emit a token; go on to the child that carries it, or stop."""
        self.checked += len(self.children)
        self.tokens.append(token)
        if child is None:
            self.is_open = False
        else:
            self.node = child
            self.path.append(child)

    def fail(self, error: str) -> None:
        """No token can be chosen here. What was chosen above stands: plain decoding would have emitted it.

        The failing node itself is not accepted, so its token is the one after the path, and the next step, if
        there is one, meets the failure at its root.
        """
        self.is_open = False
        if self.path:
            self.path.pop()
        else:
            self.error = error

    def verdict(self) -> Verdict:
        if self.error is not None:
            return Verdict((), (), self.checked, None, self.error)
        reported = None if self.sequence.params.logprobs is None else tuple(self.logprobs)
        return Verdict(tuple(self.path), tuple(self.tokens), self.checked, reported)


class LogitRows:
    """Read-only access to the rows, on whatever device they are."""

    def __init__(self, logits_RV: torch.Tensor) -> None:
        self.tensor = logits_RV.detach()
        self._host = self.tensor.float().numpy() if self.tensor.device.type == "cpu" else None

    def take(self, rows: Sequence[int]) -> FloatArray:
        """A copy of some rows, in host memory."""
        if self._host is not None:
            copied: FloatArray = self._host[list(rows)]
            return copied
        import torch

        chosen = self.tensor.index_select(0, torch.tensor(rows, device=self.tensor.device))
        taken: FloatArray = chosen.float().cpu().numpy()
        return taken

    def best(self, first: int, stop: int, argmax: Argmax | None) -> tuple[IntArray, FloatArray]:
        """Best id and its logit, of the rows from first to stop."""
        if self._host is not None:
            host_RV = self._host[first:stop]
            ids_R = first_argmax(host_RV)
            return ids_R, host_RV[np.arange(stop - first), ids_R]
        block_RV = self.tensor[first:stop].float()
        chosen_R = (argmax or lowest_argmax)(block_RV)
        values_R = block_RV.gather(1, chosen_R[:, None])[:, 0]
        return chosen_R.cpu().numpy(), values_R.cpu().numpy()


def lowest_argmax(rows_RV: torch.Tensor) -> torch.Tensor:
    """Argmax with the lowest id of equals, on any device: torch leaves the choice among equals open."""
    import torch

    ids_V = torch.arange(rows_RV.shape[1], device=rows_RV.device)
    best_R1 = rows_RV.amax(dim=1, keepdim=True)
    return torch.where(rows_RV == best_R1, ids_V, rows_RV.shape[1] - 1).amin(dim=1)


def run(
    logits_RV: torch.Tensor,
    trees: Sequence[DraftTree | None],
    plan: StepPlan,
    decide: Decide,
    *,
    argmax: Argmax | None = None,
) -> list[Verdict | None]:
    """Verdicts aligned with the plan."""
    walks = _begin(len(logits_RV), trees, plan)
    rows = LogitRows(logits_RV)
    going = [walk for walk in walks if walk is not None]
    if going and all(walk.is_plain for walk in going):
        _walk_plain(going, *rows.best(0, len(logits_RV), argmax))
    for walk in going:
        if walk.is_open and walk.is_plain:
            ids_N, values_N = rows.best(walk.first_row, walk.first_row + len(walk.tree), argmax)
            _follow(walk, ids_N, values_N, walk.first_row)
    while going := [walk for walk in going if walk.is_open]:
        _advance(rows, going, decide)
    return [None if walk is None else walk.verdict() for walk in walks]


def _begin(row_count: int, trees: Sequence[DraftTree | None], plan: StepPlan) -> list[Walk | None]:
    walks: list[Walk | None] = []
    first_row = 0
    for item, tree in zip(plan.items, trees, strict=True):
        if (tree is None) != (item.shape is None):
            raise AlulaError(f"tree of sequence {item.sequence.id}: give one exactly where the plan has a shape")
        if tree is None:
            walks.append(None)
            continue
        walks.append(Walk(item, tree, first_row))
        first_row += len(tree)
    if first_row != row_count:
        raise AlulaError(f"logits have {row_count} rows: give one per tree node, {first_row} here")
    return walks


def _walk_plain(walks: Sequence[Walk], ids_R: IntArray, values_R: FloatArray) -> None:
    for walk in walks:
        _follow(walk, ids_R, values_R, 0)


def _follow(walk: Walk, ids_R: IntArray, values_R: FloatArray, offset: int) -> None:
    """Step down while a child carries the target's choice."""
    while walk.is_open:
        row = walk.row - offset
        if not np.isfinite(values_R[row]):
            walk.fail(f"the model's best logit is {values_R[row]}: check the model's weights")
            return
        token = int(ids_R[row])
        walk.move(token, walk.child_with(token))


def _advance(rows: LogitRows, walks: Sequence[Walk], decide: Decide) -> None:
    """One level for all walks."""
    raw_BV = rows.take([walk.row for walk in walks])
    ready, shaped_BV = _shape(raw_BV, walks)
    if not ready:
        return
    for b, (walk, (token, child)) in enumerate(zip(ready, decide(shaped_BV, ready), strict=True)):
        if walk.sequence.params.logprobs is not None:
            walk.logprobs.append(_reported(rows, walk, shaped_BV[b], token))
        walk.move(token, child)


def _shape(rows_BV: FloatArray, walks: Sequence[Walk]) -> tuple[list[Walk], FloatArray]:
    """Shapes the rows in place; the walks that go on, and their rows."""
    masks = [walk.mask() for walk in walks]
    errors = shape_rows(rows_BV, [walk.shaper for walk in walks], [walk.tokens for walk in walks], masks)
    for walk, error in zip(walks, errors, strict=True):
        if error is not None:
            walk.fail(error)
    ready = [walk for walk in walks if walk.is_open]
    if len(ready) == len(walks):
        return ready, rows_BV
    return ready, rows_BV[[error is None for error in errors]]


def _reported(rows: LogitRows, walk: Walk, shaped_V: FloatArray, token: int) -> TokenLogprobs:
    params = walk.sequence.params
    count = params.logprobs or 0
    if params.logprobs_mode == "processed":
        return processed_logprobs(shaped_V, params, token, count)
    return raw_logprobs(rows.take([walk.row])[0], token, count)
