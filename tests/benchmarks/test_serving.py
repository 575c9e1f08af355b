"""The pure parts of benchmarks/serving: the mix, the figures, and what they catch."""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import capacity
import load
import pytest
import servers
import soak
from client import Answer, Choice
from figures import Slo, check_json, compare, fit, summary
from jsonschema import Draft202012Validator
from mix import CHAT, COMPLETIONS, JSON_TOKENS, SCHEMAS, Job, mix, without_speculation
from pydantic import ValidationError
from reporting import finish

from alula.server.protocol import ChatBody, CompletionBody


def test_the_mix_is_always_the_same() -> None:
    jobs = mix(480)
    assert jobs == mix(480)
    assert jobs[:24] == mix(24), "a short run is the beginning of a long one"
    assert [job.number for job in jobs] == list(range(480))
    assert mix(24, seed=1) != mix(24)


def test_the_mix_has_everything_in_it() -> None:
    jobs = mix(480)
    bodies = [job.body for job in jobs]
    assert {body["temperature"] for body in bodies} == {0.0, 0.5, 0.8, 1.0, 1.3}
    assert {body["n"] for body in bodies} == {1, 2, 3}
    assert len({body["seed"] for body in bodies}) == 480
    for name in ("frequency_penalty", "presence_penalty", "repetition_penalty", "top_p", "top_k", "min_p"):
        assert 20 < sum(name in body for body in bodies) < 240, name
    sizes = [len(body.get("prompt") or body["messages"][0]["content"]) for body in bodies]
    assert (
        min(sizes) < 100 and sum(300 < size < 1100 for size in sizes) > 100 and sum(size > 1500 for size in sizes) > 40
    )
    assert Counter(job.path for job in jobs)[CHAT] > 240 and Counter(job.path for job in jobs)[COMPLETIONS] > 100
    forms = [job.body["response_format"]["type"] for job in jobs if job.schema is not None]
    assert 80 < len(forms) < 160 and set(forms) == {"json_schema", "json_object"}
    assert all(job.body["max_tokens"] <= (64 if job.schema is None else JSON_TOKENS) for job in jobs)


def test_the_server_takes_every_request_of_the_mix() -> None:
    for job in mix(120):
        kind = ChatBody if job.path == CHAT else CompletionBody
        for each in (job, without_speculation(job)):
            kind.model_validate_json(json.dumps(each.body))
        with pytest.raises(ValidationError):
            kind.model_validate_json(json.dumps({**job.body, "colour": 1}))
    assert without_speculation(mix(1)[0]).body == {**mix(1)[0].body, "speculation": {"off": True}}
    for schema in SCHEMAS.values():
        Draft202012Validator.check_schema(schema)


def answer(number: int = 0, *samples: list[int], first: float = 0.5, last: float = 1.0, **options: Any) -> Answer:
    found = Answer(number, 0.0, 200, first=first, last=last, **options)
    for index, ids in enumerate(samples):
        found.choices[index] = Choice(list(ids), "x" * len(ids), "stop")
    return found


