"""Prompt files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from alula.bench.tasks import SETS, as_user_turn, prompt_file, read_prompts, read_sets
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
    cases = ((tmp_path / "none.jsonl", None), (tmp_path / "empty.jsonl", None), ("default", 0), (tmp_path, None))
    for path, limit in cases:
        with pytest.raises(AlulaError):
            read_prompts(path, limit)


@pytest.mark.parametrize(("name", "count"), [("default", 24), ("summaries", 6), ("forms", 20)])
def test_the_built_in_sets(name: str, count: int) -> None:
    prompts = read_prompts(name)
    assert len(prompts) == len(set(prompts)) == count


def test_texts_to_summarise_are_long_and_say_something_new_all_the_way() -> None:
    """1,000 to 4,000 tokens; a token is 0.7 to 0.85 English words with the tokenizers in use."""
    for prompt in read_prompts("summaries"):
        words = prompt.split()
        assert 850 <= len(words) <= 2800
        runs = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
        assert len(set(runs)) > 0.97 * len(runs)


def test_a_name_is_a_set_and_a_path_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("forms").write_text('{"prompt": "mine"}\n')
    assert read_prompts("forms", 1) != ["mine"] == read_prompts("./forms")
    assert all(prompt_file(name).is_file() for name in SETS)
    assert prompt_file(tmp_path / "a.jsonl") == tmp_path / "a.jsonl"


def test_several_sets_by_name(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    found = read_sets(["forms", str(path)], limit=1)
    assert list(found) == ["forms", "own"] and [len(texts) for texts in found.values()] == [1, 1]
    assert list(read_sets(())) == ["default"]
    with pytest.raises(AlulaError, match="own is given twice"):
        read_sets([str(path), str(path)])


def test_a_user_turn(tiny_folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(tiny_folder)
    assert as_user_turn(tokenizer, "hi", raw=True) == tokenizer.encode("hi")
    assert as_user_turn(tokenizer, "hi") == tokenizer.encode("<|user|>hi<|end|><|assistant|>")
    plain = Tokenizer(tokenizer.backend)
    assert as_user_turn(plain, "hi") == plain.encode("hi")


def test_every_built_in_line_has_its_category() -> None:
    kinds = {
        "default": "chat code math instruction",
        "summaries": "summarisation",
        "forms": "form list table data code",
    }
    for name, categories in kinds.items():
        lines = prompt_file(name).read_text(encoding="utf-8").splitlines()
        assert {json.loads(line)["category"] for line in lines} == set(categories.split())
        assert all(len(json.loads(line)["turns"]) == 2 for line in lines)
