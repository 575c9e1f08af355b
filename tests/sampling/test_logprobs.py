"""Reported log probabilities: values, ranks, the top ones, ties, raw and processed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from alula.sampling.logprobs import most_likely, processed_logprobs, prompt_logprobs, raw_logprobs
from alula.sequence import SamplingParams

ROW = np.array([0.5, 2.0, -1.0, 2.0, -np.inf, 1.0], np.float32)
LOG_SOFTMAX = torch.from_numpy(ROW).double().log_softmax(-1).tolist()


def test_raw_values_ranks_and_ties() -> None:
    for token, rank in ((1, 1), (3, 2), (5, 3), (0, 4), (2, 5), (4, 6)):
        report = raw_logprobs(ROW, token, 3)
        assert report.rank == rank
        assert report.logprob == pytest.approx(LOG_SOFTMAX[token], abs=1e-6)
        assert [id_ for id_, _ in report.top] == [1, 3, 5]
        assert [value for _, value in report.top] == pytest.approx([LOG_SOFTMAX[i] for i in (1, 3, 5)], abs=1e-6)


def test_most_likely_orders_ties_by_id_and_omits_masked_ones() -> None:
    assert most_likely(ROW, 0).tolist() == []
    assert most_likely(ROW, 1).tolist() == [1]
    assert most_likely(ROW, 99).tolist() == [1, 3, 5, 0, 2]
    flat = np.zeros(5000, np.float32)
    assert most_likely(flat, 4).tolist() == [0, 1, 2, 3]


def test_c7_processed_logprobs_are_of_the_final_distribution() -> None:
    report = processed_logprobs(ROW, SamplingParams(temperature=0.5, top_k=3), 5, 10)
    total = 2 * math.exp(4.0) + math.exp(2.0)
    assert [id_ for id_, _ in report.top] == [1, 3, 5]
    assert report.logprob == pytest.approx(math.log(math.exp(2.0) / total)) and report.rank == 3
    cut = processed_logprobs(ROW, SamplingParams(temperature=0.5, top_k=2), 1, 10)
    assert cut.logprob == pytest.approx(math.log(0.5)) and [id_ for id_, _ in cut.top] == [1, 3]


def test_a_chosen_token_just_beyond_the_support_joins_it() -> None:
    """As native kernels may choose one, whose sums differ from numpy's in their last bits."""
    joined = processed_logprobs(ROW, SamplingParams(temperature=0.5, top_p=0.9), 5, 10)
    assert joined == processed_logprobs(ROW, SamplingParams(temperature=0.5, top_k=3), 5, 10)
    by_rank = processed_logprobs(ROW, SamplingParams(temperature=0.5, top_k=2), 5, 10)
    assert by_rank.logprob == -math.inf  # ranks are exact: nothing may choose beyond them


def test_processed_logprobs_of_a_greedy_request_have_no_temperature() -> None:
    assert processed_logprobs(ROW, SamplingParams(), 1, 2) == raw_logprobs(ROW, 1, 2)


def test_prompt_rows() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    reports = prompt_logprobs(logits, [3, 1, 4, 1], 2)
    wanted = logits.double().log_softmax(-1)
    assert [r.logprob for r in reports] == pytest.approx(wanted[range(4), [3, 1, 4, 1]].tolist(), abs=1e-6)
    assert [[i for i, _ in r.top] for r in reports] == logits.topk(2).indices.tolist()
    assert torch.equal(logits, before)


def test_reports_do_not_depend_on_the_rows_beside() -> None:
    logits = torch.randn(5, 4099, generator=torch.Generator().manual_seed(1))
    together = prompt_logprobs(logits, [7] * 5, 3)
    assert [prompt_logprobs(logits[i : i + 1], [7], 3)[0] for i in range(5)] == together
