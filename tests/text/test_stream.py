"""Streamed text against decoding everything at once; stop strings against a search character by character."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alula.text import Detokenizer, TextStream, Tokenizer

ids_lists = st.lists(st.integers(0, 400), max_size=24)
texts = st.text(alphabet="abhelo é😀\ufffd", max_size=16)


@dataclass(frozen=True)
class Options:
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True


def stream(tokenizer: Tokenizer, ids: list[int], options: Options) -> tuple[list[str], str | None, int]:
    """(pieces given out, stop string, tokens fed)."""
    sink = TextStream(tokenizer, options)
    pieces: list[str] = []
    for count, token in enumerate(ids, 1):
        piece, stop = sink.feed(token)
        pieces.append(piece)
        if stop is not None:
            assert "".join(pieces) == sink.text
            return pieces, stop, count
    pieces.append(sink.finish())
    assert "".join(pieces) == sink.text
    return pieces, None, len(ids)


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=300, deadline=None)
@given(ids=ids_lists)
def test_stream_equals_full_decode(tokenizers: dict[str, Tokenizer], kind: str, skip: bool, ids: list[int]) -> None:
    tokenizer = tokenizers[kind]
    ids = [token % tokenizer.vocab_size for token in ids]
    pieces, _, _ = stream(tokenizer, ids, Options(skip_special_tokens=skip))
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="abé😀", max_size=12))
def test_never_half_a_code_point(tokenizers: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = tokenizers[kind]
    pieces, _, _ = stream(tokenizer, tokenizer.encode(text), Options())
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) == text


def test_code_point_waits_for_its_last_byte(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level)
    ids = byte_level.encode("a😀b")
    assert [detokenizer.step(token) for token in ids] == ["a", "", "", "", "😀", "b"]


def test_dangling_bytes_come_out_at_the_end(byte_level: Tokenizer) -> None:
    half = byte_level.encode("a😀")[:3]
    pieces, _, _ = stream(byte_level, half, Options())
    assert pieces[:3] == ["a", "", ""]
    assert pieces[3] == byte_level.decode(half)[1:] == "\ufffd"


def test_an_invalid_run_of_byte_tokens_is_replaced_as_decoding_does(
    tokenizers: dict[str, Tokenizer],
) -> None:
    tokenizer = tokenizers["pieces"]
    run = [tokenizer.backend.token_to_id(piece) for piece in ("<0x41>", "<0xFF>", "b")]
    pieces, _, _ = stream(tokenizer, run, Options())
    assert "".join(pieces) == tokenizer.decode(run) == "\ufffd\ufffdb"


def first_complete(text: str, stops: tuple[str, ...]) -> tuple[str, int] | None:
    """The plain definition: add characters one by one until the text ends with a stop string; the longest wins."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            return max(hits, key=len), end
    return None


@settings(max_examples=500, deadline=None)
@given(
    text=st.text(alphabet="abhelo", max_size=20),
    stops=st.lists(st.text("abhelo", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
)
def test_stop_strings_equal_the_plain_definition(
    byte_level: Tokenizer, text: str, stops: list[str], include: bool
) -> None:
    ids = byte_level.encode(text)
    pieces, stop, fed = stream(byte_level, ids, Options(tuple(stops), include))
    expected = first_complete(text, tuple(stops))
    if expected is None:
        assert (stop, "".join(pieces)) == (None, text)
        return
    assert stop == expected[0]
    assert "".join(pieces) == text[: expected[1] if include else expected[1] - len(expected[0])]
    # The output ends with the token that completed it: one token less does not hold the stop string.
    assert len(byte_level.decode(ids[: fed - 1])) < expected[1] <= len(byte_level.decode(ids[:fed]))


def test_stop_string_across_tokens_and_its_token(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("ahello!")  # a, he, llo, !
    assert len(ids) == 4
    pieces, stop, fed = stream(byte_level, ids, Options(("ell",)))
    assert (pieces, stop, fed) == (["a", "h", ""], "ell", 3)
    pieces, stop, fed = stream(byte_level, ids, Options(("ell",), include_stop_str_in_output=True))
    assert ("".join(pieces), stop, fed) == ("ahell", "ell", 3)


def test_a_possible_stop_string_is_held_back_and_released(
    byte_level: Tokenizer,
) -> None:
    sink = TextStream(byte_level, Options(("bob",)))
    fed = [sink.feed(token)[0] for token in byte_level.encode("abobx"[:3] + "axb")]
    assert fed == ["a", "", "", "boa", "x", ""]
    assert sink.finish() == "b"


def test_stop_strings_before_min_tokens_are_ignored(byte_level: Tokenizer) -> None:
    sink = TextStream(byte_level, Options(("b",)))
    assert sink.feed(byte_level.encode("b")[0], may_stop=False) == ("b", None)
    assert sink.feed(byte_level.encode("a")[0]) == ("a", None)
    assert sink.feed(byte_level.encode("b")[0]) == ("", "b")
    with pytest.raises(RuntimeError):
        sink.feed(0)


@settings(max_examples=100, deadline=None)
@given(head=texts, tail=texts, other=texts)
def test_a_copy_is_independent(byte_level: Tokenizer, head: str, tail: str, other: str) -> None:
    sink = TextStream(byte_level, Options(("ab",), include_stop_str_in_output=True))

    def feed(target: TextStream, text: str) -> str:
        pieces = []
        for token in byte_level.encode(text):
            piece, stop = target.feed(token)
            pieces.append(piece)
            if stop:
                return "".join(pieces)
        return "".join(pieces) + target.finish()

    for token in byte_level.encode(head):
        if sink.feed(token)[1]:
            return
    twin = sink.copy()
    feed(sink, other)
    fresh = TextStream(byte_level, Options(("ab",), include_stop_str_in_output=True))
    for token in byte_level.encode(head):
        fresh.feed(token)
    assert feed(twin, tail) == feed(fresh, tail)
    assert twin.text == fresh.text
