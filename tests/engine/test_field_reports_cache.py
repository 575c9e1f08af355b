"""Prefix cache, KV and memory under speculation: faults reported of other engines (E2 to E18, D7)."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch

from alula.draft.drafter import Drafter
from alula.draft.load import load_drafter
from alula.engine.engine import Engine
from alula.engine.request import Request, RequestOutput
from alula.model.load import LoadedModel, load_model
from alula.sequence import SamplingParams
from alula.tree import TreeShape
from tests.draft.heads import save_random_head
from tests.draft.medusas import save_random_medusa
from tests.engine.guesses import Guesser, Recorder, spoiled_by_turns
from tests.engine.tiny import VOCAB, engine_for, prompt_of, run, save_tiny_llama

SHAPE = TreeShape(nodes=8, depth=4, branch=3)


@pytest.fixture(scope="module", params=[save_random_head, save_random_medusa], ids=["eagle3", "medusa"])
def head(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny: LoadedModel) -> Drafter:
    folder: Path = request.param(tmp_path_factory.mktemp("head"), tiny)
    return load_drafter(str(folder), tiny, allow_unverified=True)


def _request(prompt: list[int], length: int = 16) -> Request:
    return Request(tuple(prompt), SamplingParams(max_tokens=length, ignore_eos=True))


def _ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def _by_root(recorder: Recorder, output: RequestOutput) -> dict[int, object]:
    """Proposed trees by the position of their root."""
    return {position: tree for position, *tree in recorder.proposed[output.request_id]}


def _assert_as_cold(
    model: LoadedModel, head: Drafter, request: Request, recorder: Recorder, warm: RequestOutput
) -> None:
    """Same output and same trees as from an engine that runs the request alone from nothing.

    A hit that reaches up to the root has a tree there already, one position before the cold run's first.
    """
    alone = Recorder(head)
    output = run(engine_for(model, alone, shape=SHAPE), [request])[0]
    assert warm.outputs[0].token_ids == output.outputs[0].token_ids
    expected, found = _by_root(alone, output), _by_root(recorder, warm)
    found.pop(len(request.prompt_token_ids) - 1, None)
    assert found == expected
    assert all(math.isfinite(score) for _, _, scores in found.values() for score in scores)  # type: ignore[misc]


def test_e2_drafts_after_a_prefix_hit_equal_cold_ones(tiny: LoadedModel, head: Drafter) -> None:
    shared = prompt_of(67)
    requests = [_request(shared + prompt_of(9, seed=number)) for number in (1, 2, 3)]
    recorder = Recorder(head)
    engine = engine_for(tiny, recorder, shape=SHAPE)
    for request in (*requests, requests[1]):
        hit = engine.cache.peek(request.prompt_token_ids)
        assert hit == 0 if request is requests[0] else hit >= 64
        _assert_as_cold(tiny, head, request, recorder, run(engine, [request])[0])


def test_e4_repeated_prompts_in_a_mixed_batch_draft_as_alone(tiny: LoadedModel, head: Drafter) -> None:
    repeated = _request(prompt_of(41))
    batch = [repeated, _request(prompt_of(13, seed=1)), repeated, _request(prompt_of(58, seed=2), 9), repeated]
    recorder = Recorder(head)
    engine = engine_for(tiny, recorder, shape=SHAPE, max_num_seqs=3)
    for outputs in (run(engine, batch), run(engine, batch[::-1])[::-1]):
        for request, output in zip(batch, outputs, strict=True):
            _assert_as_cold(tiny, head, request, recorder, output)


def _hit_rate(engine: Engine, turns: int = 6, chats: int = 3) -> float:
    """Share of prompt tokens found in the cache, over chats that take turns and grow."""
    histories = [prompt_of(30, seed=chat) for chat in range(chats)]
    hits = asked = 0
    for turn in range(turns):
        for chat, history in enumerate(histories):
            hits += engine.cache.peek(history)
            asked += len(history)
            output = run(engine, [_request(history, 12)])[0]
            histories[chat] = [*history, *output.outputs[0].token_ids, *prompt_of(10, seed=100 * chat + turn)]
    return hits / asked


def test_e6_room_for_drafts_does_not_empty_the_prefix_cache(tiny: LoadedModel, head: Drafter) -> None:
    """The chats fill the pool; speculation may cost no more of it than the slots of one tree."""
    plain = engine_for(tiny, kv_cache_mib=1)
    engine = engine_for(tiny, head, kv_cache_mib=1, shape=SHAPE)
    assert 0.6 * engine.cache.total_pages * engine.config.page_size < 3 * 150
    expected, rate = _hit_rate(plain), _hit_rate(engine)
    reserve = 2 / engine.cache.total_pages
    assert expected > 0.5
    assert rate >= expected - reserve


def test_e8_a_full_pool_preempts_and_goes_on(tiny: LoadedModel, head: Drafter) -> None:
    requests = [_request(prompt_of(120, seed=number), 40) for number in range(7)]
    plain = run(engine_for(tiny), requests)
    for drafter in (head, Guesser(plain, spoiled_by_turns)):
        engine = engine_for(tiny, drafter, kv_cache_mib=1, shape=SHAPE)
        ids = [engine.add(request) for request in requests]
        steps = 0
        while engine.has_work:
            assert engine.step() or steps < 500, "nothing moves"
            steps += 1
            assert steps < 2000
        assert engine.scheduler.preemptions > 0
        assert _ids([engine.pop(request_id) for request_id in ids]) == _ids(plain)


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_e14_wide_trees_commit_the_right_rows_in_any_batch(tiny: LoadedModel, head: Drafter, batch: int) -> None:
    """The accepted token is the last of four siblings at each level, or what a real head makes of it."""
    requests = [_request(prompt_of(6 + number, seed=number), 50) for number in range(batch)]
    plain = run(engine_for(tiny), requests)
    wide = Guesser(plain, spoiled_by_turns, siblings=3)
    engine = engine_for(tiny, wide, shape=TreeShape(nodes=21, depth=5, branch=4))
    assert _ids(run(engine, requests)) == _ids(plain)
    assert engine.totals.tau > 2
    chains = engine_for(tiny, head, shape=TreeShape(nodes=5, depth=4, branch=1))
    trees = engine_for(tiny, head, shape=TreeShape(nodes=16, depth=4, branch=4))
    assert _ids(run(chains, requests)) == _ids(run(trees, requests)) == _ids(plain)


@pytest.mark.parametrize("budget", [8, 9, 17])
def test_e18_a_tight_row_budget_is_never_exceeded(tiny: LoadedModel, head: Drafter, budget: int) -> None:
    requests = [_request(prompt_of(5 + 7 * number, seed=number)) for number in range(10)]
    plain = run(engine_for(tiny), requests)
    recorders = [Recorder(head), Recorder(Guesser(plain))]
    for recorder in recorders:
        engine = engine_for(tiny, recorder, shape=SHAPE, max_num_seqs=8, max_num_batched_tokens=budget)
        assert _ids(run(engine, requests)) == _ids(plain)
        assert max(recorder.rows) <= budget
    assert max(recorders[1].rows) == budget


def _save_windowed(folder: Path, tokenizer: Path, max_len: int) -> Path:
    """A tiny Mistral with a sliding window, whose long prompts are cheap."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(1)
    config = MistralConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=16,
        max_position_embeddings=max_len,
        eos_token_id=256,
        bos_token_id=None,
    )
    model = MistralForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder)
    return folder


