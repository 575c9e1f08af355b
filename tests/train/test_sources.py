"""Lines of prompts and conversations in the shapes people have them, and bad ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from alula.config import AlulaError
from alula.train.lines import TOLD, BadLines
from alula.train.sources import read_messages, read_sources

USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("record", "roles", "contents"),
    [
        ({"messages": [USER, {"role": "assistant", "content": "b"}]}, "user assistant", "a b"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, "user", "a"),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, "user assistant", "a b"),
        ({"conversations": [USER], "system": "s"}, "system user", "s a"),
        ({"conversations": [{"from": "system", "value": "t"}, USER], "system": "s"}, "system user", "t a"),
        ({"turns": ["a", "b"], "prompt": "c"}, "user user", "a b"),
        ({"prompt": "a"}, "user", "a"),
        ({"question": "a", "question_id": 7}, "user", "a"),
    ],
)
def test_shapes(record: dict[str, Any], roles: str, contents: str) -> None:
    found = read_messages(record)
    assert [message["role"] for message in found] == roles.split()
    assert [message["content"] for message in found] == contents.split()


@pytest.mark.parametrize(
    ("record", "named"),
    [
        ({"text": "a"}, "none of messages, conversations"),
        ({"messages": []}, "messages is no list or empty"),
        ({"messages": "a"}, "messages is no list or empty"),
        ({"messages": [USER, "b"]}, r"messages\[1\] is no object"),
        ({"messages": [{"role": "narrator", "content": "a"}]}, r"messages\[0\] has role 'narrator'"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, r"messages\[1\] is 'None'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "part that is not text"),
        ({"messages": [{"role": "assistant", "content": "b"}]}, "no user speaks"),
        ({"conversations": [{"from": 3, "value": "a"}]}, "has role 3"),
        ({"turns": ["a", " "]}, r"turns\[1\] is ' '"),
        ({"prompt": 7}, "prompt is '7'"),
    ],
)
def test_a_bad_record_is_named(record: dict[str, Any], named: str) -> None:
    with pytest.raises(AlulaError, match=named):
        read_messages(record)


def test_bad_lines_are_told_by_number_and_counted(tmp_path: Path) -> None:
    path, told = tmp_path / "a.jsonl", list[str]()
    good = b'{"prompt": "a"}'
    path.write_bytes(b"\n".join([b"\xef\xbb\xbf" + good, b"{", b"", good, b"[1]", b'"\xff"', b"[" * 100_000, good]))
    bad = BadLines(told.append)
    assert [source.number for source in read_sources([path], bad)] == [1, 4, 8]
    assert [sentence.partition(" is left out: ")[0] for sentence in told] == [
        f"{path}, line {number}" for number in (2, 5, 6, 7)
    ]
    assert "not valid JSON" in told[0] and "no JSON object" in told[1] and "not valid UTF-8 (byte 1)" in told[2]
    assert bad.summary() == [f"{path}: left out 4 bad lines (2, 5-7)"]
    list(read_sources([path], bad))  # reading again tells nothing new
    assert (len(told), bad.total) == (4, 4)


def test_a_flood_of_bad_lines_is_summed_up(tmp_path: Path) -> None:
    path, told = tmp_path / "a.jsonl", list[str]()
    path.write_text("{\n" * 1000)
    bad = BadLines(told.append)
    assert list(read_sources([path], bad)) == []
    assert len(told) == TOLD
    assert bad.summary() == [f"{path}: left out 1000 bad lines (1-1000)"]
