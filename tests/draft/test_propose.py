"""Children under each rule: the target's own noise, masks and bias, honest draws, point masses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from alula.draft.policy import TreePolicy
from alula.draft.propose import NOISE_SCALE, Proposer
from alula.draft.static import StaticTree, default_static_tree
from alula.kernels.select import load_kernels
from alula.sampling.noise import gumbel
from alula.tree import DraftTree, TreeShape
from tests.draft.dense import DenseHead
from tests.draft.harness import Bench, sequence
from tests.draft.heads import (
    VOCAB,
    head_config,
    lm_head_weight,
    make_drafter,
    random_features,
    random_tokens,
    random_weights,
    target_parts,
)

SHAPE = TreeShape(nodes=12, depth=3, branch=3)
TOKENS = random_tokens(13)
CONFIG = head_config()
FEATURES = random_features(CONFIG, 12)


def draft(policy: TreePolicy | None = None, shape: TreeShape = SHAPE, *, seed: int = 0, **params: Any) -> DraftTree:
    bench = Bench(make_drafter(policy=policy), feature_size=FEATURES.shape[1])
    bench.add(TOKENS, **params)
    bench.sequences[0].seed = seed
    bench.prefill({0: FEATURES})
    return bench.draft({0: shape})[0]


def dense_log_q(path: list[int], temperature: float) -> torch.Tensor:
    """log q at a temperature, over the target vocabulary."""
    head = DenseHead(CONFIG, random_weights(CONFIG), target_parts().embedding_VD, lm_head_weight())
    return (head.after(TOKENS, FEATURES, path) / temperature).log_softmax(0)


def children(tree: DraftTree, node: int) -> list[int]:
    return [int(tree.tokens_N[child]) for child in tree.children[node]]


@pytest.mark.parametrize("seed", range(4))
def test_coupled_children_are_the_best_by_the_targets_own_noise(seed: int) -> None:
    """At every node: log q_T + G, with G keyed by (seed, sample, absolute position, target id)."""
    tree = draft(seed=seed, temperature=0.7)
    assert len(tree) == SHAPE.nodes
    for node in range(len(tree)):
        path = [int(tree.tokens_N[n]) for n in tree.path(node)]
        noise = torch.from_numpy(gumbel(seed, 0, len(TOKENS) + len(path), np.arange(VOCAB)))
        keys = dense_log_q(path, 0.7) + noise
        best = keys.topk(3).indices.tolist()
        assert children(tree, node) == best[: len(tree.children[node])]
        scores = (keys / NOISE_SCALE).log_softmax(0)
        for child in tree.children[node]:
            gained = float(tree.scores_N[child] - tree.scores_N[node])
            assert gained == pytest.approx(float(scores[tree.tokens_N[child]]), abs=1e-3)


def test_noise_depends_on_seed_and_not_at_temperature_zero() -> None:
    assert len({tuple(draft(seed=seed, temperature=1.0).tokens_N) for seed in range(4)}) > 1
    assert len({tuple(draft(seed=seed).tokens_N) for seed in range(4)}) == 1


def test_rejection_with_dynamic_trees_proposes_the_most_likely() -> None:
    """A point mass must not depend on the noise."""
    trees = [draft(TreePolicy("rejection"), seed=seed, temperature=0.7) for seed in range(3)]
    assert len({tuple(tree.tokens_N) for tree in trees}) == 1
    assert children(trees[0], 0) == dense_log_q([], 0.7).topk(3).indices.tolist()
    assert not trees[0].sampled
    assert float(trees[0].scores_N[1]) == pytest.approx(float(dense_log_q([], 0.7).max()), abs=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masks_and_bias_shape_the_proposal(temperature: float) -> None:
    allowed = tuple(range(0, VOCAB, 2))
    tree = draft(temperature=temperature, allowed_token_ids=allowed)
    assert len(tree) == SHAPE.nodes
    assert set(tree.tokens_N[1:].tolist()) <= set(allowed)
    wanted = int(dense_log_q([], 1.0).argmin())
    known = int(dense_log_q([], 1.0).nan_to_num(neginf=0).argmin())
    assert wanted != known
    assert children(draft(temperature=temperature, logit_bias={known: 100.0}), 0)[0] == known


def test_forbidden_tokens_leave_fewer_children() -> None:
    ids = dense_log_q([], 1.0).topk(2).indices.tolist()
    for temperature in (0.0, 1.0):
        assert sorted(children(draft(temperature=temperature, allowed_token_ids=tuple(ids)), 0)) == sorted(ids)


def test_penalties_follow_the_path() -> None:
    """A token on the path is penalised below it, not above."""
    first = int(draft().tokens_N[1])
    deeper = draft(shape=TreeShape(8, 7, 1), presence_penalty=2.0, logit_bias={first: 4.0})
    assert children(deeper, 0) == [first]
    again = draft(shape=TreeShape(8, 7, 1), frequency_penalty=2.0, logit_bias={first: 100.0})
    assert (again.tokens_N[1:] == first).all()


@pytest.mark.parametrize("tree", [StaticTree.chain(3), default_static_tree()])
def test_sampled_children_come_with_the_distribution_they_came_from(tree: StaticTree) -> None:
    shape = TreeShape(26, 5, 4)
    drawn = draft(TreePolicy("rejection", tree, sampled=True), shape, temperature=0.8)
    assert drawn.sampled
    assert len(drawn) == len(tree.paths) + 1
    parents = {node for node in range(len(drawn)) if drawn.children[node]}
    assert set(drawn.proposals) == parents
    for node in parents:
        path = [int(drawn.tokens_N[n]) for n in drawn.path(node)]
        torch.testing.assert_close(drawn.proposals[node], dense_log_q(path, 0.8).exp(), rtol=1e-3, atol=1e-5)
        assert len(set(children(drawn, node))) == len(drawn.children[node])
        assert (drawn.proposals[node][children(drawn, node)] > 0).all()


@pytest.mark.parametrize("sampled", [False, True])
def test_every_sequence_of_a_draft_is_shaped_by_its_own_parameters(sampled: bool) -> None:
    policy = TreePolicy("rejection", StaticTree.of([(0,), (1,)]), sampled=sampled)
    allowed = [(3, 8), (5, 2), (7, 1)]
    lanes = [sequence(TOKENS, id=b, temperature=1.0, allowed_token_ids=ids) for b, ids in enumerate(allowed)]
    kernels = load_kernels("torch")
    growth = policy.growth(np.zeros(3, np.int64), [TreeShape(3, 1, 2)] * 3, kernels)
    proposer = Proposer(policy, lanes, None, VOCAB, kernels)
    proposer.expand(growth, torch.zeros(3, VOCAB), [()] * 3)
    assert [set(children(tree, 0)) for tree in proposer.finish(growth)] == [set(ids) for ids in allowed]


def test_sampled_children_follow_q() -> None:
    """Chi-square of the first child over seeds; and of the second given the first, which is q without it."""
    policy = TreePolicy("rejection", StaticTree.of([(0,), (1,)]), sampled=True)
    count, logits = 6000, torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))
    lanes = [sequence(TOKENS, id=seed, seed=seed, temperature=0.5) for seed in range(count)]
    growth = policy.growth(np.zeros(count, np.int64), [TreeShape(3, 1, 2)] * count)
    proposer = Proposer(policy, lanes, None, VOCAB, load_kernels("torch"))
    proposer.expand(growth, logits.expand(count, -1), [()] * count)
    firsts, seconds = np.zeros(VOCAB), np.zeros(VOCAB)
    q = (logits.double() / 0.5).softmax(0).numpy()
    top = int(q.argmax())
    for tree in proposer.finish(growth):
        first, second = children(tree, 0)
        firsts[first] += 1
        if first == top:
            seconds[second] += 1
    without = np.where(np.arange(VOCAB) == top, 0, q)
    assert chi_square(firsts, q) > 1e-3
    assert chi_square(seconds, without / without.sum()) > 1e-3


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """p-value, with rare outcomes pooled."""
    expected = probabilities / probabilities.sum() * counts.sum()
    common = expected >= 5
    seen, wanted = [*counts[common], counts[~common].sum()], [*expected[common], expected[~common].sum()]
    if wanted[-1] == 0:
        seen, wanted = seen[:-1], wanted[:-1]
    return float(stats.chisquare(seen, wanted).pvalue)


def test_which_sampled_nodes_exist_does_not_depend_on_the_draw() -> None:
    """Two allowed tokens cannot fill three places: each node gets two children, whatever was drawn."""
    policy = TreePolicy("rejection", StaticTree.of([(0,), (1,), (2,), (0, 0), (2, 0)]), sampled=True)
    ids = tuple(dense_log_q([], 1.0).topk(2).indices.tolist())
    for seed in range(6):
        tree = draft(policy, TreeShape(9, 3, 3), seed=seed, temperature=1.0, allowed_token_ids=ids)
        assert [len(nodes) for nodes in tree.children] == [2, 1, 0, 0]


def test_greedy_sequences_are_not_drawn_for() -> None:
    """In a batch of both, the greedy one gets point masses and the other one its draws."""
    policy = TreePolicy("rejection", default_static_tree(), sampled=True)
    bench = Bench(make_drafter(policy=policy), feature_size=FEATURES.shape[1])
    bench.add(TOKENS, id=0)
    bench.add(TOKENS, id=1, temperature=1.0)
    bench.prefill({0: FEATURES, 1: FEATURES})
    trees = bench.draft({0: TreeShape(26, 5, 4), 1: TreeShape(26, 5, 4)})
    assert not trees[0].sampled and not trees[0].proposals
    assert trees[1].sampled and trees[1].proposals
    alone = draft(TreePolicy("rejection", default_static_tree()), TreeShape(26, 5, 4))
    assert trees[0].tokens_N.tolist() == alone.tokens_N.tolist()
