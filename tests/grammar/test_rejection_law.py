"""Rule `rejection` stays exact under a grammar because q is masked before children are drawn from it.

A toy grammar over six tokens: a token may not follow itself, nor its successor follow it, so what is allowed depends on
the path. Suffixes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from alula.sampling.distribution import probabilities
from alula.sequence import SamplingParams
from alula.sequence import Sequence as TokenSequence
from alula.tree import DraftTree
from alula.verify import coupled, rejection
from tests.verify import toys

V, LENGTH, TRIALS = 6, 2, 4000
TARGET, DRAFT = toys.table(V, 21), toys.table(V, 22)
PARAMS = SamplingParams(temperature=1.0)


def allowed_after(token: int) -> NDArray[np.bool_]:
    flags = np.ones(V, np.bool_)
    flags[[token, (token + 1) % V]] = False
    return flags


class Steps:
    """The toy grammar of one sequence; its state is the sequence's own last token."""

    def __init__(self, row: TokenSequence) -> None:
        self._row = row

    def mask(self, path: Sequence[int]) -> torch.Tensor:
        return torch.from_numpy(allowed_after([*self._row.tokens, *path][-1]))

    def advance(self, tokens: Sequence[int]) -> None:
        raise AssertionError("nothing is committed here")


def rows(count: int) -> list[TokenSequence]:
    made = toys.sequences(PARAMS, range(count))
    for row in made:
        row.grammar = Steps(row)
    return made


def law() -> NDArray[np.float64]:
    masked = np.where([allowed_after(token) for token in range(V)], TARGET.numpy(), -np.inf).astype(np.float32)
    return toys.joint_law(probabilities(masked, [PARAMS] * V), 0, LENGTH)


def p_of(verify: toys.Verify, draft: object, count: int = TRIALS) -> float:
    outputs = toys.generate(verify, TARGET, rows(count), draft, LENGTH)  # type: ignore[arg-type]
    return toys.p_value(toys.codes(outputs, V), law())


@pytest.mark.parametrize(
    ("kind", "parents"), [("sampled", toys.CHAIN_3), ("sampled", toys.BUSHY), ("top", toys.BUSHY)], ids=str
)
def test_the_output_has_the_law_of_plain_decoding(kind: str, parents: toys.Parents) -> None:
    p = p_of(rejection.verify, toys.Drafter(DRAFT, parents, kind).draft)
    print(f"rejection under a grammar, {kind}: p = {p:.4f}")
    assert p > 1e-4


def test_rule_coupled_too_and_token_by_token() -> None:
    p = p_of(coupled.verify, toys.Drafter(DRAFT, toys.BUSHY, "coupled").draft)
    assert p > 1e-4
    drafted = toys.generate(coupled.verify, TARGET, rows(300), toys.Drafter(DRAFT, toys.BUSHY, "coupled").draft, 4)
    assert np.array_equal(drafted, toys.generate(coupled.verify, TARGET, rows(300), toys.plain, 4))


def test_mutant_that_prunes_after_drawing_is_caught() -> None:
    """Children are drawn from a q without the mask, and those that the grammar forbids are dropped."""

    def pruned(sequences: list[TokenSequence]) -> list[DraftTree]:
        free = toys.sequences(PARAMS, [row.seed for row in sequences])
        for twin, row in zip(free, sequences, strict=True):
            twin.tokens = list(row.tokens)
        trees = []
        for tree in toys.Drafter(DRAFT, toys.PAIR, "sampled").draft(free):
            flags = allowed_after(int(tree.tokens_N[0]))
            kept = [int(token) for token in tree.tokens_N[1:] if flags[token]]
            tokens = np.array([tree.tokens_N[0], *kept])
            parents = np.array([-1] + [0] * len(kept))
            trees.append(DraftTree(tokens, parents, np.zeros(len(tokens), np.float32), True, tree.proposals))
        return trees

    p = p_of(rejection.verify, pruned)
    print(f"mutant, pruned after drawing: p = {p:.1e}")
    assert p < 1e-8


def emitted(p: list[Fraction], q: list[Fraction], children: Sequence[int]) -> list[Fraction]:
    """Law of the token that rule `rejection` emits with these drawn children, tried in order."""
    p, q, found = list(p), list(q), [Fraction(0)] * len(p)
    left = Fraction(1)
    for token in children:
        accept = min(Fraction(1), p[token] / q[token]) if q[token] else Fraction(0)
        found[token] += left * accept
        left *= 1 - accept
        rest = [max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]
        p = [value / sum(rest) for value in rest] if sum(rest) else p
        q[token] = Fraction(0)
        q = [value / sum(q) for value in q] if sum(q) else q
    return [value + left * share for value, share in zip(found, p, strict=True)]


def masked(values: list[Fraction], allowed: set[int]) -> list[Fraction]:
    kept = [value if token in allowed else Fraction(0) for token, value in enumerate(values)]
    return [value / sum(kept) for value in kept]


def drawn_pairs(q: list[Fraction]) -> list[tuple[tuple[int, int], Fraction]]:
    pairs = permutations([token for token, value in enumerate(q) if value], 2)
    return [((a, b), q[a] * q[b] / (1 - q[a])) for a, b in pairs]


def test_exactly_every_draw_enumerated() -> None:
    """In whole fractions: masked before drawing it is p; dropped after drawing it is not."""
    p = masked([Fraction(n, 10) for n in (1, 4, 2, 3)], {0, 1, 2})
    free_q = [Fraction(n, 12) for n in (5, 1, 2, 4)]
    q = masked(free_q, {0, 1, 2})
    before = [Fraction(0)] * 4
    for pair, chance in drawn_pairs(q):
        before = [a + chance * b for a, b in zip(before, emitted(p, q, pair), strict=True)]
    assert before == p
    after = [Fraction(0)] * 4
    for pair, chance in drawn_pairs(free_q):
        kept = [token for token in pair if token != 3]
        after = [a + chance * b for a, b in zip(after, emitted(p, free_q, kept), strict=True)]
    assert sum(after) == 1 and after != p
