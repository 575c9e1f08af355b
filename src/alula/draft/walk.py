"""Where the nodes of growing trees keep their draft-time keys and values.

A draft node is written in a scratch slot beyond the root's (logical slots L + 1, L + 2, ... in the order of their
expansion); what lies there is garbage after the draft. Suffixes: B lanes, F frontier rows, E depth, S scratch slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from alula.draft.expand import Frontier
from alula.draft.rows import Lanes
from alula.tree import AttentionInput, IntArray


class Walk:
    """The frontiers of all growing sequences on their way down, level by level.

    roots_B: logical slot of each root. scratch: pool slots each lane may use. lag: how far RoPE positions lag behind
    token positions.
    """

    def __init__(self, lanes: Lanes, roots_B: IntArray, scratch: Sequence[IntArray], lag: int) -> None:
        self.depth = 0
        self._lanes, self._roots_B, self._lag = lanes, roots_B, lag
        self._scratch_BS = np.zeros((len(scratch), max((len(slots) for slots in scratch), default=0)), np.int64)
        for row, slots in zip(self._scratch_BS, scratch, strict=True):
            row[: len(slots)] = slots
        self._used_B = np.zeros(len(roots_B), np.int64)
        self._tails_FE = np.zeros((len(roots_B), 0), np.int64)
        self.paths_FE = np.zeros((len(roots_B), 0), np.int64)
        """Tokens from the root's child down to each frontier row."""

    def descend(self, frontier: Frontier) -> AttentionInput:
        """Give each row of the next frontier a slot, and say what it sees."""
        self.depth += 1
        lane_F, origin_F = frontier.lane_F, frontier.origin_F
        rank_F = np.arange(len(lane_F)) - np.searchsorted(lane_F, lane_F)
        own_F = self._scratch_BS[lane_F, self._used_B[lane_F] + rank_F]
        self._used_B += np.bincount(lane_F, minlength=len(self._used_B))
        self._tails_FE = np.column_stack([self._tails_FE[origin_F], own_F])
        self.paths_FE = np.column_stack([self.paths_FE[origin_F], frontier.tokens_F])
        roots_F = self._roots_B[lane_F]
        return self._lanes.speculative(lane_F, roots_F + 1, roots_F + (self.depth - self._lag), self._tails_FE)


def pick(states_TD: torch.Tensor, rows: IntArray) -> torch.Tensor:
    return states_TD[torch.from_numpy(rows).to(states_TD.device)]
