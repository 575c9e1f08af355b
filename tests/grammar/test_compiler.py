"""Compiling: beside the caller, kept within bounds, and with reasons where it fails."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from concurrent.futures import wait

import pytest

from alula.config import AlulaError
from alula.engine.compiling import wanted_of
from alula.grammar import Grammars, TooManyForms, from_response_format
from alula.structured import StructuredOutputsParams
from tests.engine.tiny import VOCAB
from tests.grammar.support import PERSON, byte_tokenizer, fits, grammars, json_like


def choice(*texts: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(choice=texts)


def test_the_same_source_is_compiled_once() -> None:
    made = grammars()
    first = made.compile(json_like({"type": "object", "properties": {"a": {"type": "null"}}}))
    assert made.compile(json_like('{"type":"object",  "properties":{"a":{"type":"null"}}}')) is first
    assert made.compile(json_like({"type": "null"})) is not first
    assert made.compile(json_like({"type": "null"}, disable_any_whitespace=True)) is not made.compile(
        json_like({"type": "null"})
    )
    assert made.compile(StructuredOutputsParams(regex="a")) is not made.compile(StructuredOutputsParams(choice=("a",)))
    assert made.size[0] == 5


def test_the_least_recently_used_goes_first() -> None:
    made = grammars(capacity=2)
    one, two = made.compile(choice("1")), made.compile(choice("2"))
    assert made.compile(choice("1")) is one
    made.compile(choice("3"))
    assert made.size[0] == 2
    assert made.compile(choice("1")) is one
    assert made.compile(choice("2")) is not two


def test_bytes_are_bounded_and_given_back() -> None:
    made = grammars(max_bytes=1)
    gone = weakref.ref(made.compile(choice("1")))
    made.compile(choice("2"))
    gc.collect()
    assert made.size[0] == 1 and gone() is None


def test_a_failure_is_not_kept() -> None:
    made = grammars()
    for _ in range(2):
        with pytest.raises(AlulaError, match="regex cannot be compiled"):
            made.compile(StructuredOutputsParams(regex="("))
    assert made.size == (0, 0)


def test_reasons_hold_no_source_locations(made: Grammars) -> None:
    with pytest.raises(AlulaError) as caught:
        made.compile(StructuredOutputsParams(grammar="root ::= missing"))
    assert "missing" in str(caught.value) and ".cc" not in str(caught.value) and "\n" not in str(caught.value)


def test_deep_groups_are_refused_and_brackets_in_texts_are_not_groups(made: Grammars) -> None:
    deep = "(" * 17 + '"a"' + ")" * 17
    with pytest.raises(AlulaError, match="deep"):
        made.compile(StructuredOutputsParams(grammar=f"root ::= {deep}"))
    compiled = made.compile(StructuredOutputsParams(grammar=f'root ::= "{"(" * 30}" [()] # {"(" * 30}\n'))
    assert fits(compiled, "(" * 30 + ")")


def test_one_that_takes_long_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    made, go_on = grammars(), threading.Event()
    compile_one = made._compile

    def slowly(wanted: StructuredOutputsParams) -> object:
        if wanted.choice == ("slow",):
            assert go_on.wait(60)
        return compile_one(wanted)

    monkeypatch.setattr(made, "_compile", slowly)
    started = time.perf_counter()
    slow, again = made.submit(choice("slow")), made.submit(choice("slow"))
    assert slow is again and time.perf_counter() - started < 5
    assert made.compile(choice("fast")) is not None and not slow.done()
    go_on.set()
    assert slow.result(60) is made.compile(choice("slow"))


def test_no_more_are_begun_than_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    made, go_on = grammars(), threading.Event()
    compile_one = made._compile
    monkeypatch.setattr(made, "_compile", lambda wanted: go_on.wait(60) and compile_one(wanted))
    futures = [made.submit(choice(str(number)), 3) for number in range(3)]
    with pytest.raises(TooManyForms, match="3 forms"):
        made.submit(choice("3"), 3)
    assert made.submit(choice("0"), 3) is futures[0]
    futures.append(made.submit(choice("4")))  # without a limit
    go_on.set()
    assert not wait(futures, 60).not_done
    assert made.compile(choice("3")) is not None


def test_many_threads_at_once() -> None:
    made = grammars(capacity=3)
    futures = [made.submit(choice(str(number % 6))) for number in range(30)]
    assert not wait(futures, 60).not_done
    assert all(future.exception() is None for future in futures)
    assert made.size[0] <= 3 + 1


def test_a_model_without_an_end_is_refused() -> None:
    with pytest.raises(AlulaError, match="EOS"):
        Grammars(byte_tokenizer(), VOCAB, ()).compile(choice("a"))


def test_texts_of_a_choice_may_hold_anything(made: Grammars) -> None:
    texts = ('say "hi"\n', "back\\slash", "日本", "\U0001f600", "\x01", "(a|b)*", '::= "')
    compiled = made.compile(choice(*texts))
    assert all(fits(compiled, text) for text in texts) and not fits(compiled, "say")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "exactly one"),
        ({"regex": "a", "json_object": True}, "regex and json_object"),
        ({"json": "{"}, "no JSON"),
        ({"json": "[1]"}, "an object"),
        ({"json": {"a": {1}}}, "no JSON"),
        ({"regex": 3}, "regex"),
        ({"grammar": ""}, "grammar"),
        ({"grammar": "\ud800"}, "grammar"),
        ({"choice": []}, "choice"),
        ({"choice": "yes"}, "choice"),
        ({"choice": ["a", ""]}, "choice"),
        ({"json_object": "yes"}, "json_object"),
        ({"regex": "a", "free_until": ""}, "free_until"),
        ({"regex": "a", "disable_any_whitespace": 1}, "disable_any_whitespace"),
        ({"regex": "a" * (256 * 1024 + 1)}, "characters"),
    ],
)
def test_bad_fields_end_in_one_sentence(fields: dict[str, object], reason: str) -> None:
    with pytest.raises(AlulaError, match="structured_outputs") as caught:
        StructuredOutputsParams(**fields)  # type: ignore[arg-type]
    assert reason in str(caught.value)


def test_the_schema_is_copied() -> None:
    schema = {"type": "null"}
    wanted = json_like(schema)
    schema["type"] = "string"
    assert wanted.source == '{"type": "null"}'


def test_response_format() -> None:
    assert from_response_format(None) is None and from_response_format({"type": "text"}) is None
    assert from_response_format({"type": "json_object"}) == StructuredOutputsParams(json_object=True)
    given = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
    assert from_response_format(given, free_until="</think>") == json_like(PERSON, free_until="</think>")
    for bad in ({"type": "yaml"}, {}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"name": "x"}}):
        with pytest.raises(AlulaError, match="response_format"):
            from_response_format(bad)


def test_a_marker_of_spaces_is_looked_for_as_it_is() -> None:
    wanted = StructuredOutputsParams(regex="a", free_until="\n\n")
    tokenizer = byte_tokenizer()
    assert wanted_of(tokenizer, tokenizer.encode("x"), wanted).free_until == "\n\n"
    assert wanted_of(tokenizer, tokenizer.encode("x\n\n"), wanted).free_until is None
