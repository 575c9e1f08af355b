"""What `generate` and `chat` print."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from alula.cli import main
from tests.cli.conftest import Shell

FLAGS = ("--dtype", "fp32", "--max-tokens", "12", "--kv-cache-mib", "8", "--ignore-eos")

KEYS = "text token_ids prompt_tokens completion_tokens finish_reason seed stats"
STATS = (
    "drafter rule tree tau acceptance_rate acceptance_by_depth first_rejection_depth drafted checked accepted "
    "verified_rows_per_forward target_forwards tokens_per_second ttft_ms tpot_ms drafter_ms_per_level extra_kv_bytes "
    "time_ms"
)
STAGES = "draft tree forward sample commit other"


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["generate", *arguments, "--json", *FLAGS]) == 0
    shown = capsys.readouterr().out
    assert shown.count("\n") == 1
    found: dict[str, Any] = json.loads(shown)
    return found


def test_json_has_exactly_these_keys(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "hello", "--model", str(tiny_folder), "--drafter", str(tiny_folder))
    stats = found["stats"]
    assert list(found) == KEYS.split()
    assert list(stats) == STATS.split()
    assert list(stats["time_ms"]) == STAGES.split()
    assert stats["tree"] == {"nodes": 4, "depth": 2, "branch": 3}
    assert found["completion_tokens"] == len(found["token_ids"]) == 12
    assert found["finish_reason"] == "length"
    # the target as its own drafter: the first child is always right, so a step commits two tokens at least
    assert stats["tau"] == 12 / stats["target_forwards"] >= 2
    assert stats["extra_kv_bytes"] > 0 and stats["drafter_ms_per_level"] > 0
    assert stats["ttft_ms"] > 0 and stats["tpot_ms"] > 0 and stats["tokens_per_second"] > 0


def test_a_floor_leaves_the_text_and_takes_drafts(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ("hello", "--model", str(tiny_folder), "--drafter", str(tiny_folder))
    free, bound = answer(capsys, *model), answer(capsys, *model, "--floor", "0.5")
    assert bound["token_ids"] == free["token_ids"]
    assert bound["stats"]["tree"] == {"nodes": 4, "depth": 2, "branch": 3, "floor": 0.5}
    assert bound["stats"]["drafted"] < free["stats"]["drafted"]


def test_the_seed_that_is_reported_gives_the_text_again(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ("--model", str(tiny_folder), "--temperature", "1.0")
    first = answer(capsys, "hello", *model)
    again = answer(capsys, "hello", *model, "--seed", str(first["seed"]), "--drafter", "none")
    other = answer(capsys, "hello", *model, "--seed", str(first["seed"] ^ 1))
    assert again["token_ids"] == first["token_ids"] != other["token_ids"]
    assert again["stats"]["extra_kv_bytes"] == 0


def test_the_chat_template_is_applied_unless_raw(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = answer(capsys, "hello", "--model", str(tiny_folder))
    raw = answer(capsys, "hello", "--model", str(tiny_folder), "--raw")
    assert raw["prompt_tokens"] == 5
    assert chat["prompt_tokens"] == 5 + 3


def test_text_then_one_line_of_figures(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "hello", "--model", str(tiny_folder))
    assert main(["generate", "hello", "--model", str(tiny_folder), *FLAGS]) == 0
    text, figures = capsys.readouterr().out.rsplit("\n\n", 1)
    assert text == found["text"]
    assert figures.startswith("[12 tokens (length), ") and "tau 1.00" in figures and figures.count("\n") == 1


@pytest.mark.slow
def test_standard_input(shell: Shell, tiny_folder: Path) -> None:
    piped = shell("generate", "-", "--json", "--model", tiny_folder, *FLAGS, stdin=b"hello")
    named = shell("generate", "hello", "--json", "--model", tiny_folder, *FLAGS)
    assert piped.returncode == named.returncode == 0
    assert json.loads(piped.stdout)["token_ids"] == json.loads(named.stdout)["token_ids"]


@pytest.mark.slow
def test_chat_in_a_pipe(shell: Shell, tiny_folder: Path) -> None:
    script = b"hello\nmore\n/reset\n\nhello\n/exit\nnever asked\n"
    found = shell("chat", "--json", "--model", tiny_folder, *FLAGS, stdin=script)
    answers = [json.loads(line) for line in found.stdout.splitlines()]
    assert found.returncode == 0, found.stderr
    assert len(answers) == 3
    assert answers[0]["token_ids"] == answers[2]["token_ids"]
    assert answers[1]["prompt_tokens"] > answers[0]["prompt_tokens"] + 12


def test_chat_goes_on_after_a_turn_that_does_not_fit(shell: Shell, tiny_folder: Path) -> None:
    script = b"hello\n" + b"x" * 600 + b"\nhello\n"
    found = shell("chat", "--json", "--model", tiny_folder, *FLAGS, stdin=script)
    assert found.returncode == 0
    assert len(found.stdout.splitlines()) == 2
    assert "context limit is 512" in found.stderr and "Traceback" not in found.stderr


@pytest.mark.slow
def test_a_reader_that_leaves(tiny_folder: Path) -> None:
    """`alula generate ... | head -c 1` ends without a traceback."""
    command = [sys.executable, "-m", "alula", "generate", "hello", "--model", str(tiny_folder), *FLAGS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_stops_the_answer_only(tiny_folder: Path) -> None:
    command = [sys.executable, "-m", "alula", "chat", "--model", str(tiny_folder), "--dtype", "fp32", "--ignore-eos"]
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "dumb"}
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, preexec_fn=_heed_ctrl_c
    ) as process:
        try:
            os.close(theirs)
            shown = _until(ours, b"> ")
            assert b"/reset starts anew" in shown
            os.write(ours, b"hello\n")
            _until(ours, b"hello\r\n")
            os.read(ours, 1)  # the answer has begun
            process.send_signal(signal.SIGINT)
            assert b"[stopped]" in _until(ours, b"> ")
            os.write(ours, b"/exit\n")
            assert process.wait(60) == 0
        finally:
            process.kill()
    os.close(ours)


def _heed_ctrl_c() -> None:
    """A shell without job control has its background jobs ignore SIGINT, and their children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _until(terminal: int, wanted: bytes) -> bytes:
    """What the terminal shows, up to and including some text."""
    shown = b""
    while wanted not in shown:
        shown += os.read(terminal, 1024)
    return shown
