"""What of the target a drafter has still to read."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class FeatureQueue:
    """True target features of one sequence that its drafter has not consumed yet.

    Entry j is the feature f_j; the drafter pairs it with token t_{j+1}. Only commit appends and drops, so a
    draft that is rolled back finds its entries again.
    """

    def __init__(self, start: int = 0) -> None:
        self.start = start
        self._rows: list[torch.Tensor] = []

    @property
    def stop(self) -> int:
        return self.start + sum(rows.shape[0] for rows in self._rows)

    def append(self, features_NF: torch.Tensor) -> None:
        if features_NF.shape[0]:
            self._rows.append(features_NF)

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Features f_start .. f_{stop-1}, shape [stop - start, F]."""
        import torch

        if len(self._rows) > 1:
            self._rows = [torch.cat(self._rows)]
        return self._rows[0][start - self.start : stop - self.start]

    def drop_before(self, position: int) -> None:
        if position >= self.stop:
            self._rows, self.start = [], max(position, self.start)
        elif position > self.start:
            self._rows, self.start = [self.read(position, self.stop)], position
