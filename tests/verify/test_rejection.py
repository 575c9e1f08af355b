"""Rule `rejection`: exact enumeration, the law of the output for every legal pair, and mutants that must be caught."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from alula.draft.expand import DynamicGrowth
from alula.sampling.distribution import distribution, probabilities
from alula.sampling.noise import Stream, draw_bits, row_keys, steps, to_unit
from alula.sampling.processors import Context
from alula.sequence import SamplingParams
from alula.tree import DraftTree, TreeShape
from alula.verify import rejection
from alula.verify.rejection import accept_points, accept_sampled, draw
from alula.verify.walk import Walk
from tests.verify import toys

V = 4
TARGET, DRAFT = toys.table(V, 1), toys.table(V, 2)
PARAMS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "top-k": {"temperature": 0.8, "top_k": 2},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
    "min-p": {"temperature": 1.3, "min_p": 0.15},
}
PAIRS: dict[str, tuple[toys.Parents, str]] = {
    "sampled chain": (toys.CHAIN_3, "sampled"),
    "sampled tree": (toys.BUSHY, "sampled"),
    "point chain": (toys.CHAIN_3, "top"),
    "point tree": (toys.BUSHY, "top"),
}

CAUGHT = 1e-6
"""Far below any p-value of right code here; right code must stay above 1e-4."""

Law = tuple[Fraction, ...]


def fractions(*parts: int) -> Law:
    return tuple(Fraction(p, sum(parts)) for p in parts)


LAWS = (fractions(1, 6, 3, 0), fractions(5, 1, 1, 3), fractions(1, 1, 1, 1), fractions(0, 0, 1, 0))
PROPOSALS = (fractions(6, 1, 2, 1), fractions(1, 0, 3, 0), fractions(1, 1, 1, 1), fractions(0, 5, 1, 4))


def normal(weights: list[Fraction], otherwise: Law) -> Law:
    mass = sum(weights)
    return tuple(w / mass for w in weights) if mass else otherwise


def branches(p: Law, q: Law, tokens: tuple[int, ...]) -> tuple[list[Fraction], Law]:
    """Chance of acceptance of each child where it is tried, and what is drawn from when all are rejected."""
    chances = []
    for token in tokens:
        if q[token] == 0:
            break
        chances.append(min(Fraction(1), p[token] / q[token]))
        p = normal([max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True)], p)
        q = normal([Fraction(0) if i == token else b for i, b in enumerate(q)], q)
    return chances, p


def emitted(chances: list[Fraction], rest: Law, tokens: tuple[int, ...]) -> list[Fraction]:
    law, left = [Fraction(0)] * len(rest), Fraction(1)
    for token, chance in zip(tokens, chances, strict=False):
        law[token] += left * chance
        left *= 1 - chance
    return [a + left * b for a, b in zip(law, rest, strict=True)]


def draws(q: Law, k: int) -> dict[tuple[int, ...], Fraction]:
    """Ordered draws without replacement and their chances; fewer than k where the support ends."""
    k = min(k, sum(b > 0 for b in q))
    found = {}
    for tokens in permutations([i for i, b in enumerate(q) if b], k):
        chance, left = Fraction(1), Fraction(1)
        for token in tokens:
            chance *= q[token] / left
            left -= q[token]
        found[tokens] = chance
    return found


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("q", PROPOSALS)
@pytest.mark.parametrize("p", LAWS)
def test_enumeration_of_sampled_siblings_gives_exactly_p(p: Law, q: Law, k: int) -> None:
    """Over every ordered draw and every branch, in whole fractions; then the code against each branch."""
    total = [Fraction(0)] * V
    for tokens, chance in draws(q, k).items():
        chances, rest = branches(p, q, tokens)
        total = [a + chance * b for a, b in zip(total, emitted(chances, rest, tokens), strict=True)]
        follow(accept_sampled, p, tokens, chances, rest, [np.array(q, np.float64)])
    assert tuple(total) == p


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("p", LAWS)
def test_enumeration_of_point_proposals_gives_exactly_p(p: Law, k: int) -> None:
    for tokens in permutations(range(V), k):
        chances, rest = [], p
        for token in tokens:
            chances.append(rest[token])
            rest = normal([Fraction(0) if i == token else a for i, a in enumerate(rest)], rest)
        assert tuple(emitted(chances, rest, tokens)) == p
        follow(accept_points, p, tokens, chances, rest, [])


def follow(
    accept: Callable[..., NDArray[np.int64]],
    p: Law,
    tokens: tuple[int, ...],
    chances: list[Fraction],
    rest: Law,
    proposals: list[NDArray[np.float64]],
) -> None:
    """The code takes child j just below its chance, goes on just above, and leaves `rest` when all are rejected."""
    almost_one = 1 - 1e-12
    for j, chance in enumerate(chances):
        if any(c == 1 for c in chances[:j]):
            return
        for u, accepted in ((float(chance) - 1e-9, True), (float(chance) + 1e-9, False)):
            if 0 < u < 1:
                uniforms = np.array([[almost_one] * j + [u] + [almost_one] * (len(tokens) - j - 1)])
                target = np.array([p], np.float64)
                which = int(accept(target, np.array([tokens]), uniforms, proposals)[0])
                assert (which == j) is accepted
    if all(c < 1 for c in chances):
        target = np.array([p], np.float64)
        uniforms = np.full((1, len(tokens)), almost_one)
        assert accept(target, np.array([tokens]), uniforms, proposals)[0] == -1
        assert target[0] == pytest.approx([float(a) for a in rest], abs=1e-12)


def test_the_rest_is_drawn_by_its_cumulative_sum() -> None:
    law = np.array([[0.0, 0.25, 0.0, 0.75, 0.0]])
    tiny = 2.0**-53
    for u, token in ((tiny, 1), (0.25 - tiny, 1), (0.25, 3), (0.5, 3), (1 - tiny, 3)):
        assert draw(law, np.array([u])).tolist() == [token]


def test_end_of_support_stops_the_trials_and_the_rest_is_drawn() -> None:
    """A second child where q had one token: it was never drawn, so it is not accepted, whatever p says."""
    target = np.array([[0.2, 0.8]])
    which = accept_sampled(target, np.array([[0, 1]]), np.array([[0.9, 1e-9]]), [np.array([1.0, 0.0])])
    assert which.tolist() == [-1] and target[0] == pytest.approx([0.0, 1.0])


def test_zero_residual_falls_back_to_p() -> None:
    """q above p everywhere it matters, as rounding can make it: nothing is left, so p stays."""
    target = np.array([[0.5, 0.5]])
    which = accept_sampled(target, np.array([[0]]), np.array([[1.0]]), [np.array([1.0, 1.0])])
    assert which.tolist() == [-1] and target.tolist() == [[0.5, 0.5]]
    point = np.array([[1.0, 0.0]])
    assert accept_points(point, np.array([[0]]), np.array([[1.0]])).tolist() == [-1]
    assert point.tolist() == [[1.0, 0.0]]


def joint_p(verify: toys.Verify, params: SamplingParams, pair: str, trials: int, draft: Any = None) -> float:
    drafter = toys.Drafter(DRAFT, *PAIRS[pair])
    out = toys.generate(verify, TARGET, toys.sequences(params, range(trials)), draft or drafter.draft, 3)
    law = probabilities(TARGET.numpy(), [params] * V)
    return toys.p_value(toys.codes(out, V), toys.joint_law(law, 0, 3))


@pytest.mark.parametrize(
    ("name", "pair"),
    [("plain", pair) for pair in PAIRS]
    + [(name, pair) for name in ("top-k", "top-p", "min-p") for pair in ("sampled tree", "point tree")],
)
def test_joint_law_of_three_tokens_is_the_targets(name: str, pair: str) -> None:
    p = joint_p(rejection.verify, SamplingParams(**PARAMS[name]), pair, 6000)
    print(f"rejection, {pair}, {name}: p = {p:.4f}")
    assert p > 1e-4


@pytest.mark.parametrize("pair", ["sampled tree", "point tree"])
def test_joint_law_under_penalties_follows_each_path(pair: str) -> None:
    """The law is no longer Markov: it is computed by walking every output."""
    params = SamplingParams(temperature=1.0, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.5)
    law, outputs = np.ones(1), [()]
    for _ in range(3):
        rows = toys.sequences(params, [0] * len(outputs))
        for row, output in zip(rows, outputs, strict=True):
            row.tokens.extend(output)
        law = (law[:, None] * next_laws(rows)).ravel()
        outputs = [(*output, token) for output in outputs for token in range(V)]
    drafter = toys.Drafter(DRAFT, *PAIRS[pair])
    out = toys.generate(rejection.verify, TARGET, toys.sequences(params, range(2500)), drafter.draft, 3)
    p = toys.p_value(toys.codes(out, V), law)
    print(f"rejection, {pair}, penalties: p = {p:.4f}")
    assert p > 1e-4


def next_laws(rows: list[Any]) -> NDArray[np.float64]:
    return distribution(TARGET[[row.tokens[-1] for row in rows]], [Context(row) for row in rows]).numpy()


def test_law_of_dynamic_trees_with_point_proposals() -> None:
    """Each trial keeps the best nodes by score, so shapes differ from trial to trial; so do n-gram chains."""
    params = SamplingParams(temperature=1.0)
    log_q = DRAFT.log_softmax(-1).numpy()

    def grow(rows: list[Any]) -> list[DraftTree]:
        return [best_nodes(log_q, row.tokens[-1], 2 + row.seed % 5) for row in rows]

    p = joint_p(rejection.verify, params, "point tree", 6000, grow)
    print(f"rejection, dynamic point tree: p = {p:.4f}")
    assert p > 1e-4


@pytest.mark.parametrize("floor", [0.1, 0.2, 0.6])
def test_law_of_dynamic_trees_under_a_floor(floor: float) -> None:
    """Which nodes there are follows from the draft's own probabilities, so trees differ from root to root."""
    log_q = DRAFT.log_softmax(-1).numpy()
    shape = TreeShape(nodes=20, depth=3, branch=3, floor=floor)
    trees = [grown_tree(log_q, root, shape) for root in range(V)]
    p = joint_p(
        rejection.verify, SamplingParams(temperature=1.0), "point tree", 6000, lambda rows: from_roots(rows, trees)
    )
    sizes = [len(tree) for tree in trees]
    print(f"rejection, floor {floor}, trees of {sizes}: p = {p:.4f}")
    assert len(set(sizes)) > 1
    assert p > 1e-4


