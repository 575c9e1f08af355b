"""What the engine itself counts, as Prometheus metrics, read at the moment they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from alula.engine.memory import drafter_weight_bytes, memory_bytes
from alula.server.bridge import Bridge

_NODES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 64)
_ACCEPTED = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16)


class EngineCollector(Collector):
    """Reads from another thread than the engine's: plain numbers and copies of dictionaries, never a walk over one."""

    def __init__(self, bridge: Bridge, model_name: str) -> None:
        self._bridge = bridge
        self._engine = bridge.engine
        self._label = model_name
        self._weights = drafter_weight_bytes(bridge.engine)

    def describe(self) -> list[Metric]:
        """Nothing is read when the collector is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._serving()
        yield from self._speculation()
        yield from self._resources()

    def _serving(self) -> Iterator[Metric]:
        scheduler, cache = self._engine.scheduler, self._engine.cache
        yield self._gauge("num_requests_running", "Samples that run.", len(scheduler.running))
        yield self._gauge("num_requests_waiting", "Samples that wait for a place.", len(scheduler.waiting))
        used = cache.total_pages - cache.free_pages
        yield self._gauge(
            "kv_cache_usage_perc", "Share of the KV pages that are held, 0 to 1.", used / cache.total_pages
        )
        yield self._gauge("kv_pages_used", "KV pages held by samples.", used)
        yield self._gauge("kv_pages_cached", "KV pages kept only for reuse.", cache.cached_pages)
        yield self._gauge("kv_pages_total", "KV pages.", cache.total_pages)
        yield self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", scheduler.prefix_queries)
        yield self._counter("prefix_cache_hits", "Tokens found in the prefix cache.", scheduler.prefix_hits)
        yield self._counter(
            "num_preemptions", "Samples that lost their pages and were recomputed.", scheduler.preemptions
        )
        yield self._counter("generation_tokens", "Tokens committed.", self._engine.totals.committed)

    def _speculation(self) -> Iterator[Metric]:
        totals = self._engine.totals
        yield self._counter("spec_decode_num_drafts", "Trees with more than a root.", totals.drafts)
        yield self._counter("spec_decode_num_draft_tokens", "Draft tokens proposed.", totals.drafted)
        yield self._counter("spec_decode_num_checked_tokens", "Draft tokens that a walk met.", totals.checked)
        yield self._counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.", totals.accepted)
        positions = {str(depth - 1): n for depth, n in dict(totals.accepted_by_depth).items()}
        name = "spec_decode_num_accepted_tokens_per_pos"
        yield self._counters(name, "Accepted draft tokens by depth, from 0.", "position", positions)
        tried = {str(depth - 1): n for depth, n in dict(totals.tried_by_depth).items()}
        yield self._counters("spec_decode_num_tried_per_pos", "Walks that met drafts, by depth.", "position", tried)
        rejected = {str(depth): n for depth, n in dict(totals.first_rejection_depth).items()}
        yield self._counters("spec_decode_first_rejection", "Walks by the depth that ended them.", "depth", rejected)
        yield self._counter(
            "target_forwards", "Target forwards of sequences (a batch of 8 counts 8).", totals.target_forwards
        )
        yield self._counter("verified_rows", "Tree nodes verified, roots included.", totals.verified_rows)
        yield self._histogram("tree_nodes", "Nodes per tree, the root included.", dict(totals.tree_nodes), _NODES)
        lengths = dict(totals.accepted_lengths)
        yield self._histogram("accepted_tokens_per_forward", "Draft tokens accepted per forward.", lengths, _ACCEPTED)

    def _resources(self) -> Iterator[Metric]:
        engine, steps = self._engine, self._bridge.steps
        yield self._counter("steps", "Steps of the engine.", engine.times.steps)
        seconds = dict(engine.times.seconds)
        yield self._counters("step_stage_seconds", "Seconds by stage of a step.", "stage", seconds)
        memory = memory_bytes(engine, self._weights)
        family = GaugeMetricFamily("alula:memory_bytes", "Bytes held.", labels=("model_name", "part"))
        for part, size in memory.items():
            family.add_metric((self._label, part), size)
        yield family
        yield self._gauge("engine_healthy", "1 while the engine makes progress.", self._bridge.unhealthy is None)
        yield self._gauge("drafting", "0 after the drafter was left out for its faults.", steps.drafting)
        yield self._counter("drafter_faults", "Steps that were repeated without the drafter.", steps.drafter_faults)
        yield self._counter("step_faults", "Steps that had to be taken one sample at a time.", steps.faults)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"alula:{name}", text, labels=("model_name",))
        family.add_metric((self._label,), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"alula:{name}", text, labels=("model_name",))
        family.add_metric((self._label,), value)
        return family

    def _counters(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(f"alula:{name}", text, labels=("model_name", label))
        for key in sorted(values):
            family.add_metric((self._label, key), values[key])
        return family

    def _histogram(self, name: str, text: str, counts: Mapping[int, int], buckets: tuple[int, ...]) -> Metric:
        below = [(str(float(top)), sum(n for value, n in counts.items() if value <= top)) for top in buckets]
        family = HistogramMetricFamily(f"alula:{name}", text, labels=("model_name",))
        total = sum(counts.values())
        family.add_metric((self._label,), [*below, ("+Inf", total)], sum(value * n for value, n in counts.items()))
        return family
