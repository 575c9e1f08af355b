"""Faults that users of other engines reported: each that concerns what is built here has a test named after it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_REPORTS = """
    a1 a3 a5 a7 a9 a11 a13
    b2 b4 b6 b8 b10 b12
    c1 c3 c5 c7
    d2 d4 d5b d7 d9 d11
    e2 e4 e6 e8 e10 e12 e14 e16 e18
    f2 f4 f6 f8
    h4 h12 h15
"""


@pytest.fixture(scope="module")
def names(root: Path) -> list[str]:
    sources = (path.read_text() for path in (root / "tests").rglob("test_*.py"))
    return [name for source in sources for name in re.findall(r"def (test_\w+)", source.lower())]


@pytest.mark.parametrize("report", _REPORTS.split())
def test_each_report_has_a_test(report: str, names: list[str]) -> None:
    assert any(report in name.split("_") for name in names), f"no test is named test_{report}_..."
