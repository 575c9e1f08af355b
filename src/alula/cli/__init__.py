"""The command line: `alula generate | chat | prove | bench | serve | synth | train | ablate | convert`."""

from __future__ import annotations

from alula.cli.main import main

__all__ = ["main"]