def from_roots(rows: list[Any], trees: list[DraftTree]) -> list[DraftTree]:
    return [trees[row.tokens[-1]] for row in rows]


def grown_tree(log_q: NDArray[np.float32], root: int, shape: TreeShape) -> DraftTree:
    growth = DynamicGrowth(np.array([root]), [shape])
    while len(frontier := growth.frontier):
        logs_FV = log_q[frontier.tokens_F]
        tokens_FV = np.argsort(-logs_FV, axis=1, kind="stable")
        growth.grow(tokens_FV, np.take_along_axis(logs_FV, tokens_FV, 1))
    return growth.trees()[0]


def best_nodes(log_q: NDArray[np.float32], root: int, count: int) -> DraftTree:
    """Grows by the best child of any node, as a reranked tree would be."""
    tokens, parents, scores = [root], [-1], [0.0]
    taken: set[tuple[int, int]] = set()
    while len(tokens) < count:
        _, node, token = max(
            (scores[node] + float(log_q[tokens[node], token]), node, token)
            for node in range(len(tokens))
            for token in range(V)
            if (node, token) not in taken
        )
        taken.add((node, token))
        scores.append(scores[node] + float(log_q[tokens[node], token]))
        tokens.append(token)
        parents.append(node)
    return DraftTree(np.array(tokens), np.array(parents), np.array(scores, np.float32))


