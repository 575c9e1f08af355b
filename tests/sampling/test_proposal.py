"""What drafters are given: log q under the request's parameters, the target's own noise, and honest draws from q."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch

from alula.kernels.extension import _native
from alula.kernels.sampler import NativeSampler
from alula.sampling.columns import DraftColumns
from alula.sampling.noise import gumbel
from alula.sampling.processors import Context, Counts, Shaper
from alula.sampling.proposal import draft_shapers, proposal_keys, proposal_log_q, sample_children
from alula.sequence import SamplingParams, Sequence
from tests.verify.toys import p_value

LOGITS = torch.randn(3, 6, generator=torch.Generator().manual_seed(3))
VOCABULARY = DraftColumns(np.array([9, 2, 4, 0, 7, 5]))


def contexts(count: int = 3, path: tuple[int, ...] = (4, 5), **params: Any) -> list[Context]:
    shared = SamplingParams(**params)
    return [Context(Sequence(b, 1, [1, 2, 3], shared, seed=b + 10), path) for b in range(count)]


def test_keys_hold_the_noise_by_which_the_target_will_choose() -> None:
    where = contexts(temperature=0.8)
    keys = proposal_keys(LOGITS, where, vocabulary=VOCABULARY, rule="coupled")
    for b, context in enumerate(where):
        assert context.position == 5
        noise = gumbel(context.sequence.seed, 0, 5, VOCABULARY.ids_C)
        assert np.allclose(keys[b] - LOGITS[b] / 0.8, noise, atol=1e-5)
    halved = proposal_keys(LOGITS, where, vocabulary=VOCABULARY, rule="coupled", noise_scale=0.5)
    assert torch.allclose(halved, keys * 2)


def test_keys_of_the_native_sampler_are_those_of_numpy() -> None:
    where = [contexts()[0], *contexts(temperature=0.7)[1:]]
    where += [Context(where[1].sequence, (7, 8))]
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(5))
    logits[2, 1] = -torch.inf
    sampler = NativeSampler(_native.Level(_native.levels()[0]))
    found, wanted = (
        proposal_keys(logits, where, vocabulary=VOCABULARY, rule="coupled", noise_scale=0.8, sampler=of)
        for of in (sampler, None)
    )
    assert torch.allclose(found, wanted, rtol=1e-6, atol=0)
    assert torch.equal(found[0], logits[0])


@pytest.mark.parametrize(("rule", "temperature"), [("coupled", 0.0), ("rejection", 0.0), ("rejection", 0.8)])
def test_keys_are_log_q_without_noise(rule: str, temperature: float) -> None:
    keys = proposal_keys(LOGITS, contexts(temperature=temperature), rule=rule, noise_scale=0.8)
    assert torch.equal(keys, LOGITS / (temperature or 1.0))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_log_q_is_normalised(temperature: float) -> None:
    log_q = proposal_log_q(LOGITS, contexts(temperature=temperature), vocabulary=VOCABULARY)
    assert torch.allclose(log_q, (LOGITS / (temperature or 1.0)).log_softmax(-1), atol=1e-6)


def test_greedy_and_noisy_requests_mix() -> None:
    where = [contexts()[0], contexts(temperature=1.0)[1], contexts()[2]]
    keys = proposal_keys(LOGITS, where, rule="coupled")
    assert [torch.equal(LOGITS[b], keys[b]) for b in range(3)] == [True, False, True]


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
    where = contexts(temperature=1.0, allowed_token_ids=(1,))
    assert (proposal_log_q(LOGITS, where, vocabulary=VOCABULARY) == -torch.inf).all()
    assert (proposal_keys(LOGITS, where, vocabulary=VOCABULARY, rule="coupled") == -torch.inf).all()
    masked = [Context(c.sequence, c.path, torch.arange(10) < 3) for c in contexts(temperature=1.0)]
    keys = proposal_keys(LOGITS, masked, vocabulary=VOCABULARY, rule="coupled")
    assert (keys > -torch.inf).tolist() == [[False, True, False, True, False, False]] * 3


def test_columns_of_ids() -> None:
    ids = np.array([-1, 0, 1, 2, 9, 10, 2**40])
    assert VOCABULARY.columns_of(ids).tolist() == [-1, 3, -1, 1, 0, -1, -1]
    assert VOCABULARY.columns_of(VOCABULARY.ids_C).tolist() == list(range(6))
    assert DraftColumns.of(None) is None


def laid_out(row_C: np.ndarray, context: Context, ids_C: np.ndarray) -> np.ndarray:
    """Shaped the long way: as a row over target ids, of which the draft vocabulary's are read back."""
    row_V = np.full(int(ids_C.max()) + 1, -np.inf, np.float32)
    row_V[ids_C] = row_C
    Shaper(context.sequence, strict=False).apply(row_V, context.path, context.mask)
    return row_V[ids_C]


