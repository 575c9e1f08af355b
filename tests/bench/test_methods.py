"""The table of methods, on a tiny model: every method's cells, resumed, and refused where settings differ."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from alula.model.load import load_model
from tests.draft.heads import save_random_head
from tests.draft.medusas import save_random_medusa
from tests.engine.tiny import save_tiny_llama


@pytest.fixture(scope="module")
def methods(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("methods", root / "benchmarks" / "methods.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["methods"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_table_is_made_and_gone_on_with(
    tmp_path: Path, methods: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, shelf, output = save_tiny_llama(tmp_path / "model", layers=3), tmp_path / "shelf", tmp_path / "out"
    target = load_model(folder, dtype="float32")
    eagle1 = save_random_head(shelf / "tiny-eagle1", target, kind="eagle1")
    known = json.loads((eagle1 / "provenance.json").read_text())
    known |= {"trainable_parameters": 1234, "training": {"tokens": 5678}}
    (eagle1 / "provenance.json").write_text(json.dumps(known))
    save_random_head(shelf / "tiny-eagle3", target)
    save_random_medusa(shelf / "tiny-medusa", target)
    save_tiny_llama(shelf / "tiny-lm", layers=1)
    monkeypatch.setenv("ALULA_HEADS", str(shelf))
    for name in ("one", "tune"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "a b c a b c a b"}\n{"prompt": "d e"}\n')
    named = (
        "lm=tiny-lm medusa=tiny-medusa eagle1=tiny-eagle1 eagle2=tiny-eagle1 eagle3=tiny-eagle3 eagle3:two=tiny-eagle3"
    )
    command = (
        f"--output {output} --model {folder} --dtype float32 --prompts {tmp_path / 'one.jsonl'} --kv-cache-mib 4 "
        f"--tune {tmp_path / 'tune.jsonl'} --tune-limit 1 --trees 3,2,2 5,3,2,0.1 --max-tokens 6 "
        f"--methods plain ngram {named}"
    ).split()
    assert methods.main(command) == 0
    rows = json.loads((output / "methods.json").read_text())
    kinds = [(row["temperature"], row["rule"]) for row in rows]
    assert [kinds.count(kind) for kind in ((0.0, "coupled"), (1.0, "coupled"), (1.0, "rejection"))] == [8, 8, 8]
    assert all(row["identical"] == 2 for row in rows if row["rule"] == "coupled")
    assert all(row["tree"] in ([3, 2, 2], [5, 3, 2, 0.1]) for row in rows if row["method"] != "plain")
    assert all(row["tau"] >= 1 and row["ratio"]["low"] <= row["ratio"]["high"] for row in rows)
    eagle2 = next(row for row in rows if row["method"] == "eagle2")
    assert (eagle2["parameters"], eagle2["training_tokens"]) == (1234, 5678)
    table = (output / "methods.md").read_text()
    assert len(table.splitlines()) == 2 + len(rows) and "1,234" in table and table in capsys.readouterr().out
    assert (output / "methods.png").read_bytes().startswith(b"\x89PNG")
    assert {row["method"] for row in rows} >= {"eagle3", "eagle3-two"}
    _check_resumed(methods, command, output, capsys)
    save_random_head(shelf / "tiny-eagle1", target, kind="eagle1", seed=9)
    methods.weights.cache_clear()  # a process of its own hashes anew
    assert methods.main(command) == 2
    assert "other settings or weights" in capsys.readouterr().err


def _check_resumed(methods: ModuleType, command: list[str], output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is there is taken as it is, what is missing is measured, other settings are refused."""
    one, other = output / "cells" / "one-ngram-t0-coupled.json", output / "cells" / "one-plain-t0-coupled.json"
    found = json.loads(one.read_text())
    found["figures"]["tau"] = 7.77
    one.write_text(json.dumps(found))
    other.unlink()
    assert methods.main(command) == 0
    assert "7.77" in capsys.readouterr().out and other.is_file()
    assert methods.main([*command, "--seed", "3"]) == 2
    assert "was measured with other settings" in capsys.readouterr().err


def test_bad_methods_and_trees_are_refused(methods: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert methods.main(["--output", "nowhere", "--model", "nowhere", "--methods", "eagle9"]) == 2
    assert "methods names 'eagle9': give some of plain, ngram" in capsys.readouterr().err
    for tree in ("4,2", "4,2,3,1", "4,2,3,0.1,2", "4,2,wide", "0,2,3"):
        assert methods.main(["--output", "nowhere", "--model", "nowhere", "--trees", tree]) == 2
        assert f"trees has {tree!r}: give rows, depth and branch" in capsys.readouterr().err
