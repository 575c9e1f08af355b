"""The block-wise loss against the plain formula, values and gradients."""

from __future__ import annotations

import pytest
import torch

from alula.train import loss
from alula.train.loss import choose_candidates, soft_cross_entropy, target_distribution


def test_target_distribution_is_the_renormalised_whole() -> None:
    hidden, rows = torch.randn(5, 6), torch.randn(20, 6)
    kept = torch.tensor([1, 4, 7, 19])
    whole = (hidden @ rows.T).softmax(-1)[:, kept]
    torch.testing.assert_close(target_distribution(hidden, rows[kept]), whole / whole.sum(-1, keepdim=True))


def test_values_and_gradients_equal_the_plain_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "_BLOCK", 4)
    hidden = torch.randn(10, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    probabilities = torch.randn(7, 9, dtype=torch.float64).softmax(-1)
    rows = torch.randint(0, 7, (10,))
    shares = torch.rand(10, dtype=torch.float64)
    correction = torch.rand(9, dtype=torch.float64)
    plain = -(shares * (probabilities[rows] * (hidden @ weight.T + correction).log_softmax(-1)).sum(-1)).sum()
    expected = torch.autograd.grad(3 * plain, (hidden, weight))
    ours = soft_cross_entropy(hidden, weight, probabilities, rows, shares, correction)
    torch.testing.assert_close(ours, plain)
    for mine, theirs in zip(torch.autograd.grad(3 * ours, (hidden, weight)), expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_all_candidates_leave_the_loss_as_it_is() -> None:
    probabilities = torch.randn(4, 9).softmax(-1)
    for count in (0, 9, 20):
        candidates = choose_candidates(probabilities, count, torch.Generator())
        assert candidates.ids_N.tolist() == list(range(9))
        assert not candidates.correction_N.any()


def test_drawn_candidates_stand_for_the_rest_of_the_vocabulary() -> None:
    generator = torch.Generator().manual_seed(0)
    probabilities = (torch.randn(30, 400, generator=generator) * 3).softmax(-1)
    logits = torch.randn(400, generator=generator)
    candidates = [choose_candidates(probabilities, 100, torch.Generator().manual_seed(seed)) for seed in range(300)]
    likeliest = set(probabilities.sum(0).topk(80).indices.tolist())
    assert all(likeliest <= set(c.ids_N.tolist()) and len(set(c.ids_N.tolist())) == 100 for c in candidates)
    sums = torch.stack([(logits[c.ids_N] + c.correction_N).exp().sum() for c in candidates])
    assert sums.mean().item() == pytest.approx(logits.exp().sum().item(), rel=0.05)
