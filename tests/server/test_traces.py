"""A span per request, in memory and over HTTP; whatever becomes of it, the request is answered."""

from __future__ import annotations

import builtins
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from alula.config import AlulaError
from alula.engine.metrics import STAGES
from alula.model.load import LoadedModel
from alula.server import traces as module
from alula.server.config import ServerConfig
from alula.server.traces import Traces, open_traces
from tests.server.running import Running, build_engine, serving
from tests.server.test_cancel import BYSTANDER, ENDLESS, Leaver, post
from tests.server.test_structured import SCHEMA

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
BODY: dict[str, Any] = BYSTANDER | {"prompt": "zebra zebra", "max_tokens": 24}


@contextmanager
def traced(tiny: LoadedModel, exporter: SpanExporter, **settings: Any) -> Iterator[Running]:
    with serving(build_engine(tiny), traces=Traces(exporter, "1"), **settings) as server:
        yield server


def spans_of(exporter: InMemorySpanExporter) -> list[ReadableSpan]:
    return sorted(exporter.get_finished_spans(), key=lambda span: span.start_time or 0)


def test_a_span_says_what_a_request_cost(tiny: LoadedModel) -> None:
    exporter = InMemorySpanExporter()
    with traced(tiny, exporter) as server:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-alula-tag": "code", "x-request-id": "mine"}
        start = time.time_ns()
        usage = post(server, BODY | {"n": 2, "seed": 3, "temperature": 0.5}, headers=headers).json()["usage"]
        seconds = dict(server.engine.times.seconds)
        steps, totals = server.engine.times.steps, server.engine.totals
        end = time.time_ns()
    (span,) = spans_of(exporter)
    assert (span.name, span.kind.name, span.status.is_ok) == ("text_completion tiny", "SERVER", True)
    assert f"{span.context.trace_id:032x}" == TRACE and span.parent and f"{span.parent.span_id:016x}" == PARENT
    assert start <= (span.start_time or 0) < (span.end_time or 0) <= end + 10**9
    found = dict(span.attributes or {})
    assert found["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 48
    assert found["gen_ai.usage.cache_read.input_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert found["gen_ai.response.finish_reasons"] == ("length", "length")
    asked = {name.rpartition(".")[2]: value for name, value in found.items() if name.startswith("gen_ai.request.")}
    assert {name: asked[name] for name in ("max_tokens", "temperature", "count")} == {
        "max_tokens": 24,
        "temperature": 0.5,
        "count": 2,
    }
    assert (found["alula.request.id"], found["gen_ai.response.id"]) == ("mine", "cmpl-mine")
    assert found["alula.request.tag"] == "code"
    speculation = {name.rpartition(".")[2]: value for name, value in found.items() if ".speculation." in name}
    assert speculation["drafted_tokens"] == totals.drafted > 0
    assert speculation["checked_tokens"] == totals.checked > 0
    assert speculation["accepted_tokens"] == totals.accepted
    assert speculation["tau"] == totals.tau >= 1
    assert found["alula.steps.count"] == steps > 10
    for stage in set(STAGES) - {"other"}:
        assert 0 < found[f"alula.steps.{stage}_seconds"] <= seconds[stage]
    assert 0 < found["gen_ai.latency.time_in_queue"] < found["gen_ai.latency.time_to_first_token"]
    assert found["gen_ai.latency.time_to_first_token"] < found["gen_ai.latency.e2e"]


def test_steps_before_a_request_ran_are_not_its_own(tiny: LoadedModel) -> None:
    exporter = InMemorySpanExporter()
    with traced(tiny, exporter) as server:
        for tokens in (24, 5):
            post(server, BODY | {"max_tokens": tokens, "speculation": {"off": True}})
        server.idle()
    counts = [dict(span.attributes or {})["alula.steps.count"] for span in spans_of(exporter)]
    assert counts == [24, 5]


def test_every_end_has_a_span_and_no_span_has_text(tiny: LoadedModel) -> None:
    exporter = InMemorySpanExporter()
    with traced(tiny, exporter, max_waiting=0, max_output_tokens=500) as server:
        answer = post(server, BODY).json()["choices"][0]["text"]
        chat = {"messages": [{"role": "user", "content": "zebra"}], "max_tokens": 4, "stream": True}
        post(server, chat, "/v1/chat/completions")
        leaver = Leaver(server, ENDLESS | {"prompt": "zebra", "stream": True})
        leaver.read_until(b"data: ")
        leaver.leave()
        server.idle()
        impossible = BODY | {"allowed_token_ids": [5], "bad_words": [tiny.tokenizer.decode([5])]}
        assert post(server, impossible).status_code == 400
        broken = SCHEMA | {"properties": {"zebra": {"$ref": "#/nowhere"}}}
        assert post(server, BODY | {"structured_outputs": {"json": broken}}).status_code == 400
        assert post(server, BODY | {"n": 40}).status_code == 429
        server.idle()
    spans = spans_of(exporter)
    kinds = [dict(span.attributes or {}).get("error.type") for span in spans]
    assert kinds == [None, None, None, "generation_failed", "400", "queue_full"]
    assert [span.status.is_ok for span in spans] == [True] * 3 + [False] * 3
    reasons = [dict(span.attributes or {}).get("gen_ai.response.finish_reasons") for span in spans]
    assert reasons[1:4] == [("length",), ("abort",), ("error",)]
    assert [span.name.split()[0] for span in spans[:2]] == ["text_completion", "chat"]
    written = json.dumps([json.loads(span.to_json()) for span in spans], ensure_ascii=False)
    assert "zebra" not in written and answer not in written


def test_an_unsampled_trace_is_not_recorded(tiny: LoadedModel) -> None:
    exporter = InMemorySpanExporter()
    with traced(tiny, exporter) as server:
        post(server, BODY, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
        post(server, BODY, headers={"traceparent": "nonsense"})
    (span,) = spans_of(exporter)
    assert span.parent is None


class Collector:
    """A collector that keeps what it is sent, or answers with an error, or not at all."""

    def __init__(self, status: int = 200, hold: threading.Event | None = None) -> None:
        self.paths: list[str] = []
        self.spans: list[Any] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                import gzip

                data = self.rfile.read(int(self.headers["content-length"]))
                data = gzip.decompress(data) if self.headers.get("content-encoding") == "gzip" else data
                message = ExportTraceServiceRequest.FromString(data)
                for resource in message.resource_spans:
                    for scope in resource.scope_spans:
                        collector.spans += scope.spans
                collector.paths.append(self.path)
                if hold is not None:
                    hold.wait(30)
                self.send_response(status)
                self.end_headers()

            def log_message(self, format: str, *values: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.mark.parametrize("path", ["", "/", "/v1/traces"])
def test_a_collector_gets_otlp(tiny: LoadedModel, path: str) -> None:
    collector = Collector()
    with serving(build_engine(tiny), otlp_traces_endpoint=collector.url + path) as server:
        post(server, BODY)
    collector.server.shutdown()
    (span,) = collector.spans
    assert collector.paths == ["/v1/traces"]
    assert span.name == "text_completion tiny"
    values = {entry.key: entry.value for entry in span.attributes}
    assert values["gen_ai.usage.output_tokens"].int_value == 24
    assert values["alula.steps.forward_seconds"].double_value > 0


@pytest.mark.parametrize("fault", ["closed", "500", "silent"])
def test_a_collector_that_fails_harms_nobody(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setattr(module, "LAST_SPANS_S", 0.3)
    hold = threading.Event()
    collector = Collector(500, hold if fault == "silent" else None)
    if fault == "closed":
        collector.server.server_close()
    with serving(build_engine(tiny), otlp_traces_endpoint=collector.url) as server:
        assert post(server, BODY).status_code == 200
        assert post(server, BODY | {"stream": True}).text.endswith("data: [DONE]\n\n")
        server.idle()
        start = time.monotonic()
    assert time.monotonic() - start < 5, "the end is held up"
    hold.set()


def test_a_span_that_cannot_be_written_harms_nobody(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_attributes", lambda ticket, operation: 1 / 0)
    exporter = InMemorySpanExporter()
    with traced(tiny, exporter) as server:
        assert post(server, BODY).status_code == 200
        server.idle()
    assert not exporter.get_finished_spans()


def test_without_the_extra_the_flag_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    found = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(f"No module named {name!r}")
        return found(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert open_traces(None, "1") is None
    with pytest.raises(AlulaError, match=r"otlp_traces_endpoint wants the extra `otel` .* pip install 'alula\[otel\]'"):
        open_traces("http://127.0.0.1:4318", "1")


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4318", "grpc://x:4317", "http://", "http://a b/"])
def test_what_is_no_endpoint(endpoint: str) -> None:
    with pytest.raises(AlulaError, match="otlp_traces_endpoint"):
        ServerConfig(otlp_traces_endpoint=endpoint)