def test_law_over_a_larger_vocabulary() -> None:
    size = 40
    target, drafts = toys.table(size, 11, 1.0), toys.table(size, 12, 1.0)
    params = SamplingParams(temperature=1.0, top_p=0.95)
    rows = toys.sequences(params, range(10_000))
    drafter = toys.Drafter(drafts, (-1, 0, 0, 0, 1), "sampled")
    out = toys.generate(rejection.verify, target, rows, drafter.draft, 1)
    p = toys.p_value(out[:, 0], probabilities(target[:1].numpy(), [params])[0])
    print(f"rejection, {size} tokens: p = {p:.4f}")
    assert p > 1e-4


def test_greedy_requests_get_the_argmax_whatever_was_drawn() -> None:
    rows = toys.sequences(SamplingParams(logit_bias={0: 0.1}), range(50))
    out = toys.generate(rejection.verify, TARGET, rows, toys.Drafter(DRAFT, toys.BUSHY, "sampled").draft, 3)
    biased = TARGET.clone()
    biased[:, 0] += 0.1
    last = np.zeros(50, np.int64)
    for column in out.T:
        last = biased.argmax(-1).numpy()[last]
        assert np.array_equal(column, last)


def test_a_repeated_step_repeats_its_draws() -> None:
    rows = toys.sequences(SamplingParams(temperature=1.0), range(200))
    drafter = toys.Drafter(DRAFT, toys.BUSHY, "sampled")
    first = toys.one_step(rejection.verify, TARGET, rows, drafter.draft(rows))
    assert toys.one_step(rejection.verify, TARGET, rows, drafter.draft(rows)) == first


def test_a_missing_proposal_is_named() -> None:
    rows = toys.sequences(SamplingParams(temperature=1.0), [1])
    tree = DraftTree(np.array([0, 1]), np.array([-1, 0]), np.zeros(2, np.float32), sampled=True)
    with pytest.raises(ValueError, match="proposals lack node 0"):
        toys.one_step(rejection.verify, TARGET, rows, [tree])


def broken_residual(
    target: NDArray[np.float64], tokens: NDArray[np.int64], uniforms: NDArray[np.float64], proposals: Any
) -> NDArray[np.int64]:
    """Rejects rightly, then draws from p instead of norm(max(p - q, 0))."""
    return accept_sampled(target.copy(), tokens, uniforms, proposals)


