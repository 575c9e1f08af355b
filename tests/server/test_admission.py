"""Who is let in: keys, sizes, a bounded queue; and what is noted of it."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from alula.config import AlulaError
from alula.model.load import LoadedModel
from alula.server.config import ServerConfig
from alula.server.gate import Keys
from alula.server.logs import JsonLines, TextLines
from alula.server.service import load_processors, read_defaults
from tests.server.running import Running, build_engine, serving
from tests.server.test_cancel import BYSTANDER, ENDLESS, Leaver, post, wait_for


def test_a_full_queue_is_429_with_retry_after(tiny: LoadedModel) -> None:
    with serving(build_engine(tiny, max_num_seqs=1), max_waiting=1) as server:
        first = Leaver(server, ENDLESS | {"stream": True})
        first.read_until(b"data: ")
        replies: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: replies.append(post(server, BYSTANDER)))
        thread.start()
        wait_for(lambda: server.bridge.samples == 2)
        refused = post(server, BYSTANDER | {"stream": True})
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"
        with pytest.raises(openai.RateLimitError):
            server.client().completions.create(model="tiny", prompt="by")
        first.leave()
        thread.join()
        assert replies[0].json()["choices"][0]["finish_reason"] == "length"
        server.idle()
        assert post(server, BYSTANDER).status_code == 200


def test_keys(tiny: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALULA_API_KEYS", "from-the-environment, another")
    (tmp_path / "keys").write_text("from-the-file\n")
    settings = {"api_key": ("from-a-flag",), "api_key_file": tmp_path / "keys", "metrics_without_key": True}
    with serving(build_engine(tiny), **settings) as server:
        for key in ("from-the-environment", "another", "from-the-file", "from-a-flag"):
            assert server.client(api_key=key).models.list().data[0].id == "tiny"
        with pytest.raises(openai.AuthenticationError, match="API key"):
            server.client(api_key="from-a-fla").models.list()
        paths = ["/v1/models", "/version", "/openapi.json", "/tokenize", "/v1/requests/x", "/nothing"]
        assert {httpx.get(f"{server.url}{path}").status_code for path in paths} == {401}
        assert post(server, BYSTANDER).status_code == 401
        assert [httpx.get(f"{server.url}{path}").status_code for path in ("/health", "/metrics")] == [200, 200]
        odd = {"authorization": "Bearer schlüssel".encode()}
        assert httpx.get(f"{server.url}/v1/models", headers=odd).status_code == 401


def test_keys_that_no_header_can_hold_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text("schlüssel\n", encoding="utf-8")
    with pytest.raises(AlulaError, match="api_key_file"):
        ServerConfig(api_key_file=tmp_path / "keys").keys()
    monkeypatch.setenv("ALULA_API_KEYS", "good, schlüssel")
    with pytest.raises(AlulaError, match="ALULA_API_KEYS"):
        ServerConfig().keys()


def test_every_key_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time an answer takes does not say which key came close, nor how many there are before it."""
    compared: list[bytes] = []
    keys = Keys(("one", "two", "three"))
    monkeypatch.setattr(
        "alula.server.gate.hmac.compare_digest", lambda given, known: compared.append(known) or given == known
    )
    assert keys.admit("Bearer one")
    assert len(compared) == 3
    assert len({len(digest) for digest in compared}) == 1
    assert not keys.admit("Basic one") and not keys.admit(None) and not keys.admit("Bearer ")


def test_metrics_want_a_key_too_unless_told_otherwise(tiny: LoadedModel) -> None:
    with serving(build_engine(tiny), api_key=("k",)) as server:
        assert httpx.get(f"{server.url}/metrics").status_code == 401


def test_large_bodies(tiny: LoadedModel) -> None:
    with serving(build_engine(tiny), max_body_kib=2) as server:
        large = json.dumps({"prompt": "x" * 3000}).encode()
        headers = {"content-type": "application/json"}
        known = httpx.post(f"{server.url}/v1/completions", content=large, headers=headers)
        unknown = httpx.post(
            f"{server.url}/v1/completions", content=iter([large[:1500], large[1500:]]), headers=headers
        )
        for reply in (known, unknown):
            assert reply.status_code == 413
            assert "larger than 2048 bytes" in reply.json()["error"]["message"]
        assert post(server, BYSTANDER | {"max_tokens": 1}).status_code == 200


