"""Prompt files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from alula.bench.tasks import as_user_turn, read_prompts
from alula.config import AlulaError
from alula.text import Tokenizer


def test_the_first_turn_or_the_prompt(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"turns": ["one", "two"], "id": 3}\n\n{"prompt": "zwei \\u00fc"}\n{"turns": ["three"]}\n')
    assert read_prompts(path) == ["one", "zwei ü", "three"]
    assert read_prompts(path, limit=2) == ["one", "zwei ü"]


@pytest.mark.parametrize(
    "line", [b"[1]", b"{", b'{"turns": []}', b'{"turns": "a"}', b'{"turns": [1]}', b'{"prompt": ""}', b"{}", b'"\xff"']
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "good"}\n' + line + b"\n")
    with pytest.raises(AlulaError, match=r"prompts\.jsonl, line 2"):
        read_prompts(path)


def test_no_file_no_prompt_no_limit(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    for path, limit in ((tmp_path / "none.jsonl", None), (tmp_path / "empty.jsonl", None), (None, 0), (tmp_path, None)):
        with pytest.raises(AlulaError):
            read_prompts(path, limit)


def test_the_built_in_set() -> None:
    prompts = read_prompts(None)
    assert len(prompts) == len(set(prompts)) == 24


def test_a_user_turn(tiny_folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(tiny_folder)
    assert as_user_turn(tokenizer, "hi", raw=True) == tokenizer.encode("hi")
    assert as_user_turn(tokenizer, "hi") == tokenizer.encode("<|user|>hi<|end|><|assistant|>")
    plain = Tokenizer(tokenizer.backend)
    assert as_user_turn(plain, "hi") == plain.encode("hi")


def test_every_built_in_line_has_its_category(root: Path) -> None:
    lines = (root / "src/alula/prompts/default.jsonl").read_text(encoding="utf-8").splitlines()
    assert {json.loads(line)["category"] for line in lines} == {"chat", "code", "math", "instruction"}
