"""The loop: what moves, what stays, and that an interruption changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from alula.config import AlulaError
from alula.train.config import Recipe
from alula.train.data import Conversation
from alula.train.evaluate import StepFigures, evaluate, expected_length
from alula.train.initial import new_head, ridge
from alula.train.methods.eagle3 import Eagle3Method
from alula.train.methods.options import Eagle3Options
from alula.train.muon import orthogonal
from alula.train.trainer import Trainer
from tests.train.support import DRAFT, SIZES, FakeTarget, batch, conversations, eagle3, store, vocabulary

T = TypeVar("T")
RECIPE = Recipe(total_tokens=4000, tokens_per_batch=40, warmup_tokens=100, matrix_rate=0.02)
OPTIONS = Eagle3Options(steps=3, chain_fraction=0.5, candidates=20)


def trainer(data: Sequence[Conversation], *, recipe: Recipe = RECIPE, options: Eagle3Options = OPTIONS) -> Trainer:
    target = FakeTarget()
    return Trainer(eagle3(target, options), store(target), recipe, lambda: data, seed=5)


def losses(entry: dict[str, float]) -> list[float]:
    return [entry[f"loss_{step}"] for step in range(3)]


def test_the_loss_falls_and_the_embedding_stays() -> None:
    running = trainer(conversations(60))
    before = running.method.head.embedding_VD.clone()
    first = running.train_step()
    while not running.finished:
        last = running.train_step()
    assert all(late < early - 0.3 for late, early in zip(losses(last), losses(first), strict=True))
    assert torch.equal(running.method.head.embedding_VD, before)
    assert "embedding_VD" not in dict(running.method.head.named_parameters())
    assert "embedding_VD" not in running.method.head.state_dict()


@pytest.mark.parametrize(("cut", "accumulate"), [(1, 1), (4, 1), (9, 1), (10, 1), (13, 1), (4, 3)])
def test_a_run_cut_anywhere_and_resumed_is_the_same_run(cut: int, accumulate: int) -> None:
    data = conversations(60)  # about ten batches, so the cuts lie around the end of an epoch too
    recipe = replace(RECIPE, accumulate=accumulate)
    whole = trainer(data, recipe=recipe)
    expected = [losses(whole.train_step()) for _ in range(18)]
    first = trainer(data, recipe=recipe)
    found = [losses(first.train_step()) for _ in range(cut)]
    second = trainer(data, recipe=recipe)
    second.restore(_copied(first.state()))
    found += [losses(second.train_step()) for _ in range(18 - cut)]
    assert found == expected
    for mine, theirs in zip(second.method.module.parameters(), whole.method.module.parameters(), strict=True):
        assert torch.equal(mine, theirs)


class Dealt:
    """One of several processes whose gradients the test adds up by hand."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count
        self.gradients: list[Tensor] = []

    def agree(self, make: Callable[[], T]) -> T:
        return make()

    def meet(self) -> None:
        """The test runs them one after the other."""

    def add(self, parameters: Sequence[torch.nn.Parameter], figures: Tensor) -> None:
        self.gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]


def test_the_batches_of_a_step_are_dealt_out_among_processes() -> None:
    """The gradients of two processes add up to those of one, chain and candidate draws included."""
    recipe, data = replace(RECIPE, accumulate=4), conversations(60)

    def gradients(rank: int, count: int) -> list[Tensor]:
        dealt, target = Dealt(rank, count), FakeTarget()
        Trainer(eagle3(target, OPTIONS), store(target), recipe, lambda: data, seed=5, processes=dealt).train_step()
        return dealt.gradients

    for whole, first, second in zip(gradients(0, 1), gradients(0, 2), gradients(1, 2), strict=True):
        assert first.abs().sum() > 0 and second.abs().sum() > 0
        torch.testing.assert_close(first + second, whole, atol=1e-6, rtol=1e-5)
    with pytest.raises(AlulaError, match="accumulate"):
        gradients(0, 3)