def test_cross_origin_requests_only_by_option(server: Running, tiny: LoadedModel) -> None:
    asked = {"origin": "https://page.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in httpx.get(f"{server.url}/health", headers=asked).headers
    with serving(build_engine(tiny), cors_origins=("https://page.example",), api_key=("k",)) as other:
        reply = httpx.options(f"{other.url}/v1/completions", headers=asked)
        assert reply.headers["access-control-allow-origin"] == "https://page.example"
        refused = httpx.options(f"{other.url}/v1/completions", headers=asked | {"origin": "https://other.example"})
        assert "access-control-allow-origin" not in refused.headers


def test_request_ids(server: Running) -> None:
    body = BYSTANDER | {"max_tokens": 1}
    given = post(server, body, headers={"x-request-id": "abc-1"})
    assert (given.headers["x-request-id"], given.json()["id"]) == ("abc-1", "cmpl-abc-1")
    fresh = [post(server, body, headers={"x-request-id": "not one\u00e9".encode("latin-1")}) for _ in range(2)]  # type: ignore[dict-item]
    assert len({reply.headers["x-request-id"] for reply in fresh}) == 2
    assert all(reply.json()["id"] == f"cmpl-{reply.headers['x-request-id']}" for reply in fresh)
    own = post(server, body | {"request_id": "mine"})
    assert (own.json()["id"], own.headers["x-request-id"]) == ("cmpl-mine", "mine")


def test_a_path_cannot_forge_a_line_of_the_log(tiny: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "alula.access")
    with serving(build_engine(tiny)) as server:
        assert httpx.get(f"{server.url}/v1/models/%0Ainfo%20GET%20/é").status_code == 404
    (line,) = TextLines().format(caplog.records[0]).splitlines()
    assert "GET /v1/models/%0Ainfo%20GET%20/%C3%A9 404 request_id=" in line and line.count(" 404 ") == 1


@pytest.mark.parametrize("kept", [False, True])
def test_logs_hold_prompts_only_when_asked(tiny: LoadedModel, caplog: pytest.LogCaptureFixture, kept: bool) -> None:
    caplog.set_level(logging.INFO)
    secret = "a very private prompt"
    with serving(build_engine(tiny), log_prompts=kept) as server:
        found = post(server, {"prompt": secret, "max_tokens": 3, "ignore_eos": True})
        stream = post(server, {"prompt": secret, "max_tokens": 3, "ignore_eos": True, "stream": True})
        post(server, {"prompt": secret, "n": 0})
    assert (found.status_code, stream.status_code) == (200, 200)
    records = [record for record in caplog.records if record.name == "alula.access"]
    assert [record.facts["status"] for record in records] == [200, 200, 400]  # type: ignore[attr-defined]
    lines = [kind().format(record) for record in records for kind in (JsonLines, TextLines)]
    entries = [json.loads(line) for line in lines[::2]]
    assert entries[0]["completion_tokens"] == entries[1]["completion_tokens"] == 3
    assert entries[0]["request_id"] in lines[1]
    assert "n: " in entries[2]["error"]
    assert any(secret in line for line in lines) == kept
    assert kept == (entries[0].get("answers") == [found.json()["choices"][0]["text"]])


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"port": 70000}, "port"),
        ({"max_waiting": -1}, "max_waiting"),
        ({"max_num_seqs": True}, "max_num_seqs"),
        ({"drain_s": 0.0}, "drain_s"),
        ({"request_timeout_s": float("nan")}, "request_timeout_s"),
        ({"api_key": ("",)}, "api_key"),
        ({"api_key": ("a\x1bb",)}, "api_key"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_bad_settings(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(AlulaError, match=f"^{word}"):
        ServerConfig(**settings)


def test_registered_processors() -> None:
    assert load_processors(("double=operator:mul",))["double"](3, 2) == 6  # type: ignore[arg-type, comparison-overlap]
    for bad in ("x", "x=.relative:f", "x=operator", "x=operator:nothing", "x=no.module:f", "x=string:digits"):
        with pytest.raises(AlulaError, match="logits_processor"):
            load_processors((bad,))


def test_defaults_of_the_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(AlulaError, match="does not exist"):
        read_defaults(tmp_path)
    path = tmp_path / "generation_config.json"
    path.write_text('{"temperature": 0.2, "top_k": 50, "do_sample": true, "eos_token_id": 2}')
    assert read_defaults(tmp_path) == {"temperature": 0.2, "top_k": 50}
    path.write_text('{"temperature": 0.2, "do_sample": false}')
    assert read_defaults(tmp_path) == {"temperature": 0.0}
    for text, reason in (("{", "not valid JSON"), ("[]", "no JSON object"), ('{"temperature": "0.7"}', "temperature")):
        path.write_text(text)
        with pytest.raises(AlulaError, match=reason):
            read_defaults(tmp_path)


def test_keys_of_odd_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys"
    config = ServerConfig(api_key_file=path)
    with pytest.raises(AlulaError, match=r"api_key_file .* cannot be read"):
        config.keys()
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    assert config.keys() == ("one", "two")
    for data, reason in ((b"\xff\xfe", "not UTF-8"), ("schlüssel".encode(), "ASCII"), (b"\n", "no key")):
        path.write_bytes(data)
        with pytest.raises(AlulaError, match=reason):
            config.keys()
    monkeypatch.setenv("ALULA_API_KEYS", "ü")
    with pytest.raises(AlulaError, match="ALULA_API_KEYS"):
        ServerConfig().keys()


def test_what_a_template_complains_of_is_not_logged(
    tiny: LoadedModel, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny.tokenizer, "chat_template", "{{ raise_exception(messages[0]['content']) }}")
    caplog.set_level(logging.INFO)
    with serving(build_engine(tiny)) as server:
        found = post(server, {"messages": [{"role": "user", "content": "very private"}]}, "/v1/chat/completions")
    assert "very private" in found.json()["error"]["message"]
    assert "very private" not in "".join(JsonLines().format(record) for record in caplog.records)
    assert any(getattr(record, "facts", {}).get("error") == "messages refused" for record in caplog.records)


def test_paths_cannot_write_lines_of_the_log(tiny: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with serving(build_engine(tiny)) as server:
        reply = httpx.get(f"{server.url}/x%0aforged%1b[31m")
    assert "/x" in reply.json()["error"]["message"]
    (record,) = (record for record in caplog.records if record.name == "alula.access")
    assert "\n" not in TextLines().format(record) and "\x1b" not in TextLines().format(record)
    assert "forged" in record.getMessage()
