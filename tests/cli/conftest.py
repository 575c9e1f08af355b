"""A tiny model on disk, and the command line in a process of its own or in this one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.tiny import save_tiny_llama

Shell = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def shell() -> Shell:
    """shell("generate", ..., stdin=b"") runs `alula` and returns the finished process."""

    def run(*arguments: str | bytes | Path, stdin: bytes = b"") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "alula", *arguments]
        found = subprocess.run(command, input=stdin, capture_output=True, check=False)
        return subprocess.CompletedProcess(
            found.args,
            found.returncode,
            found.stdout.decode("utf-8", "replace"),
            found.stderr.decode("utf-8", "replace"),
        )

    return run
