"""The block-wise loss against the plain formula, values and gradients."""

from __future__ import annotations

import pytest
import torch

from alula.train import loss
from alula.train.loss import (
    choose_candidates,
    mean_cross_entropy,
    soft_cross_entropy,
    target_distribution,
    teacher,
)


def test_target_distribution_is_the_renormalised_whole() -> None:
    hidden, rows = torch.randn(5, 6), torch.randn(20, 6)
    kept = torch.tensor([1, 4, 7, 19])
    whole = (hidden @ rows.T).softmax(-1)[:, kept]
    torch.testing.assert_close(target_distribution(hidden, rows[kept]), whole / whole.sum(-1, keepdim=True))


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 1.0])
def test_values_and_gradients_equal_the_plain_formula(monkeypatch: pytest.MonkeyPatch, acceptance: float) -> None:
    monkeypatch.setattr(loss, "_BLOCK", 4)
    hidden = torch.randn(10, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    probabilities = torch.randn(7, 9, dtype=torch.float64).softmax(-1)
    rows = torch.randint(0, 7, (10,))
    shares = torch.rand(10, dtype=torch.float64)
    correction = torch.rand(9, dtype=torch.float64)
    log_q = (hidden @ weight.T + correction).log_softmax(-1)
    entropy = -(probabilities[rows] * log_q).sum(-1)
    accepted = torch.minimum(log_q.exp(), probabilities[rows]).sum(-1)
    plain = (shares * ((1 - acceptance) * entropy - acceptance * accepted.log())).sum()
    expected = torch.autograd.grad(3 * plain, (hidden, weight))
    ours = soft_cross_entropy(hidden, weight, probabilities, rows, shares, correction, acceptance=acceptance)
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


def test_a_frozen_lm_head_gets_no_gradient() -> None:
    hidden = torch.randn(3, 6, requires_grad=True)
    taught = teacher(torch.randn(5, 6), torch.randn(9, 6), 0, torch.Generator())
    mean_cross_entropy(hidden, torch.randn(9, 6), taught, torch.tensor([0, 4, 4])).backward()
    assert hidden.grad is not None and hidden.grad.abs().sum() > 0
    assert mean_cross_entropy(hidden[:0], torch.randn(9, 6), taught, torch.tensor([], dtype=torch.long)) == 0


def test_the_acceptance_loss_raises_what_cross_entropy_gives_away() -> None:
    """A drafter that cannot say p: it has one number h and says tokens in proportion to exp(h), exp(h / 2) and 1."""
    p = torch.tensor([[0.7, 0.0, 0.3]])
    reach = torch.tensor([[1.0], [0.5], [0.0]])
    accepted = []
    for acceptance in (0.0, 1.0):
        hidden = torch.zeros(1, 1, requires_grad=True)
        for _ in range(300):
            value = soft_cross_entropy(
                hidden, reach, p, torch.tensor([0]), torch.ones(1), torch.zeros(3), acceptance=acceptance
            )
            (slope,) = torch.autograd.grad(value, hidden)
            hidden = (hidden - 0.3 * slope).detach().requires_grad_()
        accepted.append(torch.minimum((hidden @ reach.T).softmax(-1), p).sum().item())
    assert accepted[1] > accepted[0] + 0.05


def test_bf16_states_are_judged_in_fp32() -> None:
    """Under autocast the logits stay exact: only the states were rounded."""
    taught = teacher(torch.randn(5, 6), torch.randn(9, 6), 0, torch.Generator())
    hidden, weight = torch.randn(3, 6).bfloat16(), torch.randn(9, 6)
    plain = mean_cross_entropy(hidden.float(), weight, taught, torch.arange(3))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(mean_cross_entropy(hidden, weight, taught, torch.arange(3)), plain)
