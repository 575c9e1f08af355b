"""Many clients at once, some of them rude: each gets what it would have got alone."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from alula.model.load import LoadedModel
from tests.server.running import Running, build_engine, serving
from tests.server.test_cancel import Leaver, post
from tests.server.test_completions import offline

REQUESTS = 32


def body_of(number: int) -> dict[str, Any]:
    chosen = random.Random(number)
    body: dict[str, Any] = {
        "prompt": "shared prefix of them all " * (number % 3) + f"number {number}",
        "seed": number,
        "temperature": chosen.choice([0, 0.7, 1.3]),
        "max_tokens": chosen.randint(1, 40),
        "n": chosen.choice([1, 1, 2]),
        "ignore_eos": chosen.random() < 0.7,
    }
    extras: list[dict[str, Any]] = [
        {"frequency_penalty": 0.8},
        {"repetition_penalty": 1.2},
        {"top_k": 20, "top_p": 0.9},
        {"min_p": 0.05},
        {"min_tokens": min(5, body["max_tokens"])},
        {},
    ]
    return body | chosen.choice(extras)


def act(server: Running, number: int) -> list[str] | None:
    """What the request was answered, or None for a client that left."""
    body = body_of(number)
    if number % 5 == 4:
        leaver = Leaver(server, body | {"stream": True, "max_tokens": 200, "ignore_eos": True})
        leaver.read_until(b"data: ")
        leaver.leave()
        return None
    if number % 5 == 3:
        assert post(server, body | {"temperature": 9}).status_code == 400
    return [choice["text"] for choice in post(server, body).json()["choices"]]


@pytest.mark.slow
def test_everybody_gets_his_own(tiny: LoadedModel, tiny_folder: Any) -> None:
    engine = build_engine(tiny, tiny_folder, max_num_seqs=6, max_num_batched_tokens=48, kv_cache_mib=1)
    with serving(engine) as server:
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda number: act(server, number), range(REQUESTS)))
        server.idle()
    assert engine.scheduler.preemptions + engine.scheduler.prefix_hits > 0
    for number, texts in enumerate(found):
        if texts is None:
            continue
        body = body_of(number)
        prompt = body.pop("prompt")
        assert texts == [sample.text for sample in offline(tiny, prompt, **body).outputs], number
