"""Prometheus metrics: what vLLM counts, under its names with the prefix `alula:`, and what speculation does.

Counts of the engine are read when they are asked for, so a step pays nothing for them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from alula.engine.request import Request, RequestOutput
from alula.sequence import TokenEvent
from alula.server.engine_metrics import EngineCollector
from alula.server.ticket import Ticket

Metric = TypeVar("Metric", Counter, Histogram)
OTHER = "other"
CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000)
_FEW = (1, 2, 4, 8, 16, 32, 64, 128)
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("Seconds from a request's arrival to its first token.", _SECONDS),
    "inter_token_latency_seconds": (
        "Seconds between the chunks of one sample (a chunk may hold several tokens).",
        _SECONDS,
    ),
    "request_time_per_output_token_seconds": ("Per request, seconds per token after the first (TPOT).", _SECONDS),
    "e2e_request_latency_seconds": ("Seconds from a request's arrival to its end.", _SECONDS),
    "request_queue_time_seconds": ("Seconds from a request's arrival until it first ran.", _SECONDS),
    "request_prefill_time_seconds": ("Seconds from its first running to its first token.", _SECONDS),
    "request_decode_time_seconds": ("Seconds from its first token to its end.", _SECONDS),
    "request_inference_time_seconds": ("Seconds from its first running to its end.", _SECONDS),
    "request_prompt_tokens": ("Prompt tokens per request.", _TOKENS),
    "request_generation_tokens": ("Output tokens per request, all samples.", _TOKENS),
    "request_params_n": ("Samples asked for.", _FEW),
    "request_params_max_tokens": ("Most output tokens asked for.", _TOKENS),
    "iteration_tokens_total": ("Tokens committed per step.", _FEW),
}
_TAGGED = {
    "tag_draft_tokens": "Draft tokens proposed, by request tag.",
    "tag_checked_tokens": "Draft tokens checked, by request tag.",
    "tag_accepted_tokens": "Draft tokens accepted, by request tag.",
    "tag_committed_tokens": "Tokens committed, by request tag.",
    "tag_target_forwards": "Target forwards of sequences, by request tag.",
}


class Metrics:
    """Of one server; nothing is shared between two in one process. The bridge tells it what happens.

    max_tags: different tags that are told apart.
    """

    def __init__(self, model_name: str, *, max_tags: int) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._max_tags = max_tags
        self._tags: set[str] = set()
        self._last: dict[int, float] = {}
        self._histograms = {
            name: self._labelled(Histogram(f"alula:{name}", text, ("model_name",), buckets=b, registry=self.registry))
            for name, (text, b) in _HISTOGRAMS.items()
        }
        self._tagged = {
            name: Counter(f"alula:{name}", text, ("model_name", "tag"), registry=self.registry)
            for name, text in _TAGGED.items()
        }
        self._prompt_tokens = self._labelled(self._counter("prompt_tokens", "Prompt tokens of ended requests."))
        self._cached_tokens = self._labelled(
            self._counter("prompt_tokens_cached", "Prompt tokens of ended requests that were in the cache.")
        )
        self._ends = self._counter("request_success", "Ended samples.", "finished_reason")
        self._http = self._counter("http_requests", "HTTP requests.", "method", "path", "status")

    def watch(self, collector: EngineCollector) -> None:
        self.registry.register(collector)

    def exposition(self) -> bytes:
        return generate_latest(self.registry)

    def tag(self, value: str | None) -> str:
        """The label of a request's tag: its own while there are few of them."""
        if value is None or not re.fullmatch(r"[\w.\-]{1,64}", value):
            return OTHER
        if value not in self._tags and len(self._tags) >= self._max_tags:
            return OTHER
        self._tags.add(value)
        return value

    def answered(self, method: str, path: str, status: int) -> None:
        self._http.labels(self._model_name, method, path, str(status)).inc()

    def stepped(self, events: Sequence[TokenEvent]) -> None:
        now, count = time.perf_counter(), sum(len(event.tokens) for event in events)
        if count:
            self._histograms["iteration_tokens_total"].observe(count)
        for event in events:
            last = self._last.pop(event.sequence_id, None)
            if last is not None and event.tokens:
                self._histograms["inter_token_latency_seconds"].observe(now - last)
            if event.finish_reason is None:
                self._last[event.sequence_id] = now
            else:
                self._ends.labels(self._model_name, event.finish_reason.value).inc()

    def finished(self, ticket: Ticket, request: Request, output: RequestOutput) -> None:
        tokens = sum(len(sample.token_ids) for sample in output.outputs)
        # The engine's times begin when it was given the request: not before its form was compiled.
        before = max(time.perf_counter() - ticket.created - (output.latency_s or 0.0), 0.0)
        self._prompt_tokens.inc(len(output.prompt_token_ids))
        self._cached_tokens.inc(output.cached_tokens)
        values = {
            "request_prompt_tokens": len(output.prompt_token_ids),
            "request_generation_tokens": tokens,
            "request_params_n": request.params.n,
            "request_params_max_tokens": request.params.max_tokens,
            **_times(output, before),
        }
        for name, value in values.items():
            self._histograms[name].observe(value)
        self._count_tag(self.tag(ticket.tag), output)

    def _count_tag(self, tag: str, output: RequestOutput) -> None:
        for stats in (sample.stats for sample in output.outputs):
            counts = (stats.drafted, stats.checked, stats.accepted, stats.committed, stats.target_forwards)
            for counter, count in zip(self._tagged.values(), counts, strict=True):
                counter.labels(self._model_name, tag).inc(count)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"alula:{name}", text, ("model_name", *labels), registry=self.registry)

    def _labelled(self, metric: Metric) -> Metric:
        return metric.labels(self._model_name)


def _times(output: RequestOutput, before: float) -> dict[str, float]:
    """Seconds by histogram, as far as the request came. before: seconds from its arrival until the engine had it."""
    queued, first = (None if known is None else before + known for known in (output.queue_s, output.ttft_s))
    whole = before + (output.latency_s or 0.0)
    found = {"e2e_request_latency_seconds": whole}
    if queued is not None:
        found |= {"request_queue_time_seconds": queued, "request_inference_time_seconds": whole - queued}
    if first is not None:
        found |= {"time_to_first_token_seconds": first, "request_decode_time_seconds": whole - first}
        longest = max(len(sample.token_ids) for sample in output.outputs)
        if longest > 1:
            found["request_time_per_output_token_seconds"] = (whole - first) / (longest - 1)
    if first is not None and queued is not None:
        found["request_prefill_time_seconds"] = first - queued
    return found
