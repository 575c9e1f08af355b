"""`alula train`: a head for a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Train:
    """Train an EAGLE-3 head for a model, on answers that the model writes itself."""

    def run(self) -> int:
        return 0
