"""`alula synth` from end to end on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from alula.cli import main


def test_synth_and_inspect(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text('{"prompt": "one"}\nnonsense\n{"turns": ["two"]}\n{"messages": []}\n')
    command = ["synth", "--model", str(tiny_folder), "--dtype", "fp32", "--kv-cache-mib", "8", "--output", str(output)]
    command += ["--inputs", str(given), "--turns", "1", "--max-answer-tokens", "12", "--temperatures", "0", "0.7"]
    assert main([*command, "--json", "--exclude", "default"]) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [record["messages"][0]["content"] for record in records] == ["one", "two"]
    learned = sum(end - start for record in records for start, end in record["learned"])
    assert found["conversations"] == 2 and found["answer_tokens"] == learned
    assert found["bad_lines"] == [f"{given}: left out 2 bad lines (2, 4)"]
    assert f"{given}, line 2 is left out: it is not valid JSON" in shown.err
    assert "2 conversations, " in shown.err and "tokens/s" in shown.err

    before = output.read_bytes()
    output.write_bytes(before[:-5])
    assert main(command) == 0
    shown = capsys.readouterr()
    assert output.read_bytes() == before
    assert "the last batch was cut off" in shown.err
    assert shown.out.splitlines()[0] == f"{output} holds 2 conversations with {learned} answer tokens"

    assert main([*command, "--inspect", "1"]) == 0
    shown = capsys.readouterr()
    assert "<|user|>one<|end|><|assistant|>⟦" in shown.out and "two" not in shown.out
    assert output.read_bytes() == before


def test_bad_options(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["synth", "--model", str(tiny_folder), "--output", str(tmp_path / "a.jsonl")]
    for flags, sentence in (
        (["--batch", "0"], "batch is 0"),
        (["--batch", "600"], "max_num_batched_tokens is 512, below max_num_seqs 600"),
        (["--rewrite"], "rewrite is on"),
        (["--inputs", str(tmp_path / "none.jsonl")], "inputs: "),
        (["--inspect", "1"], "inspect: neither"),
        (["--exclude", "nothing"], "exclude: nothing is no file"),
        (["--output", str(tmp_path / "none" / "a.jsonl")], "output: the folder"),
    ):
        assert main([*command, *flags]) == 2
        shown = capsys.readouterr()
        assert shown.out == "" and sentence in shown.err
    assert not (tmp_path / "a.jsonl").exists()
