"""Figures from made-up runs, and the order in which real ones happen."""

from __future__ import annotations

import pytest
import torch

from alula.bench import harness
from alula.bench.ceiling import Ceiling, read_bandwidth
from alula.bench.harness import Pair, interleave, pooled_stats, quantile, spread
from alula.bench.report import side, table
from alula.bench.run import Run, extra_kv_bytes, run_one
from alula.bench.session import Session
from alula.config import AlulaError
from alula.engine.config import EngineConfig
from alula.engine.request import CompletionOutput, RequestOutput
from alula.sequence import SamplingParams
from alula.tree import TreeShape


def made_up(seconds: float, tokens: int = 10, ttft: float = 0.1) -> Run:
    completion = CompletionOutput(0, seed=1, token_ids=list(range(tokens)))
    return Run(RequestOutput(0, [1], outputs=[completion], ttft_s=ttft, latency_s=seconds))


def test_quantiles() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([1.0, 2.0], 0.1) == pytest.approx(1.1)
    assert quantile([5.0], 0.9) == 5.0


def test_speedup_is_the_ratio_of_wall_times() -> None:
    pairs = [
        Pair([made_up(4.0), made_up(4.0), made_up(100.0)], [made_up(2.0), made_up(2.0), made_up(2.0)]),
        Pair([made_up(3.0)], [made_up(3.0)]),
        Pair([made_up(9.0)], [made_up(3.0)]),
    ]
    assert [pair.speedup for pair in pairs] == pytest.approx([2.0, 1.0, 3.0])  # the median forgives one slow run
    found = spread(pairs)
    assert (found.median, found.low, found.high) == pytest.approx((2.0, 1.2, 2.8))
    assert found.pooled == pytest.approx(16 / 8)


def test_time_per_token_leaves_the_first_one_out() -> None:
    assert made_up(1.0, tokens=10, ttft=0.1).tpot_s == pytest.approx(0.1)
    assert made_up(1.0, tokens=1).tpot_s == 0.0


def test_runs_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def record(engine: str, prompt: tuple[int, ...], params: SamplingParams) -> Run:
        order.append(engine)
        return made_up(1.0)

    monkeypatch.setattr(harness, "run_one", record)
    interleave("plain", "spec", [(1,)], SamplingParams(), repeats=3)  # type: ignore[arg-type]
    assert order == ["plain", "spec", "spec", "plain", "plain", "spec"]


def test_a_run_adds_up(session: Session, prompts: list[tuple[int, ...]]) -> None:
    engine = session.engine("ngram", EngineConfig(kv_cache_mib=8, max_num_seqs=1))
    texts: list[str] = []
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    first, second = (run_one(engine, prompts[0], params, texts.append) for _ in range(2))
    assert "".join(texts) == first.completion.text + second.completion.text
    assert first.tokens == 12 and first.steps + second.steps == engine.times.steps
    assert sum(first.time_ms.values()) + sum(second.time_ms.values()) == pytest.approx(
        1e3 * sum(engine.times.seconds.values()), abs=0.1
    )
    assert len(first.gaps_s) == first.completion.stats.target_forwards - 1
    assert sum(first.gaps_s) == pytest.approx(first.seconds - first.ttft_s, rel=0.2)
    figures = side([first, second], engine)
    assert figures["tau"] == round(24 / pooled_stats([first, second]).target_forwards, 4)
    assert figures["tokens_per_second"] == pytest.approx(24 / (first.seconds + second.seconds), rel=0.01)


def test_a_failing_request_is_an_error_and_leaves_the_engine_free(session: Session) -> None:
    engine = session.engine("none", EngineConfig(kv_cache_mib=8))
    free = engine.cache.free_pages

    def nothing_allowed(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        return torch.full_like(logits, -torch.inf)

    def broken(text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(AlulaError):
        run_one(engine, (1, 2, 3), SamplingParams(logits_processors=(nothing_allowed,)))
    with pytest.raises(KeyboardInterrupt):
        run_one(engine, tuple(b"hello"), SamplingParams(max_tokens=64, ignore_eos=True), broken)
    assert not engine.has_work
    assert engine.cache.free_pages == free


def test_extra_memory_grows_with_the_tree(session: Session) -> None:
    config = EngineConfig(kv_cache_mib=8, shape=TreeShape(16, 5, 4))
    none, ngram, head = (session.engine(name, config) for name in ("none", "ngram", "random"))
    assert extra_kv_bytes(none, 40) == 0
    layout = ngram.cache.layout
    assert extra_kv_bytes(ngram, 40) == (4 - 3) * layout.page_bytes  # 16 nodes, 15 tentative: slots 40 .. 54
    assert extra_kv_bytes(head, 40) > extra_kv_bytes(ngram, 40)


def test_the_ceiling(session: Session) -> None:
    model = session.model
    tensors = model.tensors()
    matrices = [tensor.shape for tensor in map(tensors.get, tensors.names()) if tensor.ndim == 2]
    whole = sum(ins * -(-outs // 16) * 16 for outs, ins in matrices)  # the tied embedding is the LM head
    assert model.decoder.weight_bytes == 4 * whole
    assert Ceiling(100, 1000.0).tokens_per_second == 10.0
    assert 1e8 < read_bandwidth(mebibytes=64, rounds=2) < 1e13


def test_a_table_lines_up() -> None:
    lines = table([["name", "a"], ["x", 1.5], ["long name", 12]]).splitlines()
    assert lines == ["name           a", "---------  -----", "x          1.500", "long name     12"]