def test_what_a_client_is_sent() -> None:
    found = Answer(3, sent=10.0)
    events: list[tuple[dict[str, Any], float]] = [
        ({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}, 10.5),
        ({"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None, "token_ids": [5]}]}, 11.0),
        ({"choices": [{"index": 0, "delta": {"content": "bc"}, "finish_reason": None, "token_ids": [6, 7]}]}, 12.0),
        ({"choices": [{"index": 1, "text": "z", "finish_reason": "stop", "token_ids": [8]}]}, 12.5),
        ({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}, 13.0),
    ]
    for event, now in events:
        found.take(event, now)
    assert found.choices == {0: Choice([5, 6, 7], "abc", "length"), 1: Choice([8], "z", "stop")}
    assert (found.ttft_s, found.tpot_s, found.tokens) == (1.0, 0.75, 4)
    found.take({"error": {"message": "no"}}, 14.0)
    assert found.error == "no"
    assert Answer(0, 1.0).ttft_s is None and Answer(0, 1.0).tpot_s is None


def test_goodput_wants_both() -> None:
    slo = Slo(ttft_s=1.0, tpot_s=0.06)
    good = answer(0, [1] * 11, first=1.0, last=1.59)
    late, slow = answer(1, [1] * 11, first=1.01, last=1.2), answer(2, [1] * 11, first=0.1, last=0.71)
    single, failed = answer(3, [1], first=0.9, last=0.9), answer(4, [1] * 11, first=0.1, last=0.2, error="no")
    assert [slo.met(each) for each in (good, late, slow, single, failed)] == [True, False, False, True, False]
    found = summary([good, late, slow, single, failed], 4.0, slo)
    assert (found["good"], found["goodput_per_s"], found["failed"], found["requests"]) == (2, 0.5, 1, 5)
    assert (found["tokens"], found["tokens_per_s"]) == (45, 11.25)
    assert found["ttft_s"]["p50"] == 0.9 and found["tpot_s"]["p99"] > found["tpot_s"]["p50"]
    assert summary([failed], 1.0, slo)["ttft_s"]["p50"] == 0.1
    assert summary([Answer(0, 0.0, error="no")], 1.0, slo)["ttft_s"]["p99"] is None


def test_a_planted_difference_is_found() -> None:
    one = [answer(number, [1, 2, 3], [4, 5]) for number in range(5)]
    assert compare(one, [answer(number, [1, 2, 3], [4, 5]) for number in range(5)]) == {
        "requests": 5,
        "identical": 5,
        "differences": [],
    }
    other = [
        answer(0, [1, 2, 3], [4, 6]),
        answer(1, [1, 2, 3], [4]),
        answer(2, [1, 2, 3]),
        answer(3, [1, 2, 3], [4, 5], error="gone"),
        answer(4, [1, 2, 3], [4, 5]),
    ]
    other[4].choices[0].finish_reason = "length"
    found = compare(one, other)
    assert found["identical"] == 0
    assert found["differences"] == [
        {"request": 0, "sample": 1, "position": 1, "tokens": [[5], [6]]},
        {"request": 1, "sample": 1, "position": 1, "tokens": [[5], []]},
        {"request": 2, "samples": [2, 1]},
        {"request": 3, "error": "gone"},
        {"request": 4, "sample": 0, "ends": ["stop", "length"]},
    ]
    assert compare([Answer(0, 0.0)], [Answer(0, 0.0)])["identical"] == 0, "nothing is no answer"


def test_every_json_answer_is_held_against_its_schema() -> None:
    schema = SCHEMAS["verdict"]
    texts = ['{"answer": "yes", "certainty": 3}', '{"answer": "ye', '{"answer": "yes", "certainty": 7}', "no JSON"]
    ends = ["stop", "length", "stop", "stop"]
    told = Answer(0, 0.0, 200)
    told.choices = {n: Choice([1], text, end) for n, (text, end) in enumerate(zip(texts, ends, strict=True))}
    free = answer(1, [1])
    found = check_json([Job(0, CHAT, {}, schema), Job(1, CHAT, {})], [told, free])
    assert (found["answers"], found["valid"], found["cut"]) == (4, 1, 1)
    assert [each["sample"] for each in found["invalid"]] == [2, 3]
    told.choices[0].finish_reason = "abort"
    told.choices[0].text = '{"answer"'
    assert len(check_json([Job(0, CHAT, {}, schema)], [told])["invalid"]) == 3, "what was not cut by length is whole"


def test_the_verdict_of_a_load_run() -> None:
    jobs = [Job(0, CHAT, {}), Job(1, CHAT, {}, SCHEMAS["verdict"])]
    valid = answer(1, [1])
    valid.choices[0].text = '{"answer": "no", "certainty": 1}'
    good = [answer(0, [1, 2]), valid]
    assert load.conclude(jobs, {"on": (good, {}), "off": (good, {})})["passed"]
    differs = [answer(0, [1, 3]), valid]
    assert not load.conclude(jobs, {"on": (good, {}), "off": (differs, {})})["passed"]
    broken = [answer(0, [1, 2]), answer(1, [1])]
    assert not load.conclude(jobs, {"on": (broken, {}), "off": (broken, {})})["passed"], "invalid JSON"


def test_a_line_is_flat_or_not() -> None:
    times = list(range(0, 900, 5))
    rng = random.Random(0)
    level = fit(times, [500 + rng.gauss(0, 2) for _ in times])
    assert level.flat(1.0) and abs(level.change) < 2
    leaking = fit(times, [500 + 0.1 * time + rng.gauss(0, 2) for time in times])
    assert not leaking.flat(32) and leaking.slope == pytest.approx(0.1, rel=0.05)
    assert leaking.change == pytest.approx(89.5, rel=0.05)
    assert not fit([0, 1, 2, 3], [1.0, 2.0, 3.0, 4.0]).flat(2.9)
    assert fit([0, 1, 2, 3], [1.0, 2.0, 3.0, 4.0]).flat(3.1)
    with pytest.raises(ValueError, match="run for longer"):
        fit([1, 2], [1.0, 2.0])


LIMITS = argparse.Namespace(settle=0.3, most_mib=32.0, most_acceptance=0.1)
START = {"kv_pages_total": 100.0, "kv_pages_used": 0.0, "num_preemptions_total": 0.0, "generation_tokens_total": 0.0}
END = START | {"num_requests_running": 0.0, "generation_tokens_total": 500.0}


def soaked(leak: float = 0.0, decay: float = 0.0) -> soak.Record:
    rng, record = random.Random(1), soak.Record(200, Counter(dict.fromkeys(soak.KINDS, 40)))
    accepted = checked = 0.0
    for second in range(0, 900, 5):
        warm = 50 * min(second / 200, 1)
        record.samples.append(soak.Sample(second, 900 + warm + leak * second + rng.gauss(0, 1), accepted, checked))
        accepted += 1000 * (0.4 - decay * second + rng.gauss(0, 0.01))
        checked += 1000
    return record


def test_the_verdict_of_a_soak() -> None:
    def failed(record: soak.Record, after: dict[str, float] = END, errors: tuple[str, ...] = ()) -> list[str]:
        report = soak.conclude(record, START, after, errors, LIMITS)
        assert report["passed"] == all(report["checks"].values())
        return [name for name, good in report["checks"].items() if not good]

    assert failed(soaked()) == [], "memory grows only while everything is new"
    assert failed(soaked(leak=0.08)) == ["memory_flat"]
    assert failed(soaked(decay=1e-4)) == ["acceptance_flat"]
    assert failed(soaked(), END | {"kv_pages_used": 1.0}) == ["all_pages_free"]
    assert failed(soaked(), END | {"num_requests_running": 1.0}) == ["all_pages_free"]
    assert failed(soaked(), errors=("it broke",)) == ["no_errors_in_the_log"]
    wrong = soaked()
    wrong.wrong.append("stream, request 3: got 500")
    assert failed(wrong) == ["no_errors"]
    idle = soaked()
    idle.kinds["leaves"] = 0
    assert failed(idle) == ["something_happened"]
    assert set(failed(soak.Record())) == {"memory_flat", "acceptance_flat", "something_happened"}


def test_errors_in_a_log() -> None:
    lines = [
        json.dumps({"level": "info", "logger": "alula.access", "message": "POST 500"}),
        json.dumps({"level": "error", "logger": "alula.engine", "message": "stage draft raised"}),
        "Traceback (most recent call last):",
    ]
    assert soak.error_lines("\n".join(lines)) == ["alula.engine: stage draft raised", lines[2]]


@pytest.mark.parametrize("truth", [0, 1, 7, 16, 17, 18, 19, 25, 40])
@pytest.mark.parametrize("guess", [1, 18, 40])
def test_the_largest_that_fits(truth: int, guess: int) -> None:
    asked: list[int] = []

    def fits(count: int) -> bool:
        asked.append(count)
        return count <= truth

    assert capacity.largest(fits, guess, 40, 40) == truth
    assert len(set(asked)) == len(asked) and max(asked) <= 40
    assert len(asked) <= 12
    assert capacity.largest(fits, guess, 40, 2) <= truth


def test_metrics_are_read() -> None:
    text = (
        '# TYPE alula:steps_total counter\nalula:steps_total{model_name="a"} 3\n'
        "# TYPE alula:memory_bytes gauge\n"
        'alula:memory_bytes{model_name="a",part="features"} 4\nalula:memory_bytes{model_name="a",part="target_kv"} 5\n'
        "# TYPE other gauge\nother 1\n"
    )
    assert servers.read_metrics(text) == {"steps_total": 3, "memory_bytes/features": 4, "memory_bytes/target_kv": 5}


def test_memory_of_a_process() -> None:
    import os

    assert 10 < servers.resident_mib(os.getpid()) < 100_000


def test_a_report_is_whole_or_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finish({"a": 1}, tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text()) == {"a": 1} == json.loads(capsys.readouterr().out)
    assert [each.name for each in tmp_path.iterdir()] == ["report.json"]
