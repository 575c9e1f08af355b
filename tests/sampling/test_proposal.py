"""What drafters are given: log q under the request's parameters, the target's own noise, and honest draws from q."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch

from alula.sampling.noise import gumbel
from alula.sampling.processors import Context
from alula.sampling.proposal import proposal_log_q, proposal_scores, sample_children
from alula.sequence import SamplingParams, Sequence
from tests.verify.toys import p_value

LOGITS = torch.randn(3, 6, generator=torch.Generator().manual_seed(3))
VOCABULARY = torch.tensor([9, 2, 4, 0, 7, 5])


def contexts(count: int = 3, path: tuple[int, ...] = (4, 5), **params: Any) -> list[Context]:
    shared = SamplingParams(**params)
    return [Context(Sequence(b, 1, [1, 2, 3], shared, seed=b + 10), path) for b in range(count)]


def test_keys_hold_the_noise_by_which_the_target_will_choose() -> None:
    where = contexts(temperature=0.8)
    log_q, keys = proposal_scores(LOGITS, where, vocabulary=VOCABULARY, rule="coupled")
    assert torch.allclose(log_q, (LOGITS / 0.8).log_softmax(-1), atol=1e-6)
    for b, context in enumerate(where):
        assert context.position == 5
        noise = gumbel(context.sequence.seed, 0, 5, VOCABULARY.numpy())
        assert np.allclose(keys[b] - log_q[b], noise, atol=1e-5)


@pytest.mark.parametrize(("rule", "temperature"), [("coupled", 0.0), ("rejection", 0.0), ("rejection", 0.8)])
def test_keys_are_log_q_without_noise(rule: str, temperature: float) -> None:
    log_q, keys = proposal_scores(LOGITS, contexts(temperature=temperature), rule=rule)
    assert torch.equal(log_q, keys)
    assert torch.allclose(log_q, (LOGITS / (temperature or 1.0)).log_softmax(-1), atol=1e-6)


def test_greedy_and_noisy_requests_mix() -> None:
    where = [contexts()[0], contexts(temperature=1.0)[1], contexts()[2]]
    log_q, keys = proposal_scores(LOGITS, where, rule="coupled")
    assert [torch.equal(log_q[b], keys[b]) for b in range(3)] == [True, False, True]


def test_shaping_reaches_the_draft_vocabulary() -> None:
    where = contexts(temperature=1.0, logit_bias={2: -np.inf, 7: 3.0, 49: 1.0}, frequency_penalty=1.0)
    log_q = proposal_log_q(LOGITS, where, vocabulary=VOCABULARY)
    shaped = LOGITS.clone()
    shaped[:, 1] = -torch.inf
    shaped[:, 4] += 3
    shaped[:, [0, 3]] -= 0
    shaped[:, [2, 5]] -= 1  # ids 4 and 5 stand on the path; 2 and 3 are output too, 3 is not in the vocabulary
    assert torch.allclose(log_q, shaped.log_softmax(-1), atol=1e-6)


def test_masked_columns_are_forbidden_even_if_none_is_left() -> None:
    log_q, keys = proposal_scores(
        LOGITS, contexts(temperature=1.0, allowed_token_ids=(1,)), vocabulary=VOCABULARY, rule="coupled"
    )
    assert (log_q == -torch.inf).all() and (keys == -torch.inf).all()
    masked = [Context(c.sequence, c.path, torch.arange(10) < 3) for c in contexts(temperature=1.0)]
    log_q, keys = proposal_scores(LOGITS, masked, vocabulary=VOCABULARY, rule="coupled")
    assert (keys > -torch.inf).tolist() == [[False, True, False, True, False, False]] * 3


def test_logits_are_not_changed() -> None:
    before = LOGITS.clone()
    proposal_scores(LOGITS, contexts(temperature=0.5, logit_bias={2: 1.0}), rule="coupled")
    assert torch.equal(before, LOGITS)


def test_draws_are_without_replacement_from_the_very_q_that_is_returned() -> None:
    """Chi-square over ordered triples against q(a) q(b) / (1 - q(a)) q(c) / (1 - q(a) - q(b))."""
    trials = 40_000
    log_q = LOGITS[:1].log_softmax(-1).expand(trials, 6)
    columns, q_RV = sample_children(log_q, 3, contexts(trials, temperature=1.0), [0] * trials, vocabulary=VOCABULARY)
    q = q_RV[0, VOCABULARY].double().numpy()
    assert q_RV.shape == (trials, 10) and q.sum() == pytest.approx(1, abs=1e-6)
    law = np.zeros(6**3)
    for a, b, c in permutations(range(6), 3):
        law[a * 36 + b * 6 + c] = q[a] * q[b] / (1 - q[a]) * q[c] / (1 - q[a] - q[b])
    p = p_value(columns @ np.array([36, 6, 1]), law / law.sum())
    print(f"ordered draws: p = {p:.4f}")
    assert p > 1e-4


def test_draws_end_with_the_support() -> None:
    log_q = torch.tensor([[0.5, 0.0, 0.5, 0.0]]).log()
    columns, _ = sample_children(log_q, 3, contexts(1, temperature=1.0), [0])
    assert sorted(columns[0, :2].tolist()) == [0, 2] and columns[0, 2] == -1


def test_parents_of_one_step_draw_independently() -> None:
    trials = 20_000
    log_q = torch.full((trials, 4), 0.25).log()
    where = contexts(trials, temperature=1.0)
    first, _ = sample_children(log_q, 1, where, [0] * trials)
    second, _ = sample_children(log_q, 1, where, [1] * trials)
    again, _ = sample_children(log_q, 1, where, [1] * trials)
    assert np.array_equal(second, again)
    assert p_value((first * 4 + second)[:, 0], np.full(16, 1 / 16)) > 1e-4
