"""`alula bench` from end to end on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from alula.cli import main


@pytest.mark.slow
def test_bench(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "--model", str(tiny_folder), "--dtype", "fp32", "--kv-cache-mib", "8", "--ignore-eos"]
    command += ["--limit", "2", "--max-tokens", "8", "--repeats", "2", "--drafter", str(tiny_folder), "--compare-hf"]
    assert main([*command, "--plot", str(tmp_path / "bench.png"), "--output", str(tmp_path / "bench.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ceiling of plain decoding: ")
    found = json.loads(lines[-1])
    assert found == json.loads((tmp_path / "bench.json").read_text())
    assert found["set"] == "default" and found["identical"] == found["prompts"] == 2
    assert found["plain"]["tau"] == 1.0 < found["speculative"]["tau"]
    assert all(found[side]["tokens_per_second"] > 0 for side in ("plain", "speculative"))
    assert {"median", "low", "high"} <= set(found["speedup"])
    assert found["speedup"]["low"] <= found["speedup"]["median"] <= found["speedup"]["high"]
    assert sum(found["plain"]["step_ms"].values()) > 0
    assert found["plain_over_huggingface"]["identical"] == 2  # greedy, fp32: the same text as transformers
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_several_sets_are_in_every_table(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text('{"prompt": "a b c a b c a b"}\n')
    command = ["bench", "--model", str(tiny_folder), "--dtype", "fp32", "--kv-cache-mib", "8", "--drafter", "ngram"]
    command += ["--limit", "1", "--max-tokens", "6", "--repeats", "1", "--prompts", "default", str(own)]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])["sets"]
    assert list(found) == ["default", "own"] and all(report["prompts"] == 1 for report in found.values())
    assert [line for line in lines if line.startswith("prompts: ")] == ["prompts: default (1)", "prompts: own (1)"]
    heading = next(i for i, line in enumerate(lines) if line.startswith("prompts  "))
    rows = [line.split() for line in lines[heading + 2 : heading + 4]]
    assert [row[0] for row in rows] == ["default", "own"]
    assert [row[2] for row in rows] == [f"{report['speculative']['tau']:.3f}" for report in found.values()]
    assert main([*command, "--plot", str(tmp_path / "a.png")]) == 2
    assert "plot draws one set" in capsys.readouterr().err


def test_bad_options(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "--model", str(tiny_folder)]
    for flags, sentence in (
        (["--repeats", "0"], "repeats is 0"),
        (["--limit", "0"], "limit is 0"),
        (["--plot", str(tmp_path / "none" / "a.png")], "plot: the folder"),
        (["--compare-hf", "--temperature", "1"], "compare_hf"),
        (["--prompts", str(tmp_path)], "prompts: "),
        (["--prompts", "forms", "forms"], "forms is given twice"),
    ):
        assert main([*command, *flags]) == 2
        shown = capsys.readouterr()
        assert shown.out == "" and sentence in shown.err
