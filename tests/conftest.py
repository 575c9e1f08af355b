"""Markers, and what tests of several parts share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before torch loads OpenMP: threads that wait for each other in a spin starve when several processes share the cores.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

ROOT = Path(__file__).parents[1]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "real: needs the SmolLM2 weights, downloaded once and cached")
    config.addinivalue_line("markers", "slow: takes more than five seconds")


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def golden() -> Path:
    """Golden vectors of public heads, beside the repository; tests that want them are skipped where they are absent."""
    folder = Path(os.environ.get("ALULA_GOLDEN", ROOT.parent / "shared" / "golden"))
    if not folder.is_dir():
        pytest.skip(f"no golden vectors in {folder}: set ALULA_GOLDEN")
    return folder


@pytest.fixture(scope="session")
def prompts() -> Path:
    """Public benchmark prompts, beside the repository."""
    folder = Path(os.environ.get("ALULA_PROMPTS", ROOT.parent / "shared" / "prompts"))
    if not folder.is_dir():
        pytest.skip(f"no prompts in {folder}: set ALULA_PROMPTS")
    return folder
