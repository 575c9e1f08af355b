"""Which pairs of rule and proposals are legal, and that others are refused where the engine is built."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from alula.config import AlulaError
from alula.sequence import SamplingParams
from alula.tree import DraftTree
from alula.verify import check_pair, coupled, load_rule, rejection
from alula.verify.rules import PROPOSALS, RULES, TREES
from tests.verify import toys

LEGAL = {
    *((rule, tree, "point") for rule in RULES for tree in TREES),
    ("rejection", "chain", "sampled"),
    ("rejection", "static", "sampled"),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("proposal", PROPOSALS)
def test_legal_pairs(rule: str, tree: str, proposal: str) -> None:
    if (rule, tree, proposal) in LEGAL:
        check_pair(rule, tree, proposal)
        return
    with pytest.raises(AlulaError, match="proposal 'sampled' does not go with"):
        check_pair(rule, tree, proposal)


@pytest.mark.parametrize(
    "wrong", [("greedy", "chain", "point"), ("coupled", "bush", "point"), ("coupled", "chain", "x")]
)
def test_unknown_words_are_named(wrong: tuple[str, str, str]) -> None:
    with pytest.raises(AlulaError, match="give one of"):
        check_pair(*wrong)


@dataclass(frozen=True)
class Policy:
    rule: str = "rejection"
    tree: object | None = None
    sampled: bool = False


@dataclass(frozen=True)
class Drafter:
    policy: Policy


def test_a_drafter_with_an_illegal_pair_is_refused() -> None:
    with pytest.raises(AlulaError, match="dynamic tree"):
        load_rule("rejection", Drafter(Policy(sampled=True)))
    with pytest.raises(AlulaError, match="both the same rule"):
        load_rule("coupled", Drafter(Policy()))
    with pytest.raises(AlulaError, match="rule is 'greedy'"):
        load_rule("greedy")


@pytest.mark.parametrize(("rule", "module"), [("coupled", coupled), ("rejection", rejection)])
def test_the_rule_asked_for_is_the_rule_given(rule: str, module: object) -> None:
    rows = toys.sequences(SamplingParams(temperature=1.0), range(50))
    trees = [DraftTree.root_only(0)] * 50
    logits = torch.zeros(50, 9)
    verify = load_rule(rule, Drafter(Policy(rule, tree=object())))
    assert verify(logits, trees, toys.plan_of(rows)) == module.verify(logits, trees, toys.plan_of(rows))  # type: ignore[attr-defined]
    assert coupled.verify(logits, trees, toys.plan_of(rows)) != rejection.verify(logits, trees, toys.plan_of(rows))


def test_the_kernels_argmax_is_at_hand_for_other_devices() -> None:
    class Kernels:
        sampler = object()

        def argmax(self, rows: torch.Tensor) -> torch.Tensor:
            return rows.argmax(-1)

    kernels = Kernels()
    verify = load_rule("coupled", None, kernels)  # type: ignore[arg-type]
    assert verify.keywords == {"argmax": kernels.argmax, "sampler": kernels.sampler}  # type: ignore[attr-defined]
