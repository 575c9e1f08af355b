"""Whoever leaves, is told to stop, or runs out of time gives its pages back at once; others do not notice."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from alula.model.load import LoadedModel
from tests.server.running import Running, build_engine, serving
from tests.server.test_completions import offline

ENDLESS: dict[str, Any] = {"prompt": "hello", "max_tokens": 490, "ignore_eos": True, "temperature": 0}
ENDLESS |= {"speculation": {"off": True}}  # so that its tokens take as many steps
BYSTANDER: dict[str, Any] = {"prompt": "by", "max_tokens": 60, "ignore_eos": True, "temperature": 0}


def post(server: Running, body: dict[str, Any], path: str = "/v1/completions", **options: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60, **options)


class Leaver:
    """A raw client that sends a request and is gone as soon as it likes."""

    def __init__(self, server: Running, body: dict[str, Any], path: str = "/v1/completions") -> None:
        host, port = server.url.removeprefix("http://").split(":")
        self._socket = socket.create_connection((host, int(port)), timeout=30)
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        self._socket.sendall(head.encode() + data)
        self._seen = b""

    def read_until(self, wanted: bytes) -> bytes:
        """All that has come by then."""
        while wanted not in self._seen:
            more = self._socket.recv(4096)
            assert more, "the server closed the connection before"
            self._seen += more
        return self._seen

    def leave(self) -> None:
        """With a reset, as the system does for a process that was killed."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        self._socket.close()


def wait_for(condition: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("extra", [{"stream": True}, {"stream": True, "n": 3}, {"stream": True, "prompt": ["a", "b"]}])
def test_a_client_that_leaves_a_stream(server: Running, tiny: LoadedModel, extra: dict[str, Any]) -> None:
    other: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: other.append(post(server, BYSTANDER)))
    leaver = Leaver(server, ENDLESS | extra)
    leaver.read_until(b"data: ")
    thread.start()
    steps = server.engine.times.steps
    leaver.leave()
    thread.join()
    server.idle()
    assert server.engine.times.steps - steps < 400, "nobody decodes 490 tokens for nobody"
    assert other[0].json()["choices"][0]["text"] == offline(tiny, "by", max_tokens=60).outputs[0].text


_KILLED = """
import json, socket, sys
host, port, body = sys.argv[1:]
link = socket.create_connection((host, int(port)))
head = f"POST /v1/completions HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: {len(body)}\\r\\n"
link.sendall(f"{head}Content-Type: application/json\\r\\n\\r\\n{body}".encode())
seen = b""
while b"data: " not in seen:
    seen += link.recv(4096)
print("streaming", flush=True)
while link.recv(64):
    pass
"""
"""A client that reads a stream and goes on reading it."""


