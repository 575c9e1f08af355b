"""Which alula this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def alula_version() -> str:
    """`source` where alula runs from its sources and was never installed."""
    try:
        return version("alula")
    except PackageNotFoundError:
        return "source"
