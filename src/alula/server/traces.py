"""OpenTelemetry traces, by option: one span per request, with what its steps cost. Never prompts or answers.

Names are those of OpenTelemetry's semantic conventions for generative AI where there are such, vLLM's for the
latencies, and `alula.*` for what speculation did. Packages of the extra `otel` are imported only when it is asked for.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from alula.config import AlulaError
from alula.engine.metrics import STAGES, DraftStats
from alula.engine.request import RequestOutput
from alula.sequence import SamplingParams
from alula.server.errors import ApiError
from alula.server.ticket import Ticket

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

LAST_SPANS_S = 3.0
"""When the server ends, seconds for what is not exported yet."""
_PATH = "/v1/traces"
_log = logging.getLogger("alula.traces")


class RequestSpan:
    """Of one request, from its body to its end. Nothing that goes wrong in here reaches the request."""

    def __init__(self, span: Span, operation: str) -> None:
        self._span = span
        self._operation = operation

    def end(self, ticket: Ticket, error: ApiError | None = None) -> None:
        try:
            self._span.set_attributes(_attributes(ticket, self._operation))
            if error is not None:
                self._fail(error.code or str(error.status))
            elif any(sample.error for output in ticket.outputs for sample in output.outputs):
                self._fail("generation_failed")
            self._span.end()
        except Exception:  # noqa: BLE001 (a trace is worth less than any request)
            _log.warning("a span was lost", exc_info=True)

    def _fail(self, kind: str) -> None:
        """Without the message, which may quote the request."""
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attribute("error.type", kind)
        self._span.set_status(Status(StatusCode.ERROR))


class Traces:
    """Spans of one server, sent by a thread of their own. exporter: where they go."""

    def __init__(self, exporter: SpanExporter, version: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.version": version} | _service_name())
        self._provider: TracerProvider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("alula", version)

    def begin(self, headers: Mapping[str, str], kind: str, model: str) -> RequestSpan:
        """A span in the trace that `traceparent` names, or in a new one. kind: of the reply's object."""
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        operation = "text_completion" if kind == "text_completion" else "chat"
        parent = TraceContextTextMapPropagator().extract(dict(headers), Context())
        return RequestSpan(self._tracer.start_span(f"{operation} {model}", parent, SpanKind.SERVER), operation)

    def close(self) -> None:
        """Sends what is left, for as long as LAST_SPANS_S: a collector that does not answer holds up nobody."""
        sender = threading.Thread(target=self._provider.shutdown, daemon=True)
        sender.start()
        sender.join(LAST_SPANS_S)


def open_traces(endpoint: str | None, version: str) -> Traces | None:
    """None without an endpoint. Raises AlulaError where the extra `otel` is not installed."""
    if endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        exporter = OTLPSpanExporter(endpoint=_whole(endpoint))
    except ImportError as error:
        raise AlulaError(
            f"otlp_traces_endpoint wants the extra `otel` ({error}): pip install 'alula[otel]', or leave the flag out"
        ) from None
    return Traces(exporter, version)


def _whole(endpoint: str) -> str:
    """With OTLP's path where only a host is named."""
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + _PATH


def _service_name() -> dict[str, str]:
    """Resource.create takes OTEL_SERVICE_NAME from the environment, which goes before ours."""
    return {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "alula"}


def _attributes(ticket: Ticket, operation: str) -> dict[str, Any]:
    params, outputs = ticket.requests[0].params, ticket.outputs
    found: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "alula",
        "gen_ai.response.id": ticket.keys[-1],
        "alula.request.id": ticket.keys[0],
        "alula.request.prompts": len(ticket.requests),
        "gen_ai.usage.input_tokens": sum(len(request.prompt_token_ids) for request in ticket.requests),
        **_asked(params),
    }
    if ticket.tag is not None:
        found["alula.request.tag"] = ticket.tag
    if outputs:
        found |= _used(outputs) | _latencies(outputs) | _speculation(outputs) | _steps(outputs)
    return found


def _asked(params: SamplingParams) -> dict[str, Any]:
    return {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.presence_penalty": params.presence_penalty,
        "gen_ai.request.choice.count": params.n,
        "gen_ai.output.type": "text" if params.structured_outputs is None else params.structured_outputs.kind,
    }


def _used(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    samples = [sample for output in outputs for sample in output.outputs]
    return {
        "gen_ai.usage.output_tokens": sum(len(sample.token_ids) for sample in samples),
        "gen_ai.usage.cache_read.input_tokens": sum(output.cached_tokens for output in outputs),
        "gen_ai.response.finish_reasons": [sample.finish_reason or "error" for sample in samples],
    }


def _latencies(outputs: Sequence[RequestOutput]) -> dict[str, float]:
    """Seconds, of the slowest prompt of the request."""
    values = {
        "gen_ai.latency.time_in_queue": [output.queue_s for output in outputs],
        "gen_ai.latency.time_to_first_token": [output.ttft_s for output in outputs],
        "gen_ai.latency.e2e": [output.latency_s for output in outputs],
    }
    known = {name: [second for second in seconds if second is not None] for name, seconds in values.items()}
    return {name: max(seconds) for name, seconds in known.items() if seconds}


def _speculation(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    stats = DraftStats()
    for output in outputs:
        for sample in output.outputs:
            stats.add(sample.stats)
    return {
        "alula.speculation.drafted_tokens": stats.drafted,
        "alula.speculation.checked_tokens": stats.checked,
        "alula.speculation.accepted_tokens": stats.accepted,
        "alula.speculation.acceptance_rate": stats.acceptance_rate,
        "alula.speculation.target_forwards": stats.target_forwards,
        "alula.speculation.tau": stats.tau,
    }


def _steps(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Of the engine while the request ran; whatever ran beside it took part in them."""
    times = [output.times for output in outputs if output.times is not None]
    if not times:
        return {}
    longest = max(times, key=lambda each: each.steps)
    found: dict[str, Any] = {f"alula.steps.{stage}_seconds": longest.seconds[stage] for stage in STAGES}
    return found | {"alula.steps.count": longest.steps}
