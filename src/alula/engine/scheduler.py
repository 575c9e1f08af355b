"""Who runs in the next step, with how many prompt rows and how large a tree."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from alula.cache import PagedCache
from alula.engine.config import EngineConfig
from alula.features import FeatureQueue
from alula.sequence import PlanItem, Sequence, StepPlan
from alula.tree import ROOT_ONLY, TreeShape


class Scheduler:
    """First come, first served, under a budget of rows and a pool of pages.

    Running sequences go before waiting ones. When pages run out a tree shrinks to its root, then the sequence
    admitted last is preempted: its pages are released and its tokens recomputed when it runs again.

    scratch: logical slots beyond the root that drafting a shape needs. prefix_queries and prefix_hits count the tokens
    that were looked up in the prefix cache at admission, and those found.
    """

    def __init__(
        self, cache: PagedCache, config: EngineConfig, max_len: int, scratch: Callable[[TreeShape], int]
    ) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._cache = cache
        self._config = config
        self._max_len = max_len
        self._scratch = scratch

    def add(self, sequence: Sequence) -> None:
        """It waits behind everybody whose priority is not a higher number."""
        later = (place for place, other in enumerate(self.waiting) if other.priority > sequence.priority)
        self.waiting.insert(next(later, len(self.waiting)), sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a finished or aborted sequence and release its pages."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._cache.release(sequence.id)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def needs(self, plan: StepPlan) -> dict[int, int]:
        """Logical slots that each sequence of the plan writes beyond its committed length."""
        return {item.sequence.id: self._need(item) for item in plan.items}

    def plan(self) -> StepPlan:
        items: dict[int, PlanItem] = {}
        rows = self._config.max_num_batched_tokens
        for place, sequence in enumerate(list(self.running)):
            if sequence in self.running:
                behind = max(len(self.running) - place - 1, 0)
                rows -= self._plan_running(sequence, rows - behind, items)
        self._admit(rows, items)
        return StepPlan(tuple(items.values()))

    def preempt(self, sequence: Sequence) -> None:
        """Give its pages back; it waits at the front and is recomputed later."""
        self.running.remove(sequence)
        self._cache.release(sequence.id)
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _plan_running(self, sequence: Sequence, rows: int, items: dict[int, PlanItem]) -> int:
        item = self._item(sequence, rows)
        while not self._fits(item, items):
            if item.shape is not None and not item.shape.is_root_only:
                item = PlanItem(sequence, item.chunk, ROOT_ONLY)
                continue
            victim = self.running[-1]
            self.preempt(victim)
            if victim is sequence:
                return 0
        items[sequence.id] = item
        return item.rows

    def _admit(self, rows: int, items: dict[int, PlanItem]) -> None:
        while self.waiting and rows > 0 and len(self.running) < self._config.max_num_seqs:
            sequence = self.waiting[0]
            if self._shares_a_prompt_in_progress(sequence):
                return
            hit = self._cache.add(sequence.id, sequence.tokens, use_prefix=self._may_reuse(sequence))
            item = self._item(sequence, rows)
            if not self._has_room(sequence, item, hit, items):
                self._cache.release(sequence.id)
                return
            self._note(sequence, hit)
            sequence.features = FeatureQueue(hit)
            self.running.append(self.waiting.popleft())
            items[sequence.id] = item
            rows -= item.rows

    def _note(self, sequence: Sequence, hit: int) -> None:
        if self._may_reuse(sequence):
            self.prefix_queries += len(sequence.tokens)
            self.prefix_hits += hit
        if sequence.admitted_s is None:
            sequence.cached, sequence.admitted_s = hit, time.perf_counter()

    def _has_room(self, sequence: Sequence, item: PlanItem, hit: int, items: dict[int, PlanItem]) -> bool:
        """Room for the whole prompt, unless nothing else runs: then for the first chunk."""
        if not self.running:
            return self._fits(item, items)
        whole = len(sequence.tokens) - hit + self._config.page_size
        return self._cache.can_begin(self._needs_of(items) | {sequence.id: whole})

    def _may_reuse(self, sequence: Sequence) -> bool:
        """Prompt logprobs need the logits of every prompt position, so nothing may be skipped."""
        return self._config.enable_prefix_caching and sequence.params.prompt_logprobs is None

    def _shares_a_prompt_in_progress(self, sequence: Sequence) -> bool:
        """A further sample waits until the first one's prompt is cached, instead of computing it again."""
        if not self._may_reuse(sequence) or sequence.sample == 0:
            return False
        first = sequence.id - sequence.sample
        return any(
            first <= other.id < sequence.id and self._cache.length(other.id) < other.prompt_len - 1
            for other in self.running
        )

    def _item(self, sequence: Sequence, rows: int) -> PlanItem:
        start, root = self._cache.length(sequence.id), sequence.root_position
        if root - start >= rows:
            return PlanItem(sequence, range(start, start + rows), None)
        shape = self._limit(sequence, rows) if start == root else ROOT_ONLY
        return PlanItem(sequence, range(start, root), shape)

    def _limit(self, sequence: Sequence, rows: int) -> TreeShape:
        """The shape asked for, no deeper than tokens can still be committed."""
        shape = sequence.shape or self._config.shape
        depth = min(shape.depth, sequence.remaining - 1, self._max_len - len(sequence.tokens) - 1)
        nodes = min(shape.nodes, rows)
        if depth <= 0 or nodes <= 1:
            return ROOT_ONLY
        return replace(shape, nodes=nodes, depth=depth)

    def _fits(self, item: PlanItem, items: dict[int, PlanItem]) -> bool:
        return self._cache.can_begin(self._needs_of(items) | {item.sequence.id: self._need(item)})

    def _needs_of(self, items: dict[int, PlanItem]) -> dict[int, int]:
        return {key: self._need(item) for key, item in items.items()}

    def _need(self, item: PlanItem) -> int:
        if item.shape is None:
            return len(item.chunk)
        return len(item.chunk) + max(item.shape.nodes, 1 + self._scratch(item.shape))
