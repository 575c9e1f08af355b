"""Which rule goes with which proposals, and the function that carries it out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol

from alula.config import AlulaError
from alula.kernels.protocol import Kernels
from alula.sequence import StepPlan, Verdict
from alula.tree import DraftTree
from alula.verify import coupled, rejection

if TYPE_CHECKING:
    import torch

TreeKind = Literal["chain", "static", "dynamic"]
Proposal = Literal["point", "sampled"]
RULES = ("coupled", "rejection")
TREES = ("chain", "static", "dynamic")
PROPOSALS = ("point", "sampled")
Verify = Callable[["torch.Tensor", Sequence[DraftTree | None], StepPlan], list[Verdict | None]]


def check_pair(rule: str, tree: str, proposal: str) -> None:
    """Raises AlulaError unless this rule keeps its promise with such trees and proposals.

    tree: `chain`, `static` (its shape is fixed before anything is drawn), or `dynamic` (nodes kept by score).
    proposal: `point` (children follow from the logits: top-k, n-gram) or `sampled` (children drawn from q).
    """
    for name, value, known in (("rule", rule, RULES), ("tree", tree, TREES), ("proposal", proposal, PROPOSALS)):
        if value not in known:
            raise AlulaError(f"{name} is {value!r}: give one of {', '.join(known)}")
    if rule == "coupled" and proposal == "sampled":
        raise AlulaError(
            "proposal 'sampled' does not go with rule 'coupled', whose children follow from the target's own noise: "
            "give proposal 'point', or rule 'rejection'"
        )
    if tree == "dynamic" and proposal == "sampled":
        raise AlulaError(
            "proposal 'sampled' does not go with a dynamic tree, which drops drawn siblings by their score and so "
            "biases the output: give proposal 'point', or a chain or static tree"
        )


class TreePolicy(Protocol):
    """What is read of a drafter's policy; `tree` is None for dynamic trees."""

    @property
    def rule(self) -> str: ...

    @property
    def tree(self) -> object | None: ...

    @property
    def sampled(self) -> bool: ...


def load_rule(rule: str, drafter: object = None, kernels: Kernels | None = None) -> Verify:
    """The verification function of a rule, for trees of this drafter.

    drafter: its `policy`, where it has one, says how it proposes; others make point-mass proposals (n-gram, none).
    kernels: their argmax serves plain greedy rows that are not in host memory, their sampler those of rule `coupled`.
    Raises AlulaError for an unknown rule, an illegal pair, or a drafter that proposes for another rule.
    """
    policy: TreePolicy | None = getattr(drafter, "policy", None)
    if policy is None:
        check_pair(rule, "chain", "point")
    else:
        check_pair(rule, "dynamic" if policy.tree is None else "static", "sampled" if policy.sampled else "point")
        if policy.rule != rule:
            raise AlulaError(f"rule is {rule!r} but the drafter proposes for {policy.rule!r}: give both the same rule")
    argmax, sampler = (None, None) if kernels is None else (kernels.argmax, kernels.sampler)
    if rule == "coupled":
        return partial(coupled.verify, argmax=argmax, sampler=sampler)
    return partial(rejection.verify, argmax=argmax)
