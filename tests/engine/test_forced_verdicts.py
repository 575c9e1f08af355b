"""A scripted drafter forces each kind of verdict; KV after the commit must be what a plain run leaves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from alula.cache import PagedCache, Transaction
from alula.draft.drafter import Drafter, grows
from alula.draft.load import load_drafter
from alula.engine.engine import Engine
from alula.engine.request import Request
from alula.model.load import LoadedModel
from alula.sequence import PlanItem, SamplingParams, StepPlan
from alula.tree import DraftTree, TreeShape
from tests.draft.heads import save_random_head
from tests.draft.medusas import save_random_medusa
from tests.engine.tiny import complete, engine_for, prompt_of

Script = Callable[[list[int], int], DraftTree]


class Scripted:
    """Keeps a real head's KV but proposes the script's trees: script(true continuation, root token) -> tree."""

    def __init__(self, head: Drafter, truth: list[int], script: Script) -> None:
        self._head, self._truth, self._script = head, truth, script
        self.name, self.kv_shapes, self.kv_first, self.taps = head.name, head.kv_shapes, head.kv_first, head.taps

    def scratch(self, shape: TreeShape) -> int:
        return self._head.scratch(shape)

    def draft(self, plan: StepPlan, txn: Transaction) -> list[DraftTree | None]:
        drafted = self._head.draft(plan, txn)
        return [self._tree(item) if grows(item) else tree for item, tree in zip(plan.items, drafted, strict=True)]

    def _tree(self, item: PlanItem) -> DraftTree:
        tokens = item.sequence.tokens
        return self._script(self._truth[len(tokens) :], tokens[-1])


def chain(root: int, tokens: list[int]) -> DraftTree:
    count = len(tokens) + 1
    return DraftTree(np.array([root, *tokens]), np.arange(-1, count - 1), -np.arange(count, dtype=np.float32))


def wrong(token: int) -> int:
    return (token + 1) % 256


def reject_first(truth: list[int], root: int) -> DraftTree:
    return chain(root, [wrong(truth[0]), *truth[1:3]])


def reject_middle(truth: list[int], root: int) -> DraftTree:
    return chain(root, [truth[0], truth[1], wrong(truth[2]), truth[3]])


def reject_leaf(truth: list[int], root: int) -> DraftTree:
    return chain(root, [truth[0], truth[1], wrong(truth[2])])


def accept_all(truth: list[int], root: int) -> DraftTree:
    return chain(root, truth[:4])


def accept_later_siblings(truth: list[int], root: int) -> DraftTree:
    """root -> (wrong, wrong, right), right -> (wrong, right): accepted nodes lie apart, none first."""
    tokens = [root, wrong(truth[0]), wrong(truth[0] + 1), truth[0], wrong(truth[1]), truth[1], 7]
    return DraftTree(np.array(tokens), np.array([-1, 0, 0, 0, 3, 3, 1]), -np.arange(7, dtype=np.float32))


SCRIPTS = {reject_first: 0, reject_middle: 2, reject_leaf: 2, accept_all: 4, accept_later_siblings: 2}
LENGTH = 40


@pytest.fixture(scope="module", params=[save_random_head, save_random_medusa], ids=["eagle3", "medusa"])
def head_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny: LoadedModel) -> Path:
    folder: Path = request.param(tmp_path_factory.mktemp("head"), tiny)
    return folder


@pytest.fixture(params=["float32", "bfloat16", "int8"])
def model(request: pytest.FixtureRequest, tiny_folder: Path) -> LoadedModel:
    from alula.model.load import load_model

    return load_model(str(tiny_folder), dtype=request.param)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_kv_after_each_commit_equals_a_plain_run(model: LoadedModel, head_folder: Path, script: Script) -> None:
    prompt = prompt_of(21)
    head = load_drafter(str(head_folder), model, allow_unverified=True)
    plain = complete(engine_for(model), prompt, max_tokens=LENGTH + 8, ignore_eos=True).outputs[0].token_ids
    truth = prompt + plain
    engine = engine_for(model, Scripted(head, truth, script), shape=TreeShape(nodes=8, depth=5, branch=3))
    engine.add(Request(tuple(prompt), SamplingParams(max_tokens=LENGTH, ignore_eos=True)))
    reference = _Reference(model, head, truth)
    kept = []
    while engine.has_work:
        tokens_before = engine.totals.committed
        engine.step()
        kept.append(engine.totals.committed - tokens_before)
        if len(kept) > 1 and engine.scheduler.running:
            reference.compare(engine)
    assert set(kept[1:-2]) == {SCRIPTS[script] + 1}
    assert engine.pop(0).outputs[0].token_ids == plain[:LENGTH]


class _Reference:
    """KV of a plain prefill of the whole text: the target's, and a fresh drafter's."""

    def __init__(self, model: LoadedModel, head: Drafter, truth: list[int]) -> None:
        self._engine = engine_for(model, head, shape=TreeShape(nodes=2, depth=1, branch=1))
        self._engine.add(Request(tuple(truth), SamplingParams(max_tokens=8, ignore_eos=True)))
        self._engine.step()
        self._engine.step()

    def compare(self, engine: Engine) -> None:
        length, drafted = engine.cache.length(0), engine.cache.draft_length(0)
        assert drafted >= length - 6
        for ours, theirs in zip(engine.cache.target_layers, self._engine.cache.target_layers, strict=True):
            for side in ("keys", "values"):
                expected = _rows(self._engine.cache, getattr(theirs, side), 0, length)
                assert torch.equal(_rows(engine.cache, getattr(ours, side), 0, length), expected)
        for ours, theirs in zip(engine.cache.drafter_layers, self._engine.cache.drafter_layers, strict=True):
            for side in ("keys", "values"):
                expected = _rows(self._engine.cache, getattr(theirs, side), 1, drafted)
                assert torch.equal(_rows(engine.cache, getattr(ours, side), 1, drafted), expected)


def _rows(cache: PagedCache, pool: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    with cache.begin({0: 0}) as txn:
        return pool[:, torch.from_numpy(txn.slots(0, np.arange(start, stop)))]
