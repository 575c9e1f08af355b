"""`--help` is quick because parsing imports nothing heavy, and it names every flag."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from alula.cli import main
from alula.version import alula_version
from tests.cli.conftest import Shell

COMMANDS = ("generate", "chat", "prove", "bench", "serve", "synth", "train", "ablate")


def test_help_takes_less_than_a_second(shell: Shell) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = shell("--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert found.returncode == 0
    assert all(command in found.stdout for command in COMMANDS)
    # Processor time, which does not grow when other work keeps the machine busy.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"alula {alula_version()}\n"


@pytest.mark.parametrize("command", ["generate", "serve", "synth", "train", "ablate"])
def test_parsing_imports_nothing_heavy(command: str) -> None:
    heavy = ("torch", "transformers", "numpy", "tokenizers", "fastapi", "uvicorn", "pydantic", "prometheus_client")
    code = (
        "import sys\nfrom alula.cli import main\n"
        f"try:\n    main(['{command}', '--help'])\nexcept SystemExit:\n    pass\n"
        f"print([m for m in {heavy} if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", COMMANDS[:4])
def test_common_flags(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    from alula.cli import main

    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = capsys.readouterr().out
    flags = "model drafter rule nodes depth branch floor temperature top-p seed max-tokens dtype threads json"
    assert [flag for flag in flags.split() if f"--{flag}" not in shown] == []


def test_an_unknown_flag_is_an_error(shell: Shell) -> None:
    found = shell("generate", "x", "--temprature", "1")
    assert found.returncode == 2
    assert "--temprature" in found.stderr
    assert found.stdout == ""


def test_train_shows_the_fields_of_its_config(capsys: pytest.CaptureFixture[str]) -> None:
    from alula.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["train", "--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert "--output PATH" in shown and "--recipe.matrix-rate" in shown
    assert all(method in shown for method in ("eagle1", "eagle3", "medusa", "lm"))


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--recipe.clip", "-1"], "clip is -1.0: give a number above 0"),
        (["--served.depth", "0"], "served.depth is 0: give a whole number of at least 1"),
        (["--served.floor", "1"], "served.floor is 1.0: give a number of at least 0 and below 1"),
        (["--served.sets", "nowhere.jsonl"], "nowhere.jsonl cannot be read"),
        (["--data", "nowhere.jsonl"], "data file nowhere.jsonl does not exist"),
        (["--start-from", "nowhere"], "start_from: nowhere is no folder"),
        (["--fsdp"], "fsdp is on and there is one process"),
    ],
)
def test_train_finds_bad_values_at_once(
    flags: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from alula.cli import main

    try:
        code = main(["train", "--output", str(tmp_path / "run"), *flags])
    except SystemExit as ended:
        code = int(ended.code or 0)
    told = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert code == 2 and sentence in told, told
    assert not list(tmp_path.rglob("*.*"))


def test_train_tells_its_mistakes_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from alula.cli import main

    missing = tmp_path / "nothing.jsonl"
    assert main(["train", "--output", str(tmp_path / "run"), "--data", str(missing), "--model", "nothing"]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith(f"alula: error: data file {missing} does not exist")
