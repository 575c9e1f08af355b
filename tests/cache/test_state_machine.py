"""Random histories of the cache against a model that knows what every committed row must hold."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from alula.cache import OutOfPages
from tests.cache.harness import Harness, Work

TOKENS = st.lists(st.sampled_from([1, 1, 1, 2]), min_size=1, max_size=18)
SETTINGS = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)


class CacheMachine(RuleBasedStateMachine):
    """Few token values, so that prefixes are shared, computed twice and found again; few pages, so these run out."""

    lm = False
    prefix_caching = True

    def __init__(self) -> None:
        super().__init__()
        self.harness = Harness(pages=11, page_size=4, lm=self.lm, prefix_caching=self.prefix_caching)
        self.next_id = 0

    @property
    def ids(self) -> list[int]:
        return sorted(self.harness.models)

    @precondition(lambda self: len(self.harness.models) < 4)
    @rule(tokens=TOKENS, use_prefix=st.sampled_from([True, True, True, False]))
    def add(self, tokens: list[int], use_prefix: bool) -> None:
        hit = self.harness.add(self.next_id, tokens, use_prefix=use_prefix)
        assert not hit or (use_prefix and self.prefix_caching)
        self.next_id += 1

    @precondition(lambda self: self.harness.models)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """One transaction: some sequences commit, some roll back, some are released inside, or it fails."""
        ids = data.draw(st.lists(st.sampled_from(self.ids), unique=True, min_size=1))
        works = {seq_id: self._work(data, seq_id) for seq_id in ids}
        before = {seq_id: self.harness.slots(seq_id).tolist() for seq_id in self.ids}
        free, wanted = self.harness.cache.free_pages, self._wanted(works)
        needs = {seq_id: work.need for seq_id, work in works.items()}
        assert self.harness.cache.can_begin(needs) == (wanted <= free)
        if wanted > free:
            with pytest.raises(OutOfPages):
                self.harness.cache.begin(needs)
            assert free == self.harness.cache.free_pages
            assert before == {seq_id: self.harness.slots(seq_id).tolist() for seq_id in self.ids}
            return
        release = [seq_id for seq_id in ids if data.draw(st.integers(0, 9)) == 0]
        self.harness.step(works, mishap=data.draw(st.booleans()), release=release, flush=data.draw(st.booleans()))
        for seq_id in set(self.ids) - {seq_id for seq_id in ids if works[seq_id].commits}:
            assert before[seq_id] == self.harness.slots(seq_id).tolist()

    @precondition(lambda self: self.harness.models)
    @rule(data=st.data())
    def prefill(self, data: st.DataObject) -> None:
        self._all_of(data.draw(st.sampled_from(self.ids)), drafted=False)

    @precondition(lambda self: self.harness.models)
    @rule(data=st.data())
    def draft(self, data: st.DataObject) -> None:
        self._all_of(data.draw(st.sampled_from(self.ids)), drafted=True)

    @precondition(lambda self: self.harness.models)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.harness.release(data.draw(st.sampled_from(self.ids)))

    @precondition(lambda self: self.harness.models)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """Release and add again; right away all full pages are found, save a tail that the drafter lacks."""
        seq_id = data.draw(st.sampled_from(self.ids))
        tokens = self.harness.models[seq_id].tokens
        self.harness.release(seq_id)
        self.harness.add(seq_id, tokens)

    @rule()
    def evict(self) -> None:
        self.harness.cache.clear_prefix()
        assert self.harness.cache.cached_pages == 0

    @invariant()
    def agrees(self) -> None:
        self.harness.verify()

    def teardown(self) -> None:
        for seq_id in self.ids:
            self.harness.release(seq_id)
        self.harness.cache.check_integrity()
        assert self.harness.cache.free_pages == self.harness.cache.total_pages

    def _wanted(self, works: dict[int, Work]) -> int:
        size, models = self.harness.cache.page_size, self.harness.models
        ends = {seq_id: models[seq_id].length for seq_id in works}
        return sum(-(-(end + works[seq_id].need) // size) - -(-end // size) for seq_id, end in ends.items())

    def _all_of(self, seq_id: int, *, drafted: bool) -> None:
        model = self.harness.models[seq_id]
        work = Work(len(model.tokens) - 1 - model.length, (), bonus=1, drafted=len(model.tokens) if drafted else None)
        if self._wanted({seq_id: work}) <= self.harness.cache.free_pages:
            self.harness.step({seq_id: work})

    def _work(self, data: st.DataObject, seq_id: int) -> Work:
        model = self.harness.models[seq_id]
        behind = len(model.tokens) - 1 - model.length
        chunk = data.draw(st.integers(0, behind))
        nodes = None
        if chunk == behind and data.draw(st.booleans()):
            size = data.draw(st.integers(0, 6))
            nodes = tuple((data.draw(st.integers(0, node)), data.draw(st.sampled_from([1, 2]))) for node in range(size))
        accepted = data.draw(st.integers(0, len(nodes or ())))
        drafted, skip = self._drafted(data, seq_id, model.length + chunk + (nodes is not None))
        return Work(
            chunk,
            nodes,
            accepted,
            bonus=data.draw(st.sampled_from([1, 2])),
            drafted=drafted,
            skip=skip,
            commits=data.draw(st.integers(0, 4)) > 0,
            features=data.draw(st.integers(0, 4)) > 0,
        )

    def _drafted(self, data: st.DataObject, seq_id: int, limit: int) -> tuple[int | None, int]:
        start = self.harness.models[seq_id].draft_length
        if limit < start or not data.draw(st.booleans()):
            return None, 0
        drafted = data.draw(st.integers(start, limit))
        skip = data.draw(st.integers(start, drafted)) if data.draw(st.integers(0, 5)) == 0 else 0
        return drafted, skip


class LanguageModelMachine(CacheMachine):
    """A drafter of two layers, whose entries depend on what it could see."""

    lm = True


class UncachedMachine(CacheMachine):
    prefix_caching = False


TestEagleCache = CacheMachine.TestCase
TestLanguageModelCache = LanguageModelMachine.TestCase
TestUncachedCache = UncachedMachine.TestCase
TestEagleCache.settings = SETTINGS
TestLanguageModelCache.settings = settings(SETTINGS, max_examples=30)
TestUncachedCache.settings = settings(SETTINGS, max_examples=10)
