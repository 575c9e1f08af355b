"""The vocabulary of a drafter that proposes only some of the target's tokens.

Shape suffixes: C draft vocabulary, V target ids up to the largest of those.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from alula.tree import IntArray

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DraftColumns:
    """Target ids of the columns of draft logits, and the way back. Made once for a drafter.

    ids_C: target id of each column, all distinct.
    """

    ids_C: IntArray

    @classmethod
    def of(cls, vocabulary_C: torch.Tensor | None) -> DraftColumns | None:
        """None, where the draft ids are the target's, stays None."""
        return None if vocabulary_C is None else cls(vocabulary_C.cpu().numpy())

    @cached_property
    def columns_V(self) -> IntArray:
        """Column of each target id, -1 where there is none."""
        columns_V = np.full(int(self.ids_C.max()) + 1, -1, np.int64)
        columns_V[self.ids_C] = np.arange(len(self.ids_C))
        return columns_V

    def columns_of(self, ids: IntArray) -> IntArray:
        """Column of each of these ids, -1 where there is none."""
        known = (ids >= 0) & (ids < len(self.columns_V))
        return np.where(known, self.columns_V[np.where(known, ids, 0)], -1)
