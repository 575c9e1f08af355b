"""`LLM`: what one call does to the others, and what is left behind when something goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from alula.config import AlulaError
from alula.draft.static import default_static_tree
from alula.engine.config import EngineConfig
from alula.engine.llm import LLM
from alula.engine.request import Request
from alula.model.load import load_model
from alula.sequence import SamplingParams
from alula.tree import TreeShape
from tests.draft.heads import save_random_head
from tests.engine.tiny import save_tiny_llama

SIX = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder: Path = save_tiny_llama(tmp_path_factory.mktemp("tiny"))
    config = EngineConfig(kv_cache_mib=8, max_num_batched_tokens=16)
    return LLM(str(folder), "ngram", dtype="float32", config=config)


def test_a_stream_sees_its_own_events_only_and_all_of_them(llm: LLM) -> None:
    """Two streams taken in turn, and a whole `generate` in between."""
    alone = [llm.generate(text, SIX)[0].outputs[0].token_ids for text in ("one", "two")]
    streams = [llm.stream(text, SIX) for text in ("one", "two")]
    got: list[list[int]] = [list(next(stream).tokens) for stream in streams]
    llm.generate("three", SIX)
    for tokens, stream in zip(got, streams, strict=True):
        for event in stream:
            tokens.extend(event.tokens)
    assert got == alone
    assert not llm.engine.has_work


def test_a_closed_stream_leaves_nothing(llm: LLM) -> None:
    stream = llm.stream("four", SIX)
    next(stream)
    assert llm.engine.has_work
    stream.close()  # type: ignore[attr-defined]
    assert not llm.engine.has_work


def test_an_exception_in_a_step_leaves_no_request_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = llm.generate("after", SIX)[0].outputs[0].token_ids
    draft: Callable[..., object] = llm.engine.drafter.draft
    calls: list[int] = []

    def failing(*arguments: object) -> object:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("the drafter broke")
        return draft(*arguments)

    monkeypatch.setattr(llm.engine.drafter, "draft", failing)
    with pytest.raises(RuntimeError, match="broke"):
        llm.generate(["after", "also", "and this"], SIX)
    assert not llm.engine.has_work
    llm.engine.cache.check_integrity()
    assert llm.engine.cache.free_pages == llm.engine.cache.total_pages
    assert llm.generate("after", SIX)[0].outputs[0].token_ids == expected


def test_bytes_are_text(llm: LLM) -> None:
    assert llm.generate(b"one", SIX)[0].prompt_token_ids == llm.tokenizer.encode("one")
    with pytest.raises(AlulaError, match="UTF-8"):
        llm.generate(b"\xff", SIX)


def test_one_bad_conversation_fails_alone(llm: LLM) -> None:
    good, bad = llm.chat([[{"role": "user", "content": "hi"}], [{"content": "no role"}]], SIX)
    assert len(good.outputs[0].token_ids) == 6
    assert bad.error is not None and "role" in bad.error
    with pytest.raises(AlulaError, match="messages is empty"):
        llm.chat([], SIX)


def test_token_ids_that_are_no_numbers_fail_alone(llm: LLM) -> None:
    odd = SamplingParams(logit_bias={"7": 1.0})  # type: ignore[dict-item]
    refused, served = llm.generate(["a", "b"], [odd, SIX])
    assert refused.error is not None and "logit_bias" in refused.error
    assert len(served.outputs[0].token_ids) == 6


def test_prompt_logprobs_survive_a_preemption_at_other_chunk_borders(llm: LLM) -> None:
    """A prompt that loses its cache half-way, and is then cut elsewhere, still reports each position once."""
    request = Request(
        tuple(llm.tokenizer.encode("the quick brown fox jumps over the lazy dog")),
        SamplingParams(max_tokens=2, ignore_eos=True, prompt_logprobs=0),
    )
    reports = []
    for disturbed in (False, True):
        request_id = llm.engine.add(request)
        llm.engine.step()  # 16 rows of 43
        if disturbed:
            llm.engine.scheduler.preempt(llm.engine.scheduler.running[0])
            other = llm.engine.add(Request(tuple(range(9)), SIX))
            llm.engine.scheduler.waiting.rotate(1)  # it runs first, and takes rows of the next chunks
        while not llm.engine.output(request_id).finished:
            llm.engine.step()
        if disturbed:
            llm.engine.abort(other)
        reports.append(llm.engine.pop(request_id).prompt_logprobs)
    assert reports[0] == reports[1]
    assert len(reports[0] or ()) == len(request.prompt_token_ids)


def test_none_is_an_empty_collection() -> None:
    given = SamplingParams(stop=None, bad_words=None, stop_token_ids=None, logits_processors=None, logit_bias=None)  # type: ignore[arg-type]
    assert given == SamplingParams()
    assert not given.shapes_logits


def test_static_trees_and_sampled_children(tmp_path: Path) -> None:
    """A static tree leaves the text alone; sampled children need rule `rejection`."""
    folder = str(save_tiny_llama(tmp_path / "model"))
    head = str(save_random_head(tmp_path / "head", load_model(folder, dtype="float32")))
    config = EngineConfig(kv_cache_mib=8, shape=TreeShape(12, 3, 4))
    plain = LLM(folder, "none", dtype="float32", config=config).generate("one", SIX)[0].outputs[0]
    drafted = LLM(folder, head, dtype="float32", config=config, tree=default_static_tree())
    found = drafted.generate("one", SIX)[0].outputs[0]
    assert found.token_ids == plain.token_ids
    assert found.stats.drafted > 0
    with pytest.raises(AlulaError, match="sampled"):
        LLM(folder, head, dtype="float32", config=config, tree=default_static_tree(), sampled=True)
    rejection = EngineConfig(kv_cache_mib=8, shape=TreeShape(12, 3, 4), rule="rejection")
    sampling = LLM(folder, head, dtype="float32", config=rejection, tree=default_static_tree(), sampled=True)
    warm = SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True, seed=1)
    assert len(sampling.generate("one", warm)[0].outputs[0].token_ids) == 6