def test_e16_acceptance_survives_positions_beyond_2_to_the_15(tiny_folder: Path, tmp_path: Path) -> None:
    """The model drafts for itself, so every guess is right: far out, and in a short request afterwards."""
    folder = _save_windowed(tmp_path, tiny_folder, max_len=34_000)
    model = load_model(str(folder), dtype="float32")
    drafter = load_drafter(str(folder), model)
    settings = {"shape": TreeShape(nodes=5, depth=4, branch=1), "max_num_batched_tokens": 1024, "kv_cache_mib": 64}
    engine = engine_for(model, drafter, check_integrity=False, page_size=16, **settings)
    short, far = _request(prompt_of(20), 25), _request(prompt_of(32_760, seed=1), 25)
    before, beyond, after = (run(engine, [request])[0].outputs[0] for request in (short, far, short))
    plain = engine_for(model, check_integrity=False, max_num_batched_tokens=1024, kv_cache_mib=64)
    assert [before.token_ids, beyond.token_ids] == _ids(run(plain, [short, far]))
    assert after.token_ids == before.token_ids
    assert before.stats.tau > 4
    assert beyond.stats.tau > 4
    assert after.stats.tau == before.stats.tau


def test_d7_a_drafter_with_less_context_is_skipped_for_that_sequence_only(tiny: LoadedModel, tmp_path: Path) -> None:
    """The same model as drafter, but made for 64 positions."""
    drafter = load_drafter(str(save_tiny_llama(tmp_path, max_len=64)), tiny)
    prompts = [prompt_of(20), prompt_of(64, seed=1), prompt_of(64 - 15, seed=2)]
    requests = [_request(prompt, 30) for prompt in prompts]
    plain = run(engine_for(tiny), requests)
    engine = engine_for(tiny, drafter, shape=TreeShape(nodes=5, depth=4, branch=1))
    within, beyond, crossing = run(engine, requests)
    assert _ids([within, beyond, crossing]) == _ids(plain)
    assert within.outputs[0].stats.tau > 4
    assert beyond.outputs[0].stats.drafted == 0
    assert 1 < crossing.outputs[0].stats.tau < 4
