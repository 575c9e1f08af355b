"""benchmarks/peers/speed.py: engines as they are named, its figures, and a run with real workers on a tiny file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import speed
from speed import Spec, main, speeds

from alula.config import AlulaError
from tests.model.gguf_files import write_model
from tests.model.test_gguf import model


def test_engines_are_named_with_their_python_and_settings() -> None:
    spec = Spec.parse("llama_cpp@/envs/llama/bin/python:lookup=4,n_ctx=512")
    assert (spec.kind, spec.python) == ("llama_cpp", "/envs/llama/bin/python")
    assert spec.settings == {"lookup": "4", "n_ctx": "512"}
    assert spec.label == "llama_cpp lookup=4 n_ctx=512"
    with pytest.raises(AlulaError, match="give name=value"):
        Spec.parse("alula:fast")


def test_speeds_of_a_prompt_are_medians_of_its_rounds() -> None:
    rounds = [{"tokens": 11, "seconds": seconds, "first": 1.0} for seconds in (2.0, 3.0, 11.0)]
    assert speeds(rounds) == (11 / 3, 5.0)
    assert speeds([{"tokens": 1, "seconds": 2.0, "first": 2.0}]) == (0.5, 0.5)


def test_an_engine_ends_with_all_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "PATIENCE_S", 0.2)
    engine = tmp_path / "engine"
    body = f'sleep 600 & echo $! > {tmp_path}/child\necho \'{{"answer": {{"version": "1"}}}}\'\nwait\n'
    engine.write_text(f"#!/bin/sh\n{body}")
    engine.chmod(0o755)
    worker = speed.Worker(Spec.parse(f"any@{engine}"), tmp_path / "m.gguf", threads=1)
    child = int((tmp_path / "child").read_text())
    os.kill(child, 0)
    worker.close()
    wait_until(lambda: is_gone(child))


def test_an_engine_runs_in_its_turns_only(tmp_path: Path) -> None:
    """With all its processes: one that spins would take a core from the engine whose turn it is."""
    engine = tmp_path / "engine"
    answer = 'echo \'{"answer": {"version": "1"}}\''
    spin = f"(while :; do :; done) & echo $! > {tmp_path}/child"
    engine.write_text(f"#!/bin/sh\n{spin}\n{answer}\nwhile read -r line; do {answer}; done\nkill $!\n")
    engine.chmod(0o755)
    worker = speed.Worker(Spec.parse(f"any@{engine}"), tmp_path / "m.gguf", threads=1)
    try:
        child = int((tmp_path / "child").read_text())
        wait_until(lambda: state(child) == "T")
        assert worker.run([1], 1) == {"version": "1"}
        wait_until(lambda: state(child) == "T")
    finally:
        worker.close()
    wait_until(lambda: is_gone(child))


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_a_stopped_engine_ends_with_whoever_started_it() -> None:
    engine = "import os, time, worker; worker.end_with_parent(); print(os.getpid(), flush=True); time.sleep(600)"
    runner = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {engine!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", runner], stdout=subprocess.PIPE, text=True, cwd=speed.WORKER.parent
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        os.kill(child, signal.SIGSTOP)
        wait_until(lambda: state(child) == "T")
        process.kill()
    wait_until(lambda: is_gone(child))


def wait_until(reached: Callable[[], bool]) -> None:
    for _ in range(100):
        if reached():
            return
        time.sleep(0.05)
    raise AssertionError("not in five seconds")


def state(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]


def is_gone(process: int) -> bool:
    """Ended, or a zombie that nobody waits for."""
    try:
        return state(process) == "Z"
    except FileNotFoundError:
        return True


def test_a_run_with_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ALULA_CACHE", str(tmp_path / "cache"))
    path = write_model(tmp_path / "m.gguf", model(), "llama", kind="Q4_1")
    options = ["--gguf", str(path), "--limit", "1", "--rounds", "2", "--max-tokens", "6", "--threads", "1"]
    engines = ["alula:dtype=file", "alula:dtype=fp32,drafter=ngram,nodes=3,floor=0.1"]
    assert main([*engines, *options, "--output", str(tmp_path / "out")]) == 0
    report = json.loads((tmp_path / "out" / "peers.json").read_text())
    assert [row["engine"] for row in report["engines"]] == [
        "alula dtype=file",
        "alula dtype=fp32 drafter=ngram nodes=3 floor=0.1",
    ]
    assert report["engines"][0]["ratio_to_first"]["median"] == 1.0
    assert [len(rounds) for engine in report["runs"] for rounds in engine] == [2, 2]
    assert all(run["first"] <= run["seconds"] for engine in report["runs"] for rounds in engine for run in rounds)
    assert (tmp_path / "out" / "peers.md").read_text() in capsys.readouterr().out
    assert main(["alula:node=3", *options, "--output", str(tmp_path / "out")]) == 2
    assert main(["unheard_of", *options, "--output", str(tmp_path / "out")]) == 2
    assert "ended without an answer" in capsys.readouterr().err