def test_a_client_that_is_killed_in_the_middle_of_its_stream(server: Running, tiny: LoadedModel) -> None:
    """kill -9 of a process: its pages are free at once, and a request beside it has the text it has alone."""
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps(ENDLESS | {"stream": True, "n": 2})
    other: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: other.append(post(server, BYSTANDER)))
    with subprocess.Popen([sys.executable, "-c", _KILLED, host, port, body], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"streaming\n"
        thread.start()
        steps = server.engine.times.steps
        process.kill()
        assert process.wait(20) == -signal.SIGKILL
    thread.join()
    server.idle()
    assert server.engine.times.steps - steps < 400, "nobody decodes 490 tokens for nobody"
    assert other[0].json()["choices"][0]["text"] == offline(tiny, "by", max_tokens=60).outputs[0].text


@pytest.mark.parametrize("extra", [{}, {"n": 3}, {"prompt": ["a", "b"]}])
def test_a_client_that_leaves_while_it_waits_for_the_whole(server: Running, extra: dict[str, Any]) -> None:
    leaver = Leaver(server, ENDLESS | extra)
    wait_for(lambda: server.engine.has_work)
    steps = server.engine.times.steps
    leaver.leave()
    server.idle()
    assert server.engine.times.steps - steps < 400, "nobody decodes 490 tokens for nobody"


def test_an_abort_by_id(server: Running) -> None:
    replies: list[httpx.Response] = []
    body = ENDLESS | {"request_id": "mine", "n": 2}
    thread = threading.Thread(target=lambda: replies.append(post(server, body)))
    thread.start()
    wait_for(lambda: server.engine.totals.committed > 0 and server.engine.has_work)
    assert post(server, BYSTANDER | {"request_id": "mine"}).status_code == 409
    assert httpx.delete(f"{server.url}/v1/requests/cmpl-mine").json() == {"id": "cmpl-mine", "aborted": True}
    thread.join()
    found = replies[0].json()
    assert replies[0].status_code == 200
    assert [choice["finish_reason"] for choice in found["choices"]] == ["abort", "abort"]
    assert 0 < found["usage"]["completion_tokens"] < 980
    assert httpx.delete(f"{server.url}/v1/requests/cmpl-mine").status_code == 404


def test_a_deadline(server: Running) -> None:
    start = time.monotonic()
    found = post(server, ENDLESS | {"timeout_s": 0.2}).json()["choices"][0]
    assert (found["finish_reason"], found["stop_reason"]) == ("abort", "deadline")
    assert time.monotonic() - start < 10
    events = post(server, ENDLESS | {"timeout_s": 0.2, "stream": True}).text.split("\n\n")
    assert events[-2] == "data: [DONE]"
    assert json.loads(events[-3].removeprefix("data: "))["choices"][0]["stop_reason"] == "deadline"


def test_a_deadline_in_the_queue(tiny: LoadedModel) -> None:
    with serving(build_engine(tiny, max_num_seqs=1), request_timeout_s=30.0) as server:
        leaver = Leaver(server, ENDLESS | {"stream": True, "n": 8})
        leaver.read_until(b"data: ")
        found = post(server, BYSTANDER | {"timeout_s": 0.05}).json()
        assert found["choices"][0]["finish_reason"] == "abort"
        assert found["usage"]["completion_tokens"] == 0
        scored = post(server, BYSTANDER | {"timeout_s": 0.05, "echo": True, "logprobs": 1}).json()["choices"][0]
        assert (scored["text"], scored["logprobs"]) == ("by", None), "no scores of a prompt that was never read"
        leaver.leave()
        server.idle()


def test_running_requests_finish_when_the_server_stops_and_new_ones_are_refused(tiny: LoadedModel) -> None:
    with serving(build_engine(tiny), drain_s=60.0) as server:
        client = httpx.Client(timeout=60)
        client.get(f"{server.url}/health").raise_for_status()  # a connection that stays open
        leaver = Leaver(server, BYSTANDER | {"stream": True})
        leaver.read_until(b"data: ")
        server.bridge.draining = True
        refused = client.post(f"{server.url}/v1/completions", json=BYSTANDER)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert client.get(f"{server.url}/health").status_code == 503
        server.server.should_exit = True
        assert b'"finish_reason":"length"' in leaver.read_until(b"[DONE]")
    assert not server.engine.has_work


def test_the_drain_has_a_limit(tiny: LoadedModel) -> None:
    with serving(build_engine(tiny), drain_s=0.2) as server:
        leaver = Leaver(server, ENDLESS | {"stream": True, "n": 4})
        leaver.read_until(b"data: ")
        server.server.should_exit = True
        seen = leaver.read_until(b"[DONE]")
        assert b'"finish_reason":"abort","stop_reason":"shutdown"' in seen
    assert not server.engine.has_work
    assert server.engine.cache.free_pages == server.engine.cache.total_pages


@pytest.mark.slow
def test_sigterm_ends_the_command(tiny_folder: Path) -> None:
    """`alula serve` in a process of its own: it drains, hurries if told twice, and exits with 0."""
    command = [sys.executable, "-m", "alula", "serve", "--model", str(tiny_folder), "--dtype", "fp32", "--port", "0"]
    command += ["--kv-cache-mib", "8", "--drain-s", "60", "--log-format", "json", "--served-model-name", "tiny"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_env()) as process:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        url = line.split()[-1]
        assert line.startswith("alula serves tiny at http://127.0.0.1:")
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=ENDLESS | {"stream": True, "n": 8}, timeout=60
        ) as reply:
            lines = reply.iter_lines()
            assert next(lines).startswith("data: ")
            process.send_signal(signal.SIGTERM)
            wait_for(lambda: not _takes_requests(url))
            assert '"finish_reason":null' in next(line for line in lines if line)
            process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        errors = process.stderr.read()
        assert process.wait(60) == 0
    logged = [json.loads(line) for line in errors.splitlines()]
    done = next(entry for entry in logged if entry.get("path") == "/v1/completions")
    assert (done["status"], done["finish"]) == (200, ["abort"] * 8)
    assert "hello" not in errors


def _env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def _takes_requests(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False
