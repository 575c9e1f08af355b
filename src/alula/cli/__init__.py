"""The command line: `alula generate | chat | prove | bench | serve | train`."""

from __future__ import annotations

from alula.cli.main import main

__all__ = ["main"]
