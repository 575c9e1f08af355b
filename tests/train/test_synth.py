"""Writing data: what is asked, what is kept, and what a kill at any byte leaves behind."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from alula.config import AlulaError
from alula.sequence import SamplingParams
from alula.train.data import read_conversations
from alula.train.dialogue import turn_end, user_prompt
from alula.train.synth import PATIENCE, SynthConfig, Written, write_conversations
from alula.train.watch import Watch
from tests.train.chat import BLIND, PLAIN, SPACED, THINKING, Parrot, chat_tokenizer

SMALL = SynthConfig(answer_tokens=300, batch=6, turns=3, user_tokens=30, max_answer_tokens=40, max_tokens=400)


class Told(Watch):
    def __init__(self) -> None:
        self.sentences: list[str] = []

    def tell(self, sentence: str) -> None:
        self.sentences.append(sentence)


def write(
    path: Path, config: SynthConfig = SMALL, *, template: str = PLAIN, vocabulary: int = 40
) -> tuple[Written, Parrot, Told]:
    tokenizer, told = chat_tokenizer(template), Told()
    parrot = Parrot(tokenizer, vocabulary)
    return write_conversations(path, tokenizer, parrot, config, told), parrot, told


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def lines(path: Path, *found: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in found))
    return path


def asked(record: dict[str, Any]) -> list[str]:
    return [message["content"] for message in record["messages"] if message["role"] == "user"]


def test_from_nothing(tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "a.jsonl", chat_tokenizer()
    written, parrot, told = write(path)
    found = records(path)
    assert written.conversations == len(found) and not told.sentences
    learned = sum(end - start for record in found for start, end in record["learned"])
    assert 300 <= written.answer_tokens == learned
    assert {len(asked(record)) for record in found} == {1, 2, 3}
    assert len({value for record in found for value in record["temperatures"]}) > 2
    assert {params.temperature for params in parrot.params} >= {0.0, 0.6, 1.0}
    for record in found:
        ids, spans = record["tokens"], record["learned"]
        assert len(spans) == len(asked(record)) == len(record["temperatures"])
        answers = [m["content"] for m in record["messages"] if m["role"] == "assistant"]
        assert [tokenizer.decode(ids[start:end]) for start, end in spans] == answers
        shown = tokenizer.render_chat(record["messages"], add_generation_prompt=False)
        assert shown.startswith(tokenizer.decode(ids, skip_special_tokens=False))
        assert all(ids[end - 1] == tokenizer.eos_id for _, end in spans[:-1])
    assert {len(c.tokens) for c in read_conversations([path], max_tokens=999, tokenizer=tokenizer)}


def test_a_follow_up_is_the_users_turn_after_the_answer(tmp_path: Path) -> None:
    _, parrot, _ = write(tmp_path / "a.jsonl")
    assert any(p.endswith("<|end|>\n<|start|>user\n") and "assistant" in p for p in parrot.prompts)
    tokenizer = chat_tokenizer(SPACED)
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    prompt = tokenizer.decode(user_prompt(tokenizer, "Why", history), skip_special_tokens=False)
    assert prompt == "[INST] a [/INST] b <|end|>[INST] Why"


def test_what_ends_a_users_turn() -> None:
    tokenizer = chat_tokenizer(PLAIN)
    assert turn_end(tokenizer) == ((tokenizer.eos_id,), ())
    assert turn_end(chat_tokenizer(SPACED)) == ((), ("[/INST]",))


def test_user_turns_end_at_the_templates_own_text(tmp_path: Path) -> None:
    tokenizer, path = chat_tokenizer(SPACED), tmp_path / "a.jsonl"
    end = [tokenizer.eos_id or 0]

    def generate(prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
        texts = [f" more{p.seed} [/INST]" if p.stop else f"answer{p.seed}" for p in params]
        return [tokenizer.encode(text) + ([] if p.stop else end) for text, p in zip(texts, params, strict=True)]

    config = replace(SMALL, answer_tokens=50, turns=1, temperatures=(1.0,))
    write_conversations(path, tokenizer, generate, config)  # type: ignore[arg-type]
    assert all("more" in asked(record)[0] and "[/INST]" not in asked(record)[0] for record in records(path))


@pytest.mark.parametrize("template", [PLAIN, THINKING])
def test_a_kill_at_any_byte_loses_nothing(template: str, tmp_path: Path) -> None:
    """Going on from any beginning of the file, and from what a smaller goal left, gives the whole file, bit for bit."""
    path, cut = tmp_path / "a.jsonl", tmp_path / "cut.jsonl"
    inputs = lines(tmp_path / "in.jsonl", *({"prompt": f"question {i}"} for i in range(12)))
    for config in (SMALL, replace(SMALL, answer_tokens=None, inputs=(inputs,), batch=5)):
        path.unlink(missing_ok=True)
        written, _, _ = write(path, config, template=template)
        whole = path.read_bytes()
        line_ends = [i for i, byte in enumerate(whole, 1) if byte == 10]
        for size in {0, 1, 7, len(whole), *line_ends, *(random.Random(1).randrange(len(whole)) for _ in range(8))}:
            cut.write_bytes(whole[:size])
            again, _, told = write(cut, config, template=template)
            assert cut.read_bytes() == whole
            assert again == written
            ended = size == 0 or (
                b'"end": {"batch"' in whole[:size].splitlines(keepends=True)[-1] and size in line_ends
            )
            assert bool(told.sentences) != ended


def test_a_goal_raised_later_goes_on(tmp_path: Path) -> None:
    once, twice = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    write(once)
    write(twice, replace(SMALL, answer_tokens=100))
    write(twice)
    assert once.read_bytes() == twice.read_bytes()


def test_no_question_and_no_answer_comes_twice(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    written, _, _ = write(path, replace(SMALL, answer_tokens=150, batch=40, turns=1), vocabulary=2)
    found = [record["messages"] for record in records(path)]
    for place in (0, 1):
        texts = [" ".join(messages[place]["content"].casefold().split()) for messages in found]
        assert len(texts) == len(set(texts))
    assert written.dropped["repeats"] > 0
    assert written.dropped["user's turn not ended"] > 0


def test_repeats_are_known_across_batches_and_runs(tmp_path: Path) -> None:
    path, questions = tmp_path / "a.jsonl", ("one", "two", "ONE ", "three", "two")
    given = lines(tmp_path / "in.jsonl", *({"prompt": question} for question in questions))
    config = replace(SMALL, answer_tokens=1, inputs=(given,), batch=1, turns=1)
    for goal in (1, 200):
        written, _, _ = write(path, replace(config, answer_tokens=goal))
    assert [asked(record) for record in records(path)] == [["one"], ["two"], ["three"]]
    assert written.dropped == {"repeats": 2}


def test_a_model_without_new_words_is_given_up_on(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    calls = 0

    def endless(prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
        nonlocal calls
        calls += 1
        return [tokenizer.encode("x" * wanted.max_tokens) for wanted in params]

    with pytest.raises(AlulaError, match=r"brought nothing \(user's turn not ended: 24\)"):
        write_conversations(tmp_path / "a.jsonl", tokenizer, endless, SMALL)  # type: ignore[arg-type]
    assert calls == PATIENCE


def test_prompts_are_asked_in_turn(tmp_path: Path) -> None:
    given = lines(
        tmp_path / "in.jsonl",
        {"turns": ["one", "two"]},
        {"prompt": "three"},
        {"messages": [{"role": "user", "content": "four"}]},
    )
    path = tmp_path / "a.jsonl"
    written, _, _ = write(path, replace(SMALL, answer_tokens=None, inputs=(given,), turns=1))
    turns = {tuple(asked(record)) for record in records(path)}
    assert turns <= {("one",), ("one", "two"), ("three",), ("four",)} and len(turns) == 3
    assert written.conversations == 3


TALK = [{"from": "human", "value": "one"}, {"from": "gpt", "value": "given"}, {"from": "human", "value": "two"}]


def test_given_answers_are_kept_or_rewritten(tmp_path: Path) -> None:
    given = lines(tmp_path / "in.jsonl", {"conversations": TALK, "system": "be brief"})
    config, tokenizer = replace(SMALL, answer_tokens=None, inputs=(given,)), chat_tokenizer()
    kept, _, _ = write(tmp_path / "kept.jsonl", config)
    (record,) = records(tmp_path / "kept.jsonl")
    ((start, end),) = record["learned"]
    assert tokenizer.decode(record["tokens"][start:end], skip_special_tokens=False) == "given<|end|>"
    assert kept.answer_tokens == 6 and record["temperatures"] == []
    write(tmp_path / "new.jsonl", replace(config, rewrite=True))
    (record,) = records(tmp_path / "new.jsonl")
    assert [m["content"] for m in record["messages"]][:2] == ["be brief", "one"]
    assert record["messages"][2]["role"] == "assistant" and record["messages"][2]["content"] != "given"


def test_histories_that_the_template_changes_are_learned_turn_by_turn(tmp_path: Path) -> None:
    """A template that shows earlier turns otherwise than they were written gets a record per turn, of true tokens."""
    template = PLAIN.replace("{{ m['content'] }}", "{{ m['content'] if loop.last else m['content'] | trim }}")
    given = lines(tmp_path / "in.jsonl", {"turns": ["one", "two"]}, {"turns": ["three", "four"]}, {"turns": ["x", "y"]})
    path = tmp_path / "a.jsonl"
    write(path, replace(SMALL, answer_tokens=None, inputs=(given,), turns=1), template=template)
    tokenizer = chat_tokenizer(template)
    seconds = [record for record in records(path) if len(asked(record)) == 2]
    assert seconds
    for record in seconds:
        ((start, end),) = record["learned"]
        assert record["tokens"][:start] == tokenizer.apply_chat_template(record["messages"][:-1])
        assert end == len(record["tokens"])


def test_benchmarks_are_kept_out(tmp_path: Path) -> None:
    bench = lines(tmp_path / "bench.jsonl", {"turns": ["tell me about seven brown bears", "w1 w2 w3 w4 w5 w6 w7 w8"]})
    given = lines(
        tmp_path / "in.jsonl",
        {"prompt": "Please TELL me about seven brown bears!"},
        {"prompt": "tell me about seven black bears"},
        {
            "messages": [
                {"role": "user", "content": "ok"},
                {"role": "assistant", "content": "w0 w1 w2 w3 w4 w5 w6 w7 w8"},
            ]
        },
    )
    path = tmp_path / "a.jsonl"
    config = replace(SMALL, answer_tokens=None, inputs=(given,), exclude=(str(bench), "default"), turns=1)
    written, parrot, _ = write(path, config)
    assert [asked(record) for record in records(path)] == [["tell me about seven black bears"]]
    assert written.dropped == {"overlaps with bench": 2}
    assert not any("brown" in prompt for prompt in parrot.prompts)  # nothing is written for it
    with pytest.raises(AlulaError, match=r"exclude: .* holds no prompt"):
        write(path, replace(config, exclude=(str(lines(tmp_path / "none.jsonl", [1])),)))


def test_bad_lines_never_stop_the_work(tmp_path: Path) -> None:
    given = tmp_path / "in.jsonl"
    long = {"prompt": "x" * 400}
    strange = {"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]}
    surrogate = b'{"prompt": "\\ud800"}\n'
    good = (json.dumps({"prompt": "fine"}) + "\n").encode()
    given.write_bytes(
        b"{\n" + json.dumps(long).encode() + b"\n" + json.dumps(strange).encode() + b"\n" + surrogate + good
    )
    config = replace(SMALL, answer_tokens=None, inputs=(given,), turns=1)
    written, _, told = write(tmp_path / "a.jsonl", config)
    assert written.conversations == 1
    assert written.bad_lines == (f"{given}: left out 4 bad lines (1-4)",)
    reasons = [sentence.partition("left out: ")[2] for sentence in told.sentences]
    for reason, part in zip(
        reasons, ("not valid JSON", "max_tokens leaves room", "role tool", "surrogate"), strict=True
    ):
        assert part in reason
    with pytest.raises(AlulaError, match="no line of"):
        write(tmp_path / "b.jsonl", replace(config, inputs=(lines(tmp_path / "bad.jsonl", [1]),)))


def test_a_file_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for content in (b'{"prompt": "mine"}\n', b"notes", b'{"batch": 3, "pri', b"\x00\x01\n"):
        path.write_bytes(content)
        if content.startswith(b'{"batch": '):
            write(path)  # the beginning of a line of ours
            continue
        with pytest.raises(AlulaError, match="did not write: give another file"):
            write(path)
        assert path.read_bytes() == content


def test_a_file_for_another_tokenizer_is_refused(tmp_path: Path) -> None:
    path, other = tmp_path / "a.jsonl", chat_tokenizer()
    other.backend.add_tokens(["wings"])
    write(path)
    before = path.read_bytes()
    with pytest.raises(AlulaError, match="another tokenizer"):
        write_conversations(path, other, Parrot(other), SMALL)
    with pytest.raises(AlulaError, match="another tokenizer"):
        read_conversations([path], max_tokens=99, tokenizer=other)
    assert path.read_bytes() == before


def test_two_writers_are_one_too_many(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"

    class Second(Parrot):
        def __call__(self, *arguments: Any) -> list[list[int]]:
            with pytest.raises(AlulaError, match="being written by another process"):
                write(path)
            return super().__call__(*arguments)

    write_conversations(path, chat_tokenizer(), Second(chat_tokenizer()), replace(SMALL, answer_tokens=1))


def test_an_older_file_is_continued(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"prompt_ids": [1, 2], "answer_ids": [3] * 50, "temperature": 0.0, "batch": 4})
    written, _, _ = write(path)
    assert written.answer_tokens >= 300
    first, second = records(path)[:2]
    assert "prompt_ids" in first and second["batch"] == 5


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"batch": 0}, "batch is 0"),
        ({"turns": 0}, "turns is 0"),
        ({"ngram": 3}, "ngram is 3"),
        ({"answer_tokens": 0}, "answer_tokens is 0"),
        ({"temperatures": ()}, "temperatures is"),
        ({"temperatures": (-1.0,)}, "temperatures is"),
        ({"top_p": 0.0}, "top_p is 0"),
        ({"max_tokens": 8}, "max_tokens is 8"),
        ({"rewrite": True}, "no inputs"),
        ({"exclude": ("nothing",)}, "exclude: nothing is no file"),
        ({"inputs": (Path("nothing.jsonl"),)}, "inputs: nothing.jsonl is no file"),
    ],
)
def test_bad_settings_are_named_before_anything_is_written(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(AlulaError, match=named):
        write(tmp_path / "a.jsonl", replace(SMALL, **change))
    assert not (tmp_path / "a.jsonl").exists()


def test_a_template_that_hides_answers_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(AlulaError, match="does not show where"):
        write(tmp_path / "a.jsonl", template=BLIND)
