"""What the README tells a reader to type works as written."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
SHELL = [line for block in re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL) for line in block.splitlines()]
ALULA = [match for line in SHELL if (match := re.sub(r"^.*&& (?=alula )", "", line)).startswith("alula ")]


def _marked(name: str) -> str:
    found = re.search(rf"<!-- command: {name} -->\n```sh\n(.+)\n```", README)
    assert found, f"the README has no command marked {name!r}"
    return found[1]


def _run(command: str) -> subprocess.CompletedProcess[str]:
    words = shlex.split(command)
    script = shutil.which(words[0], path=str(Path(sys.executable).parent))
    start = [script] if script else [sys.executable, "-c", "from alula.cli import main; main()"]
    return subprocess.run([*start, *words[1:]], capture_output=True, text=True, check=False, timeout=300)


def test_the_two_commands_stand_on_their_own() -> None:
    """Each makes its environment, and CI runs the second one as it stands."""
    for name, last in (("run", "alula generate"), ("tests", "pytest")):
        steps = _marked(name).split(" && ")
        assert steps[0].endswith("-m venv .venv")
        assert steps[1:-1] == [". .venv/bin/activate", steps[2]]
        assert steps[2].startswith("pip install ")
        assert steps[-1].startswith(last)


def test_ci_takes_the_test_command_from_the_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    found = re.search(r"awk '(.+)' README.md", script)
    assert found
    assert "pip install" not in script
    line = subprocess.run(["awk", found[1], "README.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert line.rstrip("\n") == _marked("tests")
    subprocess.run(["bash", "-n", ".ci/run"], cwd=ROOT, check=True)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("command", ALULA)
def test_commands_run(command: str) -> None:
    done = _run(command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    if "--json" in command:
        figures = json.loads(done.stdout)
        assert len(figures["token_ids"]) == figures["completion_tokens"] > 0
        assert figures["seed"] == 1


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("program", PYTHON, ids=range(len(PYTHON)))
def test_python_runs(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.real
@pytest.mark.slow
def test_the_server_answers_the_readmes_curl() -> None:
    """The first line of the block starts the server, the others are typed beside it."""
    if shutil.which("curl") is None:
        pytest.skip("no curl")
    block = re.search(r"```console\n(.*?)```", README, flags=re.DOTALL)
    assert block
    start, *asked = [line.removeprefix("$ ") for line in block[1].splitlines()]
    with subprocess.Popen([sys.executable, "-m", *shlex.split(start)], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline().startswith("alula serves smollm2 at http://127.0.0.1:8000")
            shown = [
                subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True, timeout=120).stdout
                for line in asked
            ]
        finally:
            server.terminate()
    assert server.wait(60) == 0
    chat, stream, metrics = shown
    assert json.loads(chat)["choices"][0]["message"]["content"]
    assert stream.startswith("data: {") and stream.endswith("data: [DONE]\n\n")
    assert "alula:spec_decode_num_accepted_tokens_total" in metrics


@pytest.mark.parametrize("name", ["generate", "chat", "prove", "bench", "serve", "synth", "train"])
def test_each_command_has_help(name: str) -> None:
    assert f"`alula {name}" in README
    assert _run(f"alula {name} --help").returncode == 0


def test_common_flags_are_those_of_the_command_line() -> None:
    sentence = re.search(r"The first four commands take (.+?);", README, flags=re.DOTALL)
    assert sentence
    shown = _run("alula generate --help").stdout
    flags = re.findall(r"--[\w-]+", sentence[1])
    assert len(flags) > 10
    assert [flag for flag in flags if flag not in shown] == []