SHAPES: tuple[dict[str, Any], ...] = (
    {"logit_bias": {3: 1.7, 11: -np.inf, 58: 0.3, 64: 2.0, 5000: 1.0}},
    {"allowed_token_ids": (0, 3, 7, 20, 41, 42, 63, 64, 900)},
    {"bad_words": ("x", "x", "x", "x")},
    {"min_tokens": 20, "stop_token_ids": (3, 9, 700)},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.7},
    {"frequency_penalty": -0.4},
)
MASKS = (
    None,
    torch.arange(65) % 3 > 0,
    torch.arange(40) % 2 > 0,
    torch.arange(300) % 5 > 0,
    torch.tensor([0x35A1F00D, -0x5A5A5A5B, 0x1], dtype=torch.int32),
    torch.tensor([0x35A1F00D], dtype=torch.int32),
)


@pytest.mark.parametrize("size", [1, 23, 64])
@pytest.mark.parametrize("mask", MASKS)
def test_shaping_at_the_columns_is_shaping_of_the_row_laid_out(mask: torch.Tensor | None, size: int) -> None:
    rng = np.random.default_rng(size)
    for trial in range(60):
        vocabulary = DraftColumns(rng.permutation(65)[:size])
        row = rng.standard_normal(size).astype(np.float32) * 3
        chosen = [SHAPES[i] for i in np.flatnonzero(rng.random(len(SHAPES)) < (0.4 if trial else 2.0))]
        params = SamplingParams(**{name: value for shape in chosen for name, value in shape.items()})
        words = ((3,), (9, 10), (12, 4, 60), (200,)) if params.bad_words else ()
        tokens, path = rng.integers(0, 80, 30).tolist(), tuple(rng.integers(0, 80, rng.integers(4)).tolist())
        tokens[-1] = 9
        sequence = Sequence(0, 14, tokens, params, 1, eos_ids=frozenset({2, 99}), bad_words=words)
        context, found = Context(sequence, path, mask), row.copy()
        Shaper(sequence, strict=False, vocabulary=vocabulary).apply(found, path, mask)
        assert np.array_equal(found, laid_out(row, context, vocabulary.ids_C))


def test_a_history_is_counted_once_for_all_levels_of_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    where = contexts(temperature=1.0, frequency_penalty=1.0)
    rows = [where[0], where[1], where[0]]
    shapers = draft_shapers([context.sequence for context in rows], VOCABULARY)
    assert shapers[0] is shapers[2] is not shapers[1]
    counted, of = [], Counts.of
    monkeypatch.setattr(Counts, "of", lambda *history: counted.append(history) or of(*history))
    levels = [proposal_log_q(LOGITS, rows, vocabulary=VOCABULARY, shapers=shapers) for _ in range(3)]
    assert len(counted) == 2
    assert torch.equal(levels[2], proposal_log_q(LOGITS, rows, vocabulary=VOCABULARY))


def test_logits_are_not_changed() -> None:
    before = LOGITS.clone()
    proposal_keys(LOGITS, contexts(temperature=0.5, logit_bias={2: 1.0}), rule="coupled")
    assert torch.equal(before, LOGITS)


def test_draws_are_without_replacement_from_the_very_q_that_is_returned() -> None:
    """Chi-square over ordered triples against q(a) q(b) / (1 - q(a)) q(c) / (1 - q(a) - q(b))."""
    trials = 40_000
    log_q = LOGITS[:1].log_softmax(-1).expand(trials, 6)
    columns, q_RV = sample_children(log_q, 3, contexts(trials, temperature=1.0), [0] * trials, vocabulary=VOCABULARY)
    q = q_RV[0, VOCABULARY.ids_C].double().numpy()
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
