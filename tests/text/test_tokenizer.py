"""The tokenizer wrapper: files, bad input, chat templates, hashes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from alula.config import AlulaError
from alula.text import Tokenizer


def save(tokenizer: Tokenizer, folder: Path, config: dict[str, Any]) -> Path:
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_round_trip(byte_level: Tokenizer) -> None:
    assert byte_level.decode(byte_level.encode("hello é😀")) == "hello é😀"
    assert byte_level.encode("hé".encode()) == byte_level.encode("hé")


@pytest.mark.parametrize(("text", "words"), [(b"\xff", "UTF-8"), ("a\ud800", "UTF-8"), (7, "string")])
def test_what_is_not_text_is_refused(byte_level: Tokenizer, text: Any, words: str) -> None:
    with pytest.raises(AlulaError, match=words):
        byte_level.encode(text)


@pytest.mark.parametrize("ids", [[0, -1], [0, 10**6], [0, True], [0, "a"], [0, 1.0]])
def test_unknown_ids_are_refused_by_position(byte_level: Tokenizer, ids: list[Any]) -> None:
    with pytest.raises(AlulaError, match="prompt token 1 "):
        byte_level.check_ids(ids)


def test_ids_are_checked_against_the_model(byte_level: Tokenizer) -> None:
    last = byte_level.vocab_size - 1
    assert byte_level.check_ids([last]) == [last]
    assert byte_level.check_ids([last + 5], vocab_size=last + 6) == [last + 5]
    with pytest.raises(AlulaError, match=f"from 0 to {last - 1}"):
        byte_level.check_ids([last], vocab_size=last)


def test_chat_template(byte_level: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hé"}]
    assert byte_level.render_chat(messages) == "<user>hé<eos><assistant>"
    assert byte_level.render_chat(messages, add_generation_prompt=False) == "<user>hé<eos>"
    ids = byte_level.apply_chat_template(messages)
    assert ids == byte_level.encode("<user>hé<eos><assistant>", add_special_tokens=False)
    assert byte_level.eos_id in ids


@pytest.mark.parametrize("messages", [[], "hi", {"role": "user"}, [{"content": "x"}], ["x"]])
def test_messages_of_another_form_are_refused(byte_level: Tokenizer, messages: Any) -> None:
    with pytest.raises(AlulaError, match="message"):
        byte_level.render_chat(messages)


def test_template_that_refuses(byte_level: Tokenizer) -> None:
    picky = Tokenizer(byte_level.backend, "{{ raise_exception('no system role') }}")
    with pytest.raises(AlulaError, match="no system role"):
        picky.render_chat([{"role": "system", "content": "x"}])
    with pytest.raises(AlulaError, match="no chat template"):
        Tokenizer(byte_level.backend).render_chat([{"role": "user", "content": "x"}])


def test_folder_with_template_in_config_or_file(byte_level: Tokenizer, tmp_path: Path) -> None:
    named = [
        {"name": "tool_use", "template": "T"},
        {"name": "default", "template": "{{ bos_token }}D"},
    ]
    save(
        byte_level,
        tmp_path,
        {"chat_template": named, "bos_token": {"content": "<b>"}, "eos_token": "<eos>"},
    )
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.render_chat([{"role": "user", "content": ""}]) == "<b>D"
    assert tokenizer.eos_id == byte_level.eos_id
    (tmp_path / "chat_template.jinja").write_text("F")
    assert Tokenizer.from_folder(tmp_path).chat_template == "F"


def test_damaged_files_are_named(byte_level: Tokenizer, tmp_path: Path) -> None:
    save(byte_level, tmp_path, {})
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(AlulaError, match=r"tokenizer_config\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(AlulaError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(AlulaError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_bad_words_in_both_spellings(byte_level: Tokenizer) -> None:
    spellings = byte_level.bad_words(("hello",))
    assert set(spellings) == {
        tuple(byte_level.encode("hello")),
        tuple(byte_level.encode(" hello")),
    }
    assert byte_level.bad_words(()) == ()


def test_hashes_tell_apart(byte_level: Tokenizer, tokenizers: dict[str, Tokenizer]) -> None:
    other = Tokenizer(byte_level.backend, "another template")
    assert other.hashes["vocabulary"] == byte_level.hashes["vocabulary"]
    assert other.hashes["chat_template"] != byte_level.hashes["chat_template"]
    assert tokenizers["pieces"].hashes["vocabulary"] != byte_level.hashes["vocabulary"]