def test_accumulated_batches_are_averaged() -> None:
    """The log's loss is the mean over the step's batches, and all their tokens count."""
    data, options = conversations(60), Eagle3Options(steps=3)
    one, four = trainer(data, options=options), trainer(data, recipe=replace(RECIPE, accumulate=4), options=options)
    for running in (one, four):
        for optimizer, _ in running.optimizers:
            optimizer.step = lambda: None  # type: ignore[method-assign,assignment]
    alone = torch.tensor([losses(one.train_step()) for _ in range(4)])
    torch.testing.assert_close(torch.tensor(losses(four.train_step())), alone.mean(0))
    assert four.progress.tokens == one.progress.tokens


def test_new_data_joins_at_the_next_epoch_only() -> None:
    data = conversations(12)
    running = trainer(data)
    running.train_step()
    planned = [list(keys) for keys in running.progress.plan]
    resumed = trainer(conversations(30))
    resumed.restore(_copied(running.state()))
    while resumed.progress.epoch == 0:
        assert resumed.progress.plan == planned
        resumed.train_step()
    assert sum(len(keys) for keys in resumed.progress.plan) == 30


def test_tokens_that_the_head_cannot_say_are_not_learned() -> None:
    """Where the target's choice lies outside the draft vocabulary the distribution is no guide."""
    running = trainer(conversations(6), recipe=Recipe(tokens_per_batch=1000, total_tokens=10))
    running.method.known_V[:] = False
    before = [parameter.clone() for parameter in running.method.head.parameters()]
    running.train_step()
    for now, then in zip(running.method.head.parameters(), before, strict=True):
        assert torch.equal(now, then)


def test_the_schedule_warms_up_and_comes_down() -> None:
    recipe = Recipe(warmup_tokens=100, total_tokens=1100, final_share=0.1)
    rates = [recipe.share(tokens) for tokens in (0, 50, 100, 600, 1100, 5000)]
    assert rates[0] < 0.02 and 0.4 < rates[1] < 0.6
    assert rates[2:] == pytest.approx([1.0, 0.55, 0.1, 0.1])


def test_figures_of_a_head_that_knows_and_of_one_that_does_not() -> None:
    target = FakeTarget()
    data = conversations(8)
    method = eagle3(target)
    figures = evaluate(method, [batch(target, data)], steps=3)
    assert [f.rows for f in figures] == [sum(max(len(c.learned) - step, 0) for c in data) for step in range(3)]
    assert all(0 <= f.top1 <= f.top4 <= 1 for f in figures)
    method._target_ids_C = torch.full((DRAFT,), -1)
    unknown = evaluate(method, [batch(target, data)], steps=3)
    assert all(f.top4 == 0 for f in unknown)


def test_expected_length_multiplies_the_conditional_figures() -> None:
    figures = [StepFigures(1, 0, 0, 0.5, 0.8), StepFigures(1, 0, 0, 0.4, 0.5)]
    assert expected_length(figures, branch=1) == pytest.approx(1 + 0.5 + 0.2)
    assert expected_length(figures, branch=4) == pytest.approx(1 + 0.8 + 0.4)


def test_ridge_finds_a_linear_map() -> None:
    inputs = torch.randn(4000, 6) * torch.tensor([1.0, 10.0, 0.1, 1.0, 1.0, 1.0])
    weight = torch.randn(3, 6)
    found = ridge(inputs, inputs @ weight.T)
    torch.testing.assert_close(found, weight, rtol=0.06, atol=0.06)


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (7, 7)])
def test_an_orthogonal_update_moves_all_directions_alike(shape: tuple[int, int]) -> None:
    left, _, right = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    sizes = torch.logspace(0, -1.5, min(shape))
    found = orthogonal(left @ torch.diag(sizes) @ right)
    values = torch.diagonal(left.T @ found @ right.T)
    assert values.min() > 0.5 and values.max() < 1.4
    torch.testing.assert_close(found, left @ torch.diag(values) @ right, atol=1e-4, rtol=0)


def test_the_fitted_start_beats_a_random_one() -> None:
    target = FakeTarget()
    data = conversations(300)
    fitted = new_head(SIZES, target, vocabulary(), [batch(target, [c]) for c in data], seed=0)
    held = [batch(target, conversations(40, seed=9))]
    random = evaluate(eagle3(target), held, steps=1)
    start = Eagle3Method(OPTIONS, fitted, vocabulary(), target)
    assert evaluate(start, held, steps=1)[0].top1 > 2 * random[0].top1 + 0.1


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """As if it had been written to disk."""
    import io

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded
