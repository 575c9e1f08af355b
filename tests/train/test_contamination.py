"""Runs of words in common with benchmarks."""

from __future__ import annotations

import pytest

from alula.config import AlulaError
from alula.train.contamination import Exclusion, words

BENCHMARK = "Write a function, please: it returns the sum of all odd numbers in a list."


def excluded(*texts: str, ngram: int = 8) -> Exclusion:
    exclusion = Exclusion(ngram)
    exclusion.add("set", texts)
    return exclusion


def test_words_leave_out_case_and_punctuation() -> None:
    assert words("Don't  STOP -- größer_als 3.5!") == ("don", "t", "stop", "grösser_als", "3", "5")
    assert words("日本go") == ("日", "本", "go")


def test_a_run_of_n_words_overlaps_and_one_less_does_not() -> None:
    exclusion = excluded(BENCHMARK)
    assert exclusion.overlap("He said it RETURNS the sum of all odd numbers; then he left") == "set"
    assert exclusion.overlap("It returns the sum of all odd things, and numbers in a list are listed") is None
    assert excluded(BENCHMARK, ngram=6).overlap("It returns the sum of all odd things") == "set"


def test_a_short_text_counts_as_a_whole() -> None:
    exclusion = excluded("Name the largest moon", "Hi there", "...")
    assert exclusion.overlap("Can you name the largest moon of Saturn?") == "set"
    assert exclusion.overlap("Name the largest planet and moon") is None
    assert exclusion.overlap("hi, there!") == "set"
    assert exclusion.overlap("Hi there, friend") is None
    assert exclusion.overlap("!!!") is None


def test_the_set_is_named() -> None:
    exclusion = excluded(BENCHMARK)
    exclusion.add("other", ["What do bees do in winter when it is cold?"])
    assert exclusion.overlap("Tell me: what do bees do in winter when it snows") == "other"


def test_too_short_runs_are_refused() -> None:
    with pytest.raises(AlulaError, match="ngram is 3: give at least 4"):
        Exclusion(3)
