"""Faults of the engine's own: each costs as little as it can."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from alula.engine.engine import Engine
from alula.engine.recovery import MOST_FAULTS, EngineDead, SafeSteps
from alula.engine.request import Request
from alula.model.load import LoadedModel
from alula.sequence import SamplingParams
from alula.server.app import build_app
from alula.server.config import ServerConfig
from tests.engine.tiny import prompt_of, run
from tests.server.running import build_engine, serving
from tests.server.test_cancel import BYSTANDER, post, wait_for
from tests.server.test_completions import offline

TEXTS = [Request(tuple(prompt_of(9, seed=n)), SamplingParams(max_tokens=16, ignore_eos=True)) for n in range(3)]


def outputs(engine: Engine, steps: SafeSteps, requests: list[Request]) -> list[list[int]]:
    ids = [engine.add(request) for request in requests]
    while engine.has_work:
        steps.step()
    return [engine.pop(request_id).outputs[0].token_ids for request_id in ids]


def failing(function: Callable[..., Any], when: Callable[[int], bool]) -> Callable[..., Any]:
    calls: list[int] = []

    def called(*arguments: Any, **options: Any) -> Any:
        calls.append(len(calls))
        if when(calls[-1]):
            raise RuntimeError("broken")
        return function(*arguments, **options)

    return called


@pytest.mark.parametrize("forever", [False, True])
def test_a_drafter_that_raises_costs_no_request(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch, forever: bool
) -> None:
    expected = [output.outputs[0].token_ids for output in run(build_engine(tiny), TEXTS)]
    engine = build_engine(tiny)
    steps = SafeSteps(engine)
    monkeypatch.setattr(engine.drafter, "draft", failing(engine.drafter.draft, lambda call: forever or call % 3 == 1))
    assert outputs(engine, steps, TEXTS) == expected
    assert steps.drafting is not forever
    assert steps.drafter_faults == MOST_FAULTS if forever else steps.drafter_faults > MOST_FAULTS
    assert steps.faults == 0


def test_a_sequence_that_breaks_the_forward_fails_alone(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine(tiny)
    steps, forward = SafeSteps(engine), engine._runner.forward
    expected = [output.outputs[0].token_ids for output in run(engine, TEXTS)]

    def broken(plan: Any, packed: Any) -> Any:
        if any(item.sequence.id == ids[1] and len(item.sequence.output) > 3 for item in plan.items):
            raise RuntimeError("broken")
        return forward(plan, packed)

    monkeypatch.setattr(engine._runner, "forward", broken)
    ids = [engine.add(request) for request in TEXTS]
    events = []
    while engine.has_work:
        events += steps.step()
    found = [engine.pop(request_id).outputs[0] for request_id in ids]
    assert [each.token_ids for each in (found[0], found[2])] == [expected[0], expected[2]]
    assert (found[1].finish_reason, len(found[1].token_ids)) == ("error", 4)
    assert [event.sequence_id for event in events if event.fault] == [ids[1]]
    assert engine.cache.free_pages == engine.cache.total_pages


def test_when_all_fail_the_engine_is_dead(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine(tiny)
    steps = SafeSteps(engine)
    monkeypatch.setattr(engine._runner, "forward", failing(engine._runner.forward, lambda call: True))
    for _ in range(MOST_FAULTS - 1):
        engine.add(TEXTS[0])
        assert steps.step()[0].fault
    engine.add(TEXTS[0])
    with pytest.raises(EngineDead):
        steps.step()
    other = build_engine(tiny)
    monkeypatch.setattr(other._runner, "forward", failing(other._runner.forward, lambda call: True))
    for request in TEXTS:
        other.add(request)
    with pytest.raises(EngineDead, match="all of 3"):
        SafeSteps(other).step()


def test_a_fault_while_committing_is_never_stepped_over(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine(tiny)
    monkeypatch.setattr("alula.engine.engine.commit", failing(lambda: None, lambda call: True))
    engine.add(TEXTS[0])
    with pytest.raises(EngineDead, match="commit"):
        SafeSteps(engine).step()


def test_a_fault_while_planning_is_one_of_the_engine(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine(tiny)
    monkeypatch.setattr(engine.scheduler, "plan", failing(lambda: None, lambda call: True))
    engine.add(TEXTS[0])
    with pytest.raises(EngineDead, match="planning"):
        SafeSteps(engine).step()


def test_a_failed_request_is_a_500_and_others_go_on(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine(tiny)
    with serving(engine) as server:
        broken = failing(engine._runner.forward, lambda call: call in (2, 3))
        monkeypatch.setattr(engine._runner, "forward", broken)
        failed = post(server, BYSTANDER)
        assert (failed.status_code, failed.json()["error"]["code"]) == (500, "generation_failed")
        assert "RuntimeError" in failed.json()["error"]["message"]
        assert (
            post(server, BYSTANDER).json()["choices"][0]["text"] == offline(tiny, "by", max_tokens=60).outputs[0].text
        )
        server.idle()


def test_a_fault_of_a_handler_is_a_500_with_its_id(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*given: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("alula.server.routes.completion", broken)
    with serving(build_engine(tiny)) as server, httpx.Client(base_url=server.url) as client:
        replies = [client.post("/v1/completions", json=BYSTANDER, headers={"X-Request-Id": "mine"}) for _ in range(2)]
        metrics = client.get("/metrics").text
    assert [(reply.status_code, reply.headers["x-request-id"]) for reply in replies] == [(500, "mine")] * 2
    assert replies[0].json()["error"]["code"] == "internal_error"
    assert 'path="/v1/completions",status="500"} 2.0' in metrics
    assert [record.exc_info is not None for record in caplog.records if "mine failed" in record.message] == [True] * 2


def test_a_request_that_leaves_no_token_to_choose(tiny: LoadedModel) -> None:
    with serving(build_engine(tiny)) as server:
        body = BYSTANDER | {"allowed_token_ids": [5], "bad_words": [tiny.tokenizer.decode([5])]}
        whole = post(server, body)
        assert whole.status_code == 400
        assert "no token is left" in whole.json()["error"]["message"]
        stream = post(server, body | {"stream": True})
        assert stream.status_code == 200
        last = stream.text.split("\n\n")[-2]
        assert '"error"' in last and "no token is left" in last and "[DONE]" not in stream.text
        server.idle()


def test_a_dead_engine_is_told_to_everybody(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine(tiny)
    with serving(engine) as server:
        monkeypatch.setattr("alula.engine.engine.commit", failing(lambda: None, lambda call: True))
        assert httpx.get(f"{server.url}/health").status_code == 200
        for reply in (post(server, BYSTANDER), post(server, BYSTANDER)):
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_dead")
        health = httpx.get(f"{server.url}/health")
        assert health.status_code == 503
        assert "EngineDead" in health.json()["error"]["message"]
        assert "alula:engine_healthy" in httpx.get(f"{server.url}/metrics").text


def test_health_notices_a_step_that_does_not_end(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    engine, hold = build_engine(tiny), threading.Event()
    with serving(engine, stall_s=0.05) as server:
        forward = engine._runner.forward
        monkeypatch.setattr(engine._runner, "forward", lambda *given: hold.wait(20) and forward(*given))
        thread = threading.Thread(target=post, args=(server, BYSTANDER | {"max_tokens": 1}))
        thread.start()
        wait_for(lambda: httpx.get(f"{server.url}/health").status_code == 503)
        assert "in one step" in httpx.get(f"{server.url}/health").json()["error"]["message"]
        hold.set()
        thread.join()
        server.idle()
        wait_for(lambda: httpx.get(f"{server.url}/health").status_code == 200)


def test_a_fault_of_the_servers_own_is_a_500_in_reply_log_and_metrics(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "alula.access")
    with serving(build_engine(tiny)) as server:
        monkeypatch.setattr("alula.server.routes.completion", failing(lambda: None, lambda call: True))
        reply = post(server, BYSTANDER, headers={"x-request-id": "mine"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (500, "internal_error")
        assert reply.headers["x-request-id"] == "mine"
        counted = 'alula:http_requests_total{method="POST",model_name="tiny",path="/v1/completions",status="500"} 1.0'
        assert counted in httpx.get(f"{server.url}/metrics").text
    told = [record.facts["status"] for record in caplog.records if hasattr(record, "facts")]
    assert told[0] == 500 and "request mine failed" in caplog.text


def test_a_form_that_breaks_the_compiler_holds_no_place(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine(tiny)
    with serving(engine) as server:
        monkeypatch.setattr(engine.grammars, "_compile", failing(lambda: None, lambda call: True))
        reply = post(server, BYSTANDER | {"request_id": "mine", "structured_outputs": {"choice": ["yes"]}})
        assert (reply.status_code, reply.json()["error"]["code"]) == (500, "internal_error")
        assert server.bridge.samples == 0
        assert post(server, BYSTANDER | {"request_id": "mine"}).status_code == 200
        server.idle()


def test_a_thread_that_cannot_be_had_for_a_form_is_tried_for_again(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, body = build_engine(tiny), BYSTANDER | {"structured_outputs": {"choice": ["yes"]}, "ignore_eos": False}
    with serving(engine) as server:
        with monkeypatch.context() as patch:
            patch.setattr("alula.grammar.compiler.threading.Thread", failing(lambda: None, lambda call: True))
            assert post(server, body).status_code == 500
        assert post(server, body).json()["choices"][0]["text"] == "yes"
        server.idle()


def test_packages_are_there_before_the_first_requests(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imported first by several requests at once, on threads of their own, they made one of the requests fail."""
    imported: list[str] = []
    monkeypatch.setattr("alula.server.service.import_module", lambda name: imported.append(name))
    build_app(build_engine(tiny), ServerConfig())
    assert set(imported) == {"xgrammar", "transformers.utils.chat_template_utils"}
