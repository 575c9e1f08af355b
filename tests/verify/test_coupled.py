"""Rule `coupled`: the text does not depend on the tree, and follows the target's distribution."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alula.kernels.protocol import Sampler
from alula.sampling.distribution import probabilities
from alula.sequence import SamplingParams
from alula.sequence import Sequence as TokenSequence
from alula.tree import DraftTree
from alula.verify import coupled
from alula.verify.walk import Walk
from tests.verify import toys

V = 4
TARGET, DRAFT = toys.table(V, 1), toys.table(V, 2)
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "plain": {"temperature": 1.0},
    "cuts": {"temperature": 0.8, "top_k": 3, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"temperature": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "greedy penalties": {"frequency_penalty": 0.7, "logit_bias": {1: 0.4}},
    "masks": {"temperature": 1.2, "min_tokens": 3, "stop_token_ids": (2,), "allowed_token_ids": (0, 1, 2)},
    "processor": {"temperature": 1.0, "logits_processors": (lambda path, logits: logits * (1 + path[-1] % 2),)},
}


TRIALS = 80


def rows_for(params: SamplingParams, count: int) -> list[TokenSequence]:
    return toys.sequences(params, range(count), prompt=(1, 0))


def random_tree(rng: np.random.Generator, root: int, size: int) -> DraftTree:
    nodes = int(rng.integers(1, 9))
    parents = np.array([-1, *(rng.integers(0, i) for i in range(1, nodes))])
    tokens = np.concatenate([[root], rng.integers(0, size, nodes - 1)])
    return DraftTree(tokens, parents, np.zeros(nodes, np.float32))


@pytest.mark.parametrize("name", PARAMS)
def test_text_does_not_depend_on_the_tree(name: str) -> None:
    params = SamplingParams(**PARAMS[name])
    plain = toys.generate(coupled.verify, TARGET, rows_for(params, TRIALS), toys.plain, 8)
    rng = np.random.default_rng(0)
    drafts = {
        "random": lambda rows: [random_tree(rng, row.tokens[-1], V) for row in rows],
        "bushy": toys.Drafter(DRAFT, toys.BUSHY, "coupled").draft,
        "target as drafter": toys.Drafter(TARGET, toys.BUSHY, "coupled").draft,
        "top": toys.Drafter(DRAFT, toys.BUSHY, "top").draft,
    }
    for kind, draft in drafts.items():
        assert np.array_equal(toys.generate(coupled.verify, TARGET, rows_for(params, TRIALS), draft, 8), plain), kind


def test_every_small_tree_gives_the_same_tokens() -> None:
    """All trees of up to four nodes over three tokens, each for 40 seeds: exact, no sampling of trees."""
    target = toys.table(3, 5)
    params = SamplingParams(temperature=1.0)
    rows = toys.sequences(params, range(40))
    wanted = toys.generate(coupled.verify, target, toys.sequences(params, range(40)), toys.plain, 4)
    seen = 0
    for count in (1, 2, 3):
        for parents in product(*(range(i) for i in range(1, count + 1))):
            for tokens in product(range(3), repeat=count):
                tree = DraftTree(np.array([0, *tokens]), np.array([-1, *parents]), np.zeros(count + 1, np.float32))
                for row, verdict in enumerate(toys.one_step(coupled.verify, target, rows, [tree] * 40)):
                    assert list(verdict.tokens) == wanted[row, : len(verdict.tokens)].tolist()
                    assert [int(tree.tokens_N[n]) for n in verdict.path] == list(verdict.tokens[:-1])
                    seen = max(seen, len(verdict.path))
    assert seen == 3


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.data())
def test_walk_takes_the_longest_path_that_carries_the_choices(seed: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, 0, V)
    params = SamplingParams(**data.draw(st.sampled_from([{}, {"temperature": 1.0}])))
    verdict = toys.one_step(coupled.verify, TARGET, toys.sequences(params, [seed]), [tree])[0]
    node, checked = 0, 0
    for token in verdict.tokens:
        checked += len(tree.children[node])
        match = [c for c in tree.children[node] if tree.tokens_N[c] == token]
        if not match:
            break
        node = match[0]
    assert verdict.path == tuple(tree.path(node)) and verdict.checked == checked
    assert len(verdict.tokens) == len(verdict.path) + 1


def law(params: SamplingParams) -> np.ndarray:
    return probabilities(TARGET.numpy(), [params] * V)


@pytest.mark.parametrize("name", ["plain", "cuts"])
def test_joint_law_of_three_tokens_is_the_targets(name: str) -> None:
    params = SamplingParams(**PARAMS[name])
    rows = toys.sequences(params, range(10_000))
    out = toys.generate(coupled.verify, TARGET, rows, toys.Drafter(DRAFT, toys.BUSHY, "coupled").draft, 3)
    p = toys.p_value(toys.codes(out, V), toys.joint_law(law(params), 0, 3))
    print(f"coupled, {name}: p = {p:.4f}")
    assert p > 1e-4


def test_same_noise_makes_better_guesses_than_fresh_noise() -> None:
    """The point of sharing it: the drafter's first child carries the target's choice more often."""
    rows = toys.sequences(SamplingParams(temperature=1.0), range(2000))
    shared = toys.one_step(coupled.verify, TARGET, rows, toys.Drafter(DRAFT, (-1, 0), "coupled").draft(rows))
    top = toys.one_step(coupled.verify, TARGET, rows, toys.Drafter(DRAFT, (-1, 0), "top").draft(rows))
    assert np.mean([len(v.path) for v in shared]) > np.mean([len(v.path) for v in top]) + 0.05


def test_mutant_that_redraws_after_a_mismatch_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = coupled._decide

    def redraw(shaped: np.ndarray, walks: list[Walk], sampler: Sampler | None) -> list[tuple[int, int | None]]:
        moves = right(shaped, walks, sampler)
        for walk in walks:
            walk.sequence.seed += 10**9
        again = right(shaped, walks, sampler)
        for walk in walks:
            walk.sequence.seed -= 10**9
        return [
            move if move[1] is not None or not walk.children else (other[0], None)
            for walk, move, other in zip(walks, moves, again, strict=True)
        ]

    monkeypatch.setattr(coupled, "_decide", redraw)
    params = SamplingParams(temperature=1.0)
    rows = toys.sequences(params, range(2000))
    out = toys.generate(coupled.verify, TARGET, rows, toys.Drafter(DRAFT, toys.CHAIN_3, "coupled").draft, 3)
    p = toys.p_value(toys.codes(out, V), toys.joint_law(law(params), 0, 3))
    print(f"mutant, redraw: p = {p:.1e}")
    assert p < 1e-12


def test_constructed_ties_take_the_lowest_id_on_every_path() -> None:
    logits = torch.zeros(2, 9)
    logits[0, [5, 3]] = 1
    logits[1, [8, 2]] = 1
    tree = DraftTree(np.array([0, 5, 3]), np.array([-1, 0, 0]), np.zeros(3, np.float32))
    rows = torch.cat([logits, logits[1:]])
    for params in (SamplingParams(), SamplingParams(logprobs=0), SamplingParams(logit_bias={0: 0.5})):
        verdict = coupled.verify(rows, [tree], toys.plan_of(toys.sequences(params, [1])))[0]
        assert verdict is not None and verdict.tokens == (3, 2) and verdict.path == (2,)
