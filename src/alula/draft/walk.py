"""Where the nodes of growing trees keep their draft-time keys and values.

A draft node is written in a scratch slot beyond the root's (logical slots L + 1, L + 2, ... in the order of their
expansion); what lies there is garbage after the draft. Suffixes: B lanes, F frontier rows, E depth.
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
        self.paths: list[tuple[int, ...]] = [()] * len(roots_B)
        """Tokens from the root's child down to each frontier row."""
        self._lanes, self._roots_B, self._lag = lanes, roots_B, lag
        self._free = [iter(slots.tolist()) for slots in scratch]
        self._tails_FE = np.zeros((len(roots_B), 0), np.int32)

    def descend(self, frontier: Frontier) -> AttentionInput:
        """Give each row of the next frontier a slot, and say what it sees."""
        self.depth += 1
        lane_F, origin_F = frontier.lane_F, frontier.origin_F
        own_F = np.array([next(self._free[lane]) for lane in lane_F.tolist()], np.int32)
        self._tails_FE = np.concatenate([self._tails_FE[origin_F], own_F[:, None]], 1)
        steps = zip(origin_F.tolist(), frontier.tokens_F.tolist(), strict=True)
        self.paths = [(*self.paths[origin], token) for origin, token in steps]
        roots_F = self._roots_B[lane_F]
        return self._lanes.speculative(lane_F, roots_F + 1, roots_F + (self.depth - self._lag), self._tails_FE)


def pick(states_TD: torch.Tensor, rows: IntArray) -> torch.Tensor:
    return states_TD[torch.from_numpy(rows).to(states_TD.device)]