def broken_point_residual(
    target: NDArray[np.float64], tokens: NDArray[np.int64], uniforms: NDArray[np.float64], proposals: Any
) -> NDArray[np.int64]:
    return accept_points(target.copy(), tokens, uniforms)


def q_not_renormalised(
    target: NDArray[np.float64], tokens: NDArray[np.int64], uniforms: NDArray[np.float64], proposals: Any
) -> NDArray[np.int64]:
    """Tries the second sibling against the first one's q."""
    which = accept_sampled(target, tokens[:, :1], uniforms[:, :1], proposals)
    later = accept_sampled(target, np.where(which[:, None] < 0, tokens[:, 1:], -1), uniforms[:, 1:], proposals)
    return np.where(which < 0, np.where(later < 0, -1, later + 1), which)


@pytest.mark.parametrize(
    ("pair", "name", "mutant", "trials"),
    [
        ("sampled tree", "accept_sampled", broken_residual, 2000),
        ("sampled chain", "accept_sampled", broken_residual, 2000),
        ("point tree", "accept_points", broken_point_residual, 2000),
        ("sampled tree", "accept_sampled", q_not_renormalised, 8000),
    ],
)
def test_mutants_of_the_residual_are_caught(
    pair: str, name: str, mutant: Callable[..., Any], trials: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rejection, name, mutant)
    p = joint_p(rejection.verify, SamplingParams(temperature=1.0), pair, trials)
    print(f"mutant, {mutant.__name__}, {pair}: p = {p:.1e}")
    assert p < CAUGHT


def shared_stream(stream: Stream, walks: list[Walk], nodes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Judges a child by the very draw that proposed it."""
    if stream is not Stream.ACCEPT:
        return UNIFORMS(stream, walks, nodes)
    judged = np.full(nodes.shape, 0.5)
    for b, walk in enumerate(walks):
        key = row_keys(Stream.DRAFT, walk.sequence.seed, walk.sequence.sample, walk.sequence.root_position, walk.node)
        tokens = walk.tree.tokens_N[list(walk.children)]
        judged[b, : len(tokens)] = to_unit(draw_bits(key, steps(tokens)))
    return judged


UNIFORMS = rejection._uniforms


def test_mutant_that_shares_a_stream_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "_uniforms", shared_stream)
    p = joint_p(rejection.verify, SamplingParams(temperature=1.0), "sampled chain", 1500)
    print(f"mutant, shared stream: p = {p:.1e}")
    assert p < CAUGHT


def test_mutant_that_prunes_drawn_siblings_by_score_is_caught() -> None:
    """Two siblings are drawn and the likelier one is kept, as a node budget would do with a reranked tree."""

    def pruned(rows: list[Any]) -> list[DraftTree]:
        trees = toys.Drafter(DRAFT, toys.PAIR, "sampled").draft(rows)
        kept = []
        for tree in trees:
            best = max(tree.tokens_N[1:].tolist(), key=lambda token: float(tree.proposals[0][token]))
            tokens = np.array([tree.tokens_N[0], best])
            kept.append(DraftTree(tokens, np.array([-1, 0]), np.zeros(2, np.float32), True, tree.proposals))
        return kept

    p = joint_p(rejection.verify, SamplingParams(temperature=1.0), "sampled tree", 1500, pruned)
    print(f"mutant, pruned siblings: p = {p:.1e}")
    assert p < CAUGHT


def test_mutant_that_draws_from_rounded_q_is_caught() -> None:
    """a3's fault made large: children come from coarse logits, the ratio from fine ones."""

    def coarse(rows: list[Any]) -> list[DraftTree]:
        trees = toys.Drafter((DRAFT * 0.7).round(), toys.CHAIN_3, "sampled").draft(rows)
        fine = DRAFT.softmax(-1).unbind(0)
        return [
            DraftTree(t.tokens_N, t.parents_N, t.scores_N, True, {n: fine[int(t.tokens_N[n])] for n in t.proposals})
            for t in trees
        ]

    p = joint_p(rejection.verify, SamplingParams(temperature=1.0), "sampled chain", 1500, coarse)
    print(f"mutant, another q: p = {p:.1e}")
    assert p < CAUGHT


def test_proposals_shorter_than_the_vocabulary_are_zero_beyond() -> None:
    rows = toys.sequences(SamplingParams(temperature=1.0), range(500))
    tree = DraftTree(np.array([0, 1]), np.array([-1, 0]), np.zeros(2, np.float32), True, {0: torch.tensor([0.0, 1.0])})
    tokens = np.array([v.tokens[0] for v in toys.one_step(rejection.verify, TARGET, rows, [tree] * 500)])
    assert toys.p_value(tokens, probabilities(TARGET[:1].numpy(), [rows[0].params])[0]) > 1e-4
