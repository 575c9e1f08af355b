"""The figures of a run, each defined once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from alula.sequence import Verdict
from alula.tree import DraftTree

STAGES = ("draft", "tree", "forward", "sample", "commit", "other")


@dataclass
class DraftStats:
    """Counts over the steps of one sequence, or pooled over many.

    committed: tokens kept, cut at EOS and max_tokens. drafted: nodes proposed. checked: children of every node
    that a walk visited. accepted: draft tokens committed. tree_nodes: steps per size of the tree, its root included;
    drafts: those with more than the root.
    """

    target_forwards: int = 0
    committed: int = 0
    drafted: int = 0
    checked: int = 0
    accepted: int = 0
    verified_rows: int = 0
    tried_by_depth: Counter[int] = field(default_factory=Counter)
    accepted_by_depth: Counter[int] = field(default_factory=Counter)
    first_rejection_depth: Counter[int] = field(default_factory=Counter)
    accepted_lengths: Counter[int] = field(default_factory=Counter)
    tree_nodes: Counter[int] = field(default_factory=Counter)
    drafts: int = 0

    def record(self, tree: DraftTree, verdict: Verdict, kept: int) -> None:
        """Add one step that kept `kept` of the verdict's tokens."""
        accepted = min(len(verdict.path), kept)
        self.target_forwards += 1
        self.committed += kept
        self.drafted += len(tree) - 1
        self.checked += verdict.checked
        self.accepted += accepted
        self.verified_rows += len(tree)
        self.accepted_lengths[accepted] += 1
        self.tree_nodes[len(tree)] += 1
        self.drafts += len(tree) > 1
        for depth, node in enumerate((0, *verdict.path), start=1):
            if tree.children[node]:
                self.tried_by_depth[depth] += 1
                if depth > len(verdict.path):
                    self.first_rejection_depth[depth] += 1
        self.accepted_by_depth.update(range(1, len(verdict.path) + 1))

    def add(self, other: DraftStats) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def tau(self) -> float:
        """Acceptance length: tokens committed per target forward of a sequence, the target's own included."""
        return self.committed / self.target_forwards if self.target_forwards else 0.0

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.checked if self.checked else 0.0

    def report(self) -> dict[str, object]:
        """Everything as plain JSON values."""
        forwards = max(self.target_forwards, 1)
        return {
            "tau": round(self.tau, 4),
            "acceptance_rate": round(self.acceptance_rate, 4),
            "accepted_per_drafted": round(self.accepted / self.drafted, 4) if self.drafted else 0.0,
            "acceptance_by_depth": {
                str(depth): round(self.accepted_by_depth[depth] / tried, 4)
                for depth, tried in sorted(self.tried_by_depth.items())
            },
            "first_rejection_depth": {str(d): n for d, n in sorted(self.first_rejection_depth.items())},
            "accepted_lengths": {str(d): n for d, n in sorted(self.accepted_lengths.items())},
            "drafted": self.drafted,
            "checked": self.checked,
            "accepted": self.accepted,
            "verified_rows_per_forward": round(self.verified_rows / forwards, 3),
            "target_forwards": self.target_forwards,
        }


@dataclass
class StepTimes:
    """Seconds per stage, summed over steps. `other` is what the stages leave of the whole step. steps: those begun.

    current: the stage that runs, or that the last one ended in by an exception.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    steps: int = 0
    current: str = "other"

    @contextmanager
    def step(self) -> Iterator[None]:
        before, start = sum(self.seconds.values()), time.perf_counter()
        self.current = "other"
        self.steps += 1
        yield
        staged = sum(self.seconds.values()) - before
        self.seconds["other"] += time.perf_counter() - start - staged

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start, self.current = time.perf_counter(), name
        yield
        self.seconds[name] += time.perf_counter() - start
        self.current = "other"

    def copy(self) -> StepTimes:
        return StepTimes(dict(self.seconds), self.steps)

    def since(self, earlier: StepTimes) -> StepTimes:
        """What came after an earlier copy."""
        seconds = {name: value - earlier.seconds[name] for name, value in self.seconds.items()}
        return StepTimes(seconds, self.steps - earlier.steps)

    def milliseconds(self) -> dict[str, float]:
        return {name: round(1e3 * value, 3) for name, value in self.seconds.items()}
