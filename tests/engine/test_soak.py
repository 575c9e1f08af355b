"""A thousand requests through a pool too small for them all."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from alula.draft.load import load_drafter
from alula.engine.engine import Engine
from alula.engine.request import Request
from alula.model.load import LoadedModel
from alula.sequence import SamplingParams
from alula.tree import TreeShape
from tests.draft.heads import save_random_head
from tests.engine.tiny import engine_for, prompt_of, run

REQUESTS = 1000


def _requests(rng: random.Random) -> list[Request]:
    """Prompts share a few beginnings; a third are sampled."""
    stems = [prompt_of(length, seed=length) for length in (9, 24, 41)]
    requests = []
    for number in range(REQUESTS):
        prompt = rng.choice(stems) + prompt_of(rng.randint(1, 30), seed=number)
        temperature = rng.choice([0.0, 0.0, 1.0])
        requests.append(Request(tuple(prompt), SamplingParams(temperature, max_tokens=rng.randint(1, 24), seed=number)))
    return requests


def test_thousand_requests_in_a_small_pool(tiny: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> None:
    rng = random.Random(0)
    requests = _requests(rng)
    plain = run(engine_for(tiny, max_num_seqs=32, check_integrity=False), requests)
    head: Path = save_random_head(tmp_path_factory.mktemp("head"), tiny)
    drafter = load_drafter(str(head), tiny, allow_unverified=True)
    engine = engine_for(
        tiny, drafter, max_num_seqs=16, max_num_batched_tokens=128, shape=TreeShape(6, 3, 2), kv_cache_mib=1
    )
    free = engine.cache.free_pages
    assert sum(len(request.prompt_token_ids) for request in requests[:16]) > 0.9 * free * engine.config.page_size
    ids = [engine.add(request) for request in requests]
    aborted = _run_with_aborts(engine, ids, rng)
    assert 50 < len(aborted) <= 100
    for request_id, expected in zip(ids, plain, strict=True):
        if request_id not in aborted:
            assert engine.pop(request_id).outputs[0].token_ids == expected.outputs[0].token_ids
    assert engine.scheduler.preemptions > 0
    assert engine.cache.free_pages == free
    engine.cache.check_integrity()


def _run_with_aborts(engine: Engine, ids: list[int], rng: random.Random) -> set[int]:
    """Abort up to 100 requests at odd moments: waiting, in prefill and while decoding."""
    victims, aborted = rng.sample(ids, 100), set()
    for step in itertools.count():
        if not engine.has_work:
            return aborted
        engine.step()
        if victims and step % 3 == 0:
            victim = victims.pop()
            if not engine.output(victim).finished:
                engine.abort(victim)
                aborted.add(victim)
    raise AssertionError("unreachable: count() has no end")
