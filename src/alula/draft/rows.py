"""Addressing of a drafter's rows in the paged cache.

Suffixes: B sequences (lanes), T rows of all lanes, E tail entries, P pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from alula.tree import AttentionInput, IntArray


@dataclass(frozen=True)
class Lanes:
    """What addressing needs to know of the sequences of one draft.

    page_table_BP: int32. first_B: the first slot of each sequence that the drafter may see.
    """

    page_table_BP: torch.Tensor
    first_B: IntArray
    page_size: int

    def committed(self, lane_T: IntArray, index_T: IntArray, slots_T: IntArray, lag: int) -> AttentionInput:
        """Rows in the logical slots `index_T` that see every slot up to their own; RoPE position index - lag."""
        no_tail = torch.zeros((len(lane_T), 1), dtype=torch.int32, device=self.page_table_BP.device)
        return self._address(lane_T, index_T - lag, slots_T, index_T + 1, no_tail, 0)

    def speculative(
        self, lane_T: IntArray, prefix_T: IntArray, positions_T: IntArray, tail_TE: IntArray
    ) -> AttentionInput:
        """Draft nodes: each sees `prefix_T` committed slots, then its ancestors and itself, the slots of `tail_TE`."""
        tail = self._put(tail_TE, torch.int32)
        return self._address(lane_T, positions_T, tail_TE[:, -1], prefix_T, tail, tail_TE.shape[1])

    def _address(
        self,
        lane_T: IntArray,
        positions_T: IntArray,
        slots_T: IntArray,
        prefix_T: IntArray,
        tail_TE: torch.Tensor,
        tail_len: int,
    ) -> AttentionInput:
        int32 = torch.int32
        return AttentionInput(
            positions_T=self._put(positions_T, torch.int64),
            slots_T=self._put(slots_T, torch.int64),
            sequence_T=self._put(lane_T, int32),
            page_table_BP=self.page_table_BP,
            prefix_T=self._put(prefix_T, int32),
            tail_TE=tail_TE,
            tail_len_T=torch.full((len(lane_T),), tail_len, dtype=int32, device=self.page_table_BP.device),
            first_T=self._put(self.first_B[lane_T], int32),
            page_size=self.page_size,
        )

    def _put(self, values: IntArray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.page_table_BP.device, dtype)
