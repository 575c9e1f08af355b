"""Masks, biases and penalties over the node's own path."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pytest
import torch

from alula.sampling.processors import Counts, Shaper
from alula.sequence import SamplingParams, Sequence

V = 10
BANNED = -np.inf


def shaped(
    *,
    prompt: Seq[int] = (1,),
    output: Seq[int] = (),
    path: Seq[int] = (),
    logits: Seq[float] | None = None,
    mask: torch.Tensor | None = None,
    eos: Seq[int] = (),
    bad: tuple[tuple[int, ...], ...] = (),
    **params: Any,
) -> np.ndarray:
    if bad:
        params["bad_words"] = tuple("x" for _ in bad)
    sequence = Sequence(
        0, len(prompt), [*prompt, *output], SamplingParams(**params), 1, eos_ids=frozenset(eos), bad_words=bad
    )
    row = np.array([1.0] * V if logits is None else logits, np.float32)
    shaper = Shaper(sequence)
    shaper.apply(row, path, mask)
    shaper.process(row, path)
    return row


def banned(row: np.ndarray) -> list[int]:
    return np.flatnonzero(row == BANNED).tolist()


def test_masks_may_be_flags_or_bits() -> None:
    flags = torch.tensor([i in (2, 5) for i in range(V)])
    assert banned(shaped(mask=flags)) == [0, 1, 3, 4, 6, 7, 8, 9]
    assert banned(shaped(mask=torch.tensor([1 << 2 | 1 << 5], dtype=torch.int32))) == [0, 1, 3, 4, 6, 7, 8, 9]
    assert banned(shaped(mask=torch.tensor([-1], dtype=torch.int32))) == []


def test_ids_beyond_a_mask_are_not_allowed() -> None:
    assert banned(shaped(mask=torch.ones(7, dtype=torch.bool))) == [7, 8, 9]


def test_allowed_ids() -> None:
    assert banned(shaped(allowed_token_ids=(0, 9))) == list(range(1, 9))


def test_b10_bad_words_are_masked_by_the_path_of_each_node() -> None:
    words = ((7,), (3, 4), (3, 4, 5), (1, 2))
    assert banned(shaped(bad=words)) == [2, 7]
    assert banned(shaped(bad=words, output=[3])) == [4, 7]
    assert banned(shaped(bad=words, output=[3], path=[4])) == [5, 7]
    assert banned(shaped(bad=words, path=[3, 4])) == [5, 7]
    assert banned(shaped(bad=words, path=[4, 3])) == [4, 7]
    assert banned(shaped(bad=words, output=[3, 4], path=[6])) == [7]


def test_b2_ending_ids_are_masked_until_exactly_min_tokens_are_out() -> None:
    def row(out: int, deep: int) -> list[int]:
        return banned(shaped(output=[2] * out, path=[3] * deep, eos=[8], stop_token_ids=(9,), min_tokens=20))

    for out in range(21):
        for deep in range(4):
            assert row(out, deep) == ([8, 9] if out + deep < 20 else [])


def test_b8_min_tokens_mask_ending_ids_whether_or_not_eos_is_ignored() -> None:
    for ignore in (False, True):
        row = shaped(output=[2] * 199, eos=[8], stop=("\n",), min_tokens=200, max_tokens=300, ignore_eos=ignore)
        assert banned(row) == [8]


def test_bias_is_added_and_may_ban() -> None:
    row = shaped(logit_bias={3: 2.5, 4: -np.inf})
    assert row[3] == 3.5 and banned(row) == [4]


def test_repetition_counts_prompt_output_and_path_once() -> None:
    logits = [2.0, 2.0, -2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    row = shaped(prompt=[1, 1, 2], output=[3], path=[4, 4], logits=logits, repetition_penalty=2.0)
    assert row.tolist() == [2, 1, -4, 1, 1, 2, 2, 2, 2, 2]


def test_b2_presence_and_frequency_count_every_token_of_the_output_and_the_path() -> None:
    row = shaped(
        prompt=[0, 1], output=[1, 2, 2], path=[2, 3, 3], presence_penalty=0.5, frequency_penalty=0.25, logits=[0.0] * V
    )
    assert row.tolist() == [0, -0.75, -1.25, -1.0, 0, 0, 0, 0, 0, 0]


def test_penalties_come_after_the_bias() -> None:
    assert shaped(prompt=[3], logit_bias={3: 3.0}, repetition_penalty=2.0)[3] == 2.0


def test_masked_tokens_stay_masked_under_penalties() -> None:
    row = shaped(prompt=[3], allowed_token_ids=(4,), repetition_penalty=2.0, frequency_penalty=-2.0)
    assert banned(row) == [i for i in range(V) if i != 4]


@pytest.mark.parametrize("seed", range(5))
def test_counts_of_a_path_are_those_of_the_longer_history(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens, path = rng.integers(0, 6, 9).tolist(), rng.integers(0, 9, 4).tolist()
    whole, grown = Counts.of(tokens + path, 4), Counts.of(tokens, 4).after(path)
    pairs = dict(zip(grown.ids_I.tolist(), grown.output_I.tolist(), strict=True))
    assert pairs == dict(zip(whole.ids_I.tolist(), whole.output_I.tolist(), strict=True))


def test_processors_run_in_order_on_the_whole_path_and_cannot_change_it() -> None:
    seen: list[list[int]] = []

    def first(path: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(list(path))
        path.append(99)
        return logits + 1

    def second(path: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(list(path))
        logits[0] = logits[1] * 3
        return logits

    row = shaped(prompt=[4], output=[5], path=[6], logits_processors=(first, second))
    assert seen == [[4, 5, 6], [4, 5, 6]]
    assert row.tolist() == [6.0] + [2.0] * 9


def test_nothing_given_is_changed() -> None:
    sequence = Sequence(0, 1, [1, 2], SamplingParams(repetition_penalty=2.0, logit_bias={1: 1.0}), 1)
    Shaper(sequence).apply(np.ones(V, np.float32), [3])
    assert sequence.tokens == [1, 2] and sequence.params.logit_bias == {1: 1.0}


def test_a_draft_vocabulary_skips_ids_it_lacks() -> None:
    params = SamplingParams(logit_bias={1: 1.0, 50: 1.0}, allowed_token_ids=(1, 50), stop_token_ids=(60,), min_tokens=1)
    row = np.ones(V, np.float32)
    Shaper(Sequence(0, 1, [70], params, 1), strict=False).apply(row, [])
    assert row[1] == 2 and banned(row) == [i for i in range(V) if i != 1]
