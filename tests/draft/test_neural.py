"""Drafting with a head: its entries, prefix hits, batches, long positions, and when it keeps still."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from alula.draft.neural import LAZY_ROWS, NeuralDrafter
from alula.draft.policy import TreePolicy
from alula.draft.static import StaticTree, default_static_tree
from alula.sequence import PlanItem, StepPlan
from alula.tree import ROOT_ONLY, TreeShape
from tests.draft.harness import entries, paths
from tests.draft.heads import TARGET_HIDDEN, head_config, make_drafter, random_tokens
from tests.draft.kernel_sets import kernel_set, kernel_sets
from tests.draft.stand_in import SHAPE, bench_for, commit, deepest, features, fill, ready, same, sibling

KINDS = ["eagle1", "eagle3"]


@pytest.fixture(params=kernel_sets())
def drafter(request: pytest.FixtureRequest) -> NeuralDrafter:
    return make_drafter(kernels=kernel_set(request.param))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kernels", kernel_sets())
def test_E12_entries_after_commits_equal_a_fresh_prefill(kind: str, kernels: str) -> None:
    """Guessed entries of accepted nodes are overwritten from true features, whatever was accepted."""
    drafter = make_drafter(head_config(kind), kernels=kernel_set(kernels))
    bench = ready(drafter, random_tokens(11))
    for choose in (lambda tree: [], deepest, sibling, lambda tree: [1]):
        tree = bench.draft({0: SHAPE})[0]
        commit(bench, choose(tree), 17)
        after = bench.draft({0: SHAPE})[0]
        tokens = list(bench.sequences[0].tokens)
        fresh = ready(drafter, tokens)
        assert same(after, fresh.draft({0: SHAPE})[0])
        for ours, theirs in zip(
            entries(bench, 0, 1, len(tokens) - 1), entries(fresh, 0, 1, len(tokens) - 1), strict=True
        ):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_prefill_chunks_do_not_matter(drafter: NeuralDrafter, chunk: int) -> None:
    tokens = random_tokens(20)
    whole, parts = ready(drafter, tokens), ready(drafter, tokens, chunk=chunk)
    assert same(whole.draft({0: SHAPE})[0], parts.draft({0: SHAPE})[0])
    for ours, theirs in zip(entries(whole, 0, 1, 19), entries(parts, 0, 1, 19), strict=True):
        assert torch.equal(ours, theirs)


def test_E2_prefix_hits_draft_like_a_cold_start(drafter: NeuralDrafter) -> None:
    """The shared pages hold the drafter's entries too, and the pair across the boundary is computed from the kept
    feature: cold, the same prefix with another suffix, and again."""
    prefix = random_tokens(33)
    bench = bench_for(drafter)
    assert fill(bench, [*prefix, 1, 2, 3], id=0) == 0
    commit(bench, [1], 9, id=0)
    for id, suffix in enumerate([[1, 2, 3], [4, 5], [6, 7, 8, 9], [1, 2, 3]], start=1):
        tokens = [*prefix, *suffix]
        assert fill(bench, tokens, id=id) >= 32
        tree = bench.draft({id: SHAPE})[id]
        assert np.isfinite(tree.scores_N).all()
        assert same(tree, ready(drafter, tokens).draft({0: SHAPE})[0])


def test_E4_repeated_prompts_in_a_mixed_batch(drafter: NeuralDrafter) -> None:
    """Hits of different lengths and a cold sequence draft together as they do alone."""
    prompts = {
        0: random_tokens(33),
        1: random_tokens(33),
        2: [*random_tokens(33)[:18], 3, 4],
        3: random_tokens(9, seed=1),
    }
    bench = bench_for(drafter)
    fill(bench, [*prompts[0], 0], id=9)
    commit(bench, [], 1, id=9)
    assert [fill(bench, tokens, id=id) for id, tokens in prompts.items()] == [32, 32, 16, 0]
    trees = bench.draft(dict.fromkeys(prompts, SHAPE))
    for id, tokens in prompts.items():
        assert same(trees[id], ready(drafter, tokens).draft({0: SHAPE})[0])


@pytest.mark.parametrize("tree", [None, default_static_tree()], ids=["dynamic", "static"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_batch_equals_single_runs_bitwise(
    drafter: NeuralDrafter, tree: StaticTree | None, temperature: float
) -> None:
    drafter = make_drafter(policy=TreePolicy(tree=tree), kernels=drafter.model._kernels)  # type: ignore[attr-defined]
    prompts = {0: random_tokens(14), 1: random_tokens(9, seed=1), 2: random_tokens(23, seed=2)}
    shapes = {0: SHAPE, 1: TreeShape(5, 2, 2), 2: ROOT_ONLY}
    bench = bench_for(drafter)
    for id, tokens in prompts.items():
        fill(bench, tokens, id=id, temperature=temperature)
    trees = bench.draft(shapes)
    for id, tokens in prompts.items():
        alone = bench_for(drafter)
        fill(alone, tokens, id=id, temperature=temperature)
        assert same(trees[id], alone.draft({id: shapes[id]})[id])


def test_E16_positions_up_to_forty_thousand() -> None:
    """The addresses and RoPE table of a long sequence, then a short one beside it that drafts as before."""
    drafter = make_drafter(kernels=kernel_set(kernel_sets()[-1]), positions=40_100)
    long, short = [random_tokens(40_000)[0]] * 40_000, random_tokens(12)
    bench = bench_for(drafter, pages=700, page_size=64)
    bench.add(long, id=0)
    known = torch.randn(1, len(drafter.taps) * TARGET_HIDDEN).expand(len(long), -1)
    for stop in range(4_000, 40_000, 4_000):
        bench.prefill({0: known}, stop=stop)
    bench.prefill({0: known})
    fill(bench, short, id=1)
    trees = bench.draft({0: SHAPE, 1: SHAPE})
    assert bench.cache.length(0) == 39_999
    assert len(trees[0]) == SHAPE.nodes and np.isfinite(trees[0].scores_N).all()
    assert same(trees[1], ready(drafter, short).draft({0: SHAPE})[0])


def test_D2_a_drafted_eos_is_a_token_like_any_other(drafter: NeuralDrafter) -> None:
    bench = ready(drafter, random_tokens(10))
    first = int(bench.draft({0: SHAPE})[0].tokens_N[1])
    bench.sequences[0].eos_ids = frozenset({first})
    tree = bench.draft({0: SHAPE})[0]
    assert tree.tokens_N[1] == first and tree.children[1]


def test_nothing_is_drafted_while_the_prompt_is_read(drafter: NeuralDrafter) -> None:
    """A chunk before the root: its features do not exist yet. What is queued is read all the same."""
    tokens = random_tokens(20)
    bench = bench_for(drafter)
    bench.add(tokens)
    bench.prefill({0: features(drafter, tokens)}, stop=9)
    with bench.cache.begin({0: 40}) as txn:
        trees = drafter.draft(StepPlan((PlanItem(bench.sequences[0], range(9, 19), SHAPE),)), txn)
        assert txn.draft_length(0) == 10
    assert trees[0] is not None and len(trees[0]) == 1


def test_features_wait_while_nothing_is_drafted(drafter: NeuralDrafter) -> None:
    """Root-only steps cost no pass until enough waits; then nothing has been lost."""
    bench = ready(drafter, random_tokens(6), pages=128)
    bench.draft({0: SHAPE})
    commit(bench, [], 3)
    before, reads = drafter.times.reads, []
    for token in range(LAZY_ROWS + 3):
        commit(bench, [], token % 7, shape=ROOT_ONLY)
        reads.append(drafter.times.reads - before)
    assert reads[: LAZY_ROWS // 2] == [0] * (LAZY_ROWS // 2)
    assert reads[-1] > 0
    assert bench.sequences[0].features.stop - bench.sequences[0].features.start <= LAZY_ROWS + 1
    fresh = ready(drafter, list(bench.sequences[0].tokens), pages=128)
    assert same(bench.draft({0: SHAPE})[0], fresh.draft({0: SHAPE})[0])


def test_a_draft_that_is_rolled_back_can_be_repeated(drafter: NeuralDrafter) -> None:
    bench = ready(drafter, random_tokens(13))
    before = bench.cache.draft_length(0)
    assert same(bench.draft({0: SHAPE})[0], bench.draft({0: SHAPE})[0])
    assert bench.cache.draft_length(0) == before
    assert bench.cache.length(0) == 12


def test_levels_share_one_pass_over_all_sequences(drafter: NeuralDrafter) -> None:
    bench = bench_for(drafter)
    for id in range(3):
        fill(bench, random_tokens(8 + id, seed=id), id=id)
    before = drafter.times.levels
    bench.draft(dict.fromkeys(range(3), SHAPE))
    assert drafter.times.levels - before <= SHAPE.depth


@pytest.fixture
def passes(drafter: NeuralDrafter, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each pass of the draft model."""
    rows, step = list[int](), drafter.model.step

    def counted(tokens_T: torch.Tensor, *arguments: object) -> torch.Tensor:
        rows.append(len(tokens_T))
        return step(tokens_T, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(drafter.model, "step", counted)
    return rows


def test_no_deeper_pass_is_run_below_the_floor(drafter: NeuralDrafter, passes: list[int]) -> None:
    """As many passes as there are levels of likely nodes, after the one that reads what was committed."""
    bench = ready(drafter, random_tokens(13))
    passes.clear()
    free = bench.draft({0: SHAPE})[0]
    assert len(passes) == 1 + SHAPE.depth - 1
    best = [max(free.scores_N[free.depths_N == depth]) for depth in range(1, 3)]
    for floor, levels in ((0.999, 0), ((math.exp(best[0]) + math.exp(best[1])) / 2, 1)):
        passes.clear()
        tree = bench.draft({0: replace(SHAPE, floor=floor)})[0]
        assert len(passes) == 1 + levels
        assert tree.depths_N.max() == levels
        assert (np.exp(tree.scores_N) >= floor).all()


def test_a_sequence_below_its_floor_takes_no_rows(drafter: NeuralDrafter, passes: list[int]) -> None:
    """Beside one without a floor, whose tree and rows are those it has alone."""
    bench = bench_for(drafter)
    for id in range(2):
        fill(bench, random_tokens(8 + id, seed=id), id=id)
    passes.clear()
    alone = bench.draft({1: SHAPE})
    rows = passes[1:]
    passes.clear()
    trees = bench.draft({0: replace(SHAPE, floor=0.999), 1: SHAPE})
    assert passes[1:] == rows and len(rows) == SHAPE.depth - 1
    assert len(trees[0]) == 1 and same(trees[1], alone[1])


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_floor_takes_away_the_unlikely_paths_and_nothing_else(drafter: NeuralDrafter, temperature: float) -> None:
    bench, wide = bench_for(drafter), TreeShape(nodes=200, depth=3, branch=3)
    fill(bench, random_tokens(13), temperature=temperature)
    free = bench.draft({0: wide})[0]
    floor = math.exp(float(np.median(free.scores_N)))
    likely = free.scores_N >= np.float32(math.log(floor))
    tree = bench.draft({0: replace(wide, floor=floor)})[0]
    assert 1 < likely.sum() < len(free)
    np.testing.assert_array_equal(tree.tokens_N, free.tokens_N[likely])
    np.testing.assert_array_equal(tree.scores_N, free.scores_N[likely])


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_heads_draft(kind: str) -> None:
    """Every tensor of a bf16 target stays bf16 on the way."""
    from alula.draft.build import build_head
    from alula.draft.dialects import HeadFiles
    from tests.draft.heads import random_weights, target_parts

    config = head_config(kind)
    weights = {name: w for name, w in random_weights(config).items() if name != "t2d"}
    kernels = kernel_set(kernel_sets()[-1])
    parts = target_parts(kernels, dtype=torch.bfloat16)
    drafter = build_head(HeadFiles(config, weights, None), parts, TreePolicy())
    bench = bench_for(drafter, dtype=torch.bfloat16)
    tokens = random_tokens(12)
    bench.add(tokens)
    bench.prefill({0: features(drafter, tokens).bfloat16()})
    tree = bench.draft({0: SHAPE})[0]
    assert len(tree) == SHAPE.nodes
    assert len(paths(tree)) == SHAPE.nodes - 1
