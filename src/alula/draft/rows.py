"""Addressing of a drafter's rows in the paged cache.

Suffixes: B sequences (lanes), T rows of all lanes, E tail entries, P pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from alula.tree import AttentionInput, IntArray


@dataclass(frozen=True)
class Lanes:
    """What addressing needs to know of the sequences of one draft.

    page_table_BP: int32. first_B: the first slot of each sequence that the drafter may see.
    """

    page_table_BP: torch.Tensor
    first_B: IntArray
    page_size: int

    def of(self, lanes: list[int]) -> Lanes:
        """Some of the sequences."""
        return Lanes(self.page_table_BP[lanes], self.first_B[lanes], self.page_size)

    def committed(self, lane_T: IntArray, index_T: IntArray, slots_T: IntArray, lag: int) -> AttentionInput:
        """Rows in the logical slots `index_T` that see every slot up to their own; RoPE position index - lag."""
        no_tail_TE = np.zeros((len(lane_T), 1), np.int32)
        return self._address(lane_T, index_T - lag, slots_T, index_T + 1, no_tail_TE, 0)

    def speculative(
        self, lane_T: IntArray, prefix_T: IntArray, positions_T: IntArray, tail_TE: NDArray[np.int32]
    ) -> AttentionInput:
        """Draft nodes: each sees `prefix_T` committed slots, then its ancestors and itself, the slots of `tail_TE`."""
        return self._address(lane_T, positions_T, tail_TE[:, -1], prefix_T, tail_TE, tail_TE.shape[1])

    def _address(
        self,
        lane_T: IntArray,
        positions_T: IntArray,
        slots_T: NDArray[np.integer[Any]],
        prefix_T: IntArray,
        tail_TE: NDArray[np.int32],
        tail_len: int,
    ) -> AttentionInput:
        places_2T = np.empty((2, len(lane_T)), np.int64)
        places_2T[0], places_2T[1] = positions_T, slots_T
        keys_4T = np.empty((4, len(lane_T)), np.int32)
        keys_4T[0], keys_4T[1], keys_4T[2], keys_4T[3] = lane_T, prefix_T, tail_len, self.first_B[lane_T]
        return AttentionInput.packed(places_2T, keys_4T, tail_TE, self.page_table_BP, self.page_size)
