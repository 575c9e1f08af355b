"""Reading, masks, splits, batches and the draft vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from alula.config import AlulaError
from alula.train.data import Conversation, plan_batches, read_conversations, split_held_out
from alula.train.vocabulary import DraftVocabulary, choose_vocabulary, expected_counts, vocabulary_from_d2t
from tests.train.chat import chat_tokenizer
from tests.train.support import FakeTarget, batch, conversations


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_all_forms_and_the_mask(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]
    path = write(
        tmp_path / "a.jsonl",
        {"prompt_ids": [1, 2, 3], "answer_ids": [4, 5]},
        {"tokens": [1, 2, 3, 4, 5, 6], "loss_mask": [0, 1, 0, 1, 1, 0]},
        {"tokens": [1, 2, 3, 4, 5, 6, 7], "learned": [[1, 2], [3, 5], [6, 7]], "messages": talk},
        {"messages": talk},
    )
    first, second, third, text = read_conversations([path], max_tokens=100, tokenizer=tokenizer)
    assert (first.tokens, first.learned) == ((1, 2, 3, 4, 5), (3, 4))
    assert second.learned == (3, 4)  # token 1 has no pair two before it
    assert (third.tokens, third.learned) == ((1, 2, 3, 4, 5, 6, 7), (3, 4, 6))
    assert tokenizer.decode([text.tokens[m] for m in text.learned], skip_special_tokens=False) == "bc<|end|>"


def test_repeats_and_a_half_written_line_are_left_out(tmp_path: Path) -> None:
    line = {"prompt_ids": [1, 2, 3], "answer_ids": [4, 5]}
    path = write(tmp_path / "a.jsonl", line, line)
    path.write_text(path.read_text() + '{"prompt_ids": [1')
    assert len(read_conversations([path], max_tokens=100)) == 1


def test_long_texts_are_cut_and_empty_ones_dropped(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        {"prompt_ids": [1, 2, 3], "answer_ids": [4] * 9},
        {"prompt_ids": [1] * 9, "answer_ids": [2]},
    )
    kept = read_conversations([path], max_tokens=6)
    assert [len(c.tokens) for c in kept] == [6]


BAD = (
    {"text": "hello"},
    {"tokens": [1, 2], "loss_mask": [1]},
    [1],
    {"tokens": [1, 2, 3], "learned": [[2, 4]]},
    {"tokens": [1, 2, 3], "learned": [[2, 2]]},
    {"tokens": [1, 2, 3], "learned": 3},
    {"tokens": [1, 2, 3], "loss_mask": [0, 0, 2]},
    {"prompt_ids": [1, 2, -3], "answer_ids": [4]},
    {"prompt_ids": [1, 2, True], "answer_ids": [4]},
    {"prompt_ids": [1, 2, 3], "answer_ids": [4.0]},
    {"prompt_ids": [1, 2, 3], "answer_ids": "45"},
    {"prompt_ids": [1, 2, 3], "answer_ids": [259]},
    {"messages": [{"role": "narrator", "content": "a"}]},
)


def test_bad_lines_are_told_and_left_out(tmp_path: Path) -> None:
    good, told = {"prompt_ids": [1, 2, 3], "answer_ids": [258]}, list[str]()
    path = write(tmp_path / "a.jsonl", *BAD, good)
    kept = read_conversations([path], max_tokens=9, tokenizer=chat_tokenizer(), tell=told.append)
    assert [c.tokens for c in kept] == [(1, 2, 3, 258)]
    assert [sentence.partition(" is left")[0] for sentence in told[:-1]] == [
        f"{path}, line {number}" for number in range(1, len(BAD) + 1)
    ]
    assert told[-1] == f"{path}: left out {len(BAD)} bad lines (1-{len(BAD)})"


def test_bad_lines_are_warned_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"a\.jsonl, line 1 is left out"):
        assert read_conversations([write(tmp_path / "a.jsonl", *BAD[:1])], max_tokens=9) == []


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(AlulaError, match=r"nothing\.jsonl cannot be read"):
        read_conversations([tmp_path / "nothing.jsonl"], max_tokens=9)


def test_a_conversation_never_changes_sides() -> None:
    few, many = conversations(20), conversations(200)
    train, held = split_held_out(few, one_in=4)
    later_train, later_held = split_held_out(many, one_in=4)
    assert held and set(held) <= set(later_held)
    assert set(train) <= set(later_train)
    assert not set(later_train) & set(later_held)


def test_a_plan_holds_every_conversation_once_within_the_budget() -> None:
    chosen = conversations(150)
    sizes = {c.key: len(c.learned) for c in chosen}
    plan = plan_batches(chosen, tokens_per_batch=30, generator=torch.Generator().manual_seed(0))
    assert sorted(key for keys in plan for key in keys) == sorted(sizes)
    assert all(sum(sizes[key] for key in keys) <= 30 for keys in plan)
    assert len(plan) < 50  # not one by one


def test_rows_point_at_the_token_that_each_step_predicts() -> None:
    target = FakeTarget()
    chosen = [Conversation(tuple(range(8)), (False,) * 3 + (True, True, False, True, True)), *conversations(2)]
    packed = batch(target, chosen)
    columns = torch.arange(packed.chains.starts_BA.shape[1])
    for step in range(4):
        flat, index = packed.rows(step, columns)
        for position, learned in zip(flat.tolist(), index.tolist(), strict=True):
            text, column = divmod(position, len(columns))
            predicted = chosen[text].learned[column] + step
            assert chosen[text].mask[predicted]
            assert packed.token_M[learned] == chosen[text].tokens[predicted]
        wanted = [m + step for m in chosen[0].learned if m + step < 8 and chosen[0].mask[m + step]]
        assert sum(position < len(columns) for position in flat.tolist()) == len(wanted)


def test_entries_pair_features_with_the_advanced_token() -> None:
    target = FakeTarget()
    (conversation,) = conversations(1)
    packed = batch(target, [conversation])
    assert packed.chains.tokens_BS[0].tolist() == list(conversation.tokens[1:])
    taps, hidden = target.states([conversation.tokens], (1, 2, 3))[0]
    assert torch.equal(packed.chains.features_BSF[0], taps[:-1])
    assert torch.equal(packed.hidden_MD, hidden[[m - 1 for m in conversation.learned]])
    assert torch.equal(packed.choice_M, (packed.hidden_MD @ target.lm_head_VD.T).argmax(-1))


def test_the_vocabulary_counts_answers_only_and_offsets_lead_back() -> None:
    one = Conversation((9, 9, 9, 9, 7, 7, 3), (False,) * 4 + (True,) * 3)
    chosen = choose_vocabulary([one], size=3, vocab_size=12)
    assert chosen.target_ids_C.tolist() == [0, 3, 7]  # ties go to the lowest id
    ids = torch.arange(3) + chosen.d2t()
    assert ids.tolist() == [0, 3, 7]
    assert chosen.t2d().nonzero()[:, 0].tolist() == [0, 3, 7]
    assert chosen.draft_ids()[ids].tolist() == [0, 1, 2]
    assert chosen.draft_ids()[9] == -1
    assert torch.equal(vocabulary_from_d2t(chosen.d2t(), 12).target_ids_C, chosen.target_ids_C)
    assert chosen.coverage([one]) == 1.0
    assert DraftVocabulary(torch.tensor([7]), 12).coverage([one]) == pytest.approx(2 / 3)


def test_expected_counts_know_tokens_never_drawn() -> None:
    target = FakeTarget()
    packed = batch(target, conversations(4))
    counts = expected_counts([packed.hidden_MD], target.lm_head_VD)
    torch.testing.assert_close(counts.sum(), torch.tensor(float(len(packed.token_M))))
    chosen = choose_vocabulary([], size=3, vocab_size=40, expected_V=counts)
    assert set(chosen.target_ids_C.tolist()) == set(counts.topk(3).indices.tolist())


@pytest.mark.parametrize("size", [0, 41])
def test_a_vocabulary_of_impossible_size_is_refused(size: int) -> None:
    with pytest.raises(AlulaError, match="draft_vocab_size"):
        choose_vocabulary([], size=size, vocab_size=40)
