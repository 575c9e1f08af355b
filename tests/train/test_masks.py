"""The assistant's tokens, found through chat templates of several make."""

from __future__ import annotations

import pytest

from alula.config import AlulaError
from alula.train.masks import check_template, find_answers
from tests.train.chat import BLIND, CLOSED, MARKED, PLAIN, SPACED, THINKING, chat_tokenizer

ASKED = {"role": "user", "content": "Q1"}
TALK = [ASKED, {"role": "assistant", "content": "A1"}, {"role": "user", "content": "A1 Q2"}]
TALK += [{"role": "assistant", "content": "Ä2"}]


def learned(template: str, messages: list[dict[str, str]]) -> list[str]:
    tokenizer = chat_tokenizer(template)
    tokens, spans = find_answers(tokenizer, messages)
    text = tokenizer.render_chat(messages, add_generation_prompt=False)
    assert tokenizer.decode(tokens, skip_special_tokens=False) == text
    return [tokenizer.decode(tokens[start:end], skip_special_tokens=False) for start, end in spans]


@pytest.mark.parametrize(
    ("template", "found"),
    [
        (PLAIN, ["A1<|end|>", "Ä2<|end|>"]),
        (MARKED, ["A1<|end|>", "Ä2<|end|>"]),
        (SPACED, ["A1 <|end|>", "Ä2 <|end|>"]),
        (CLOSED, ["A1<|end|>", "Ä2<|end|>"]),
        (THINKING, ["A1<|end|>", "Ä2<|end|>"]),
    ],
)
def test_answers_with_their_end_of_turn(template: str, found: list[str]) -> None:
    assert learned(template, TALK) == found
    check_template(chat_tokenizer(template))


def test_a_template_that_marks_answers_without_their_end() -> None:
    """The model has to say its end of turn, so it is learned all the same."""
    assert learned(MARKED.replace("<|end|>{% endgeneration %}", "{% endgeneration %}<|end|>"), TALK) == [
        "A1<|end|>",
        "Ä2<|end|>",
    ]


def test_an_end_token_that_is_not_marked_as_special() -> None:
    tokenizer = chat_tokenizer(PLAIN, special_end=False)
    tokens, spans = find_answers(tokenizer, TALK)
    assert [tokenizer.decode(tokens[start:end]) for start, end in spans] == ["A1<|end|>", "Ä2<|end|>"]


def test_reasoning_is_learned_where_the_template_shows_it() -> None:
    first = {"role": "assistant", "content": "<think>why</think>A1"}
    last = {"role": "assistant", "content": "<think>hm</think>A2"}
    assert learned(THINKING, [ASKED, first, ASKED, last]) == ["A1<|end|>", "<think>hm</think>A2<|end|>"]


def test_other_roles_and_unanswered_turns_are_not_learned() -> None:
    system = {"role": "system", "content": "A1"}
    assert learned(PLAIN, [system, *TALK[:2], ASKED]) == ["A1<|end|>"]
    assert learned(PLAIN, [system, ASKED]) == []


def test_texts_that_hold_the_mark_or_special_tokens() -> None:
    odd = {"role": "assistant", "content": "answermark<|end|>answermarkx"}
    assert learned(PLAIN, [{"role": "user", "content": "answermark"}, odd]) == ["answermark<|end|>answermarkx<|end|>"]


def test_a_template_that_hides_answers_is_refused() -> None:
    with pytest.raises(AlulaError, match="does not show where the answer in message 1 stands"):
        check_template(chat_tokenizer(BLIND))
    with pytest.raises(AlulaError, match="no chat template"):
        check_template(chat_tokenizer(None))
    silent = "{% for m in messages %}{% generation %}{% endgeneration %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(AlulaError, match="does not show which tokens are the assistant's"):
        check_template(chat_tokenizer(silent))
