"""Draft trees, and how one forward pass addresses the paged cache.

Shape suffixes: B sequences, N nodes of one tree, T packed rows, P pages, E longest tail.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from alula.config import check_floor

if TYPE_CHECKING:
    import torch

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]


@dataclass(frozen=True)
class TreeShape:
    """Limits of one draft tree."""

    nodes: int = 4
    """Nodes with the root, so the number of rows verified."""
    depth: int = 2
    """Levels below the root; 0 drafts nothing."""
    branch: int = 3
    """Children tried per node."""
    floor: float = 0.0
    """Least probability that the drafter gives the whole path to a node of a dynamic tree; 0 is none."""

    def __post_init__(self) -> None:
        for name in ("nodes", "depth", "branch"):
            value = getattr(self, name)
            least = 0 if name == "depth" else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}: give a whole number of at least {least}")
        check_floor("floor", self.floor)

    @property
    def is_root_only(self) -> bool:
        return self.nodes == 1 or self.depth == 0

    @property
    def log_floor(self) -> float:
        """The least score of a node. As exact as scores are, or a token of just this probability might fall below."""
        return float(np.float32(math.log(self.floor))) if self.floor else -math.inf

    def report(self) -> dict[str, float]:
        """As plain JSON values. Without a floor where there is none: figures from before it stay comparable."""
        limits: dict[str, float] = {"nodes": self.nodes, "depth": self.depth, "branch": self.branch}
        return limits | ({"floor": self.floor} if self.floor else {})


ROOT_ONLY = TreeShape(nodes=1, depth=0, branch=1)


@dataclass(frozen=True)
class DraftTree:
    """Draft tokens with parents. Node 0 is the root: the last committed token, whose KV is not computed yet.

    Parents come before their children (`parents_N[i] < i`, `parents_N[0] == -1`), and the children of a node
    are in the order in which they are to be tried.

    scores_N: cumulative node scores, 0 for the root, never positive.
    sampled: True when children were drawn at random from `proposals`, False for a point-mass proposal.
    proposals: node -> probabilities (torch, fp32, target vocabulary [V]) its children were drawn from,
        without replacement; only for nodes with sampled children.
    """

    tokens_N: IntArray
    parents_N: IntArray
    scores_N: FloatArray
    sampled: bool = False
    proposals: dict[int, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def root_only(cls, token: int) -> DraftTree:
        return cls(np.array([token]), np.array([-1]), np.zeros(1, np.float32))

    def __len__(self) -> int:
        return len(self.tokens_N)

    @cached_property
    def depths_N(self) -> IntArray:
        """Depth of each node, 0 for the root."""
        depths = [0]
        for parent in self.parents_N[1:].tolist():  # plain lists: a tree is too small for arrays to pay
            depths.append(depths[parent] + 1)
        return np.array(depths, np.int64)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Per node, its children in trial order."""
        found: list[list[int]] = [[] for _ in range(len(self))]
        for node, parent in enumerate(self.parents_N[1:].tolist(), start=1):
            found[parent].append(node)
        return tuple(tuple(nodes) for nodes in found)

    @cached_property
    def tails_NE(self) -> IntArray:
        """Nodes from the root to each node itself, padded with -1 to the deepest path."""
        tails = [[0]]
        for node, parent in enumerate(self.parents_N[1:].tolist(), start=1):
            tails.append([*tails[parent], node])
        deepest = max(map(len, tails))
        return np.array([tail + [-1] * (deepest - len(tail)) for tail in tails], np.int64)

    def path(self, node: int) -> list[int]:
        """Nodes from the root's child down to `node`."""
        tail = self.tails_NE[node]
        return [int(n) for n in tail[1:] if n >= 0]

    def mask_NN(self) -> NDArray[np.bool_]:
        """Row sees column: ancestors and itself (for tests and dense references)."""
        mask = np.zeros((len(self), len(self)), np.bool_)
        for node, tail in enumerate(self.tails_NE):
            mask[node, tail[tail >= 0]] = True
        return mask


@dataclass(frozen=True)
class AttentionInput:
    """Where each packed row reads and writes keys, in logical order.

    Row t belongs to line `sequence_T[t]` of the page table. Its logical keys are numbered 0, 1, 2, ...:
    key i < prefix_T[t] lies in slot `page_table_BP[b, i // page_size] * page_size + i % page_size`; key
    prefix_T[t] + e lies in slot `tail_TE[t, e]` for e < tail_len_T[t]. Keys below `first_T[t]` are masked.
    The row itself is its own last key. K and V of all rows are written before any is read.

    positions_T (int64): RoPE positions. slots_T (int64): the slot of each row's own K and V. The others are
    int32. Sliding windows and block boundaries are anchored at the logical key number.
    """

    positions_T: torch.Tensor
    slots_T: torch.Tensor
    sequence_T: torch.Tensor
    page_table_BP: torch.Tensor
    prefix_T: torch.Tensor
    tail_TE: torch.Tensor
    tail_len_T: torch.Tensor
    first_T: torch.Tensor
    page_size: int

    @classmethod
    def packed(
        cls,
        places_2T: IntArray,
        keys_4T: NDArray[np.int32],
        tail_TE: NDArray[np.int32],
        page_table_BP: torch.Tensor,
        page_size: int,
    ) -> AttentionInput:
        """From arrays, on the device of the page table, in few calls: a step's rows are few, and calls cost most.

        places_2T: positions and slots. keys_4T: sequence, prefix, tail length and first key.
        """
        import torch

        device = page_table_BP.device
        positions_T, slots_T = torch.from_numpy(places_2T).to(device).unbind()
        sequence_T, prefix_T, tail_len_T, first_T = torch.from_numpy(keys_4T).to(device).unbind()
        return cls(
            positions_T=positions_T,
            slots_T=slots_T,
            sequence_T=sequence_T,
            page_table_BP=page_table_BP,
            prefix_T=prefix_T,
            tail_TE=torch.from_numpy(tail_TE).to(device),
            tail_len_T=tail_len_T,
            first_T=first_T,
            page_size=page_size,
        )

    def rows(self, keep: torch.Tensor) -> AttentionInput:
        """The same addressing for some of the rows. keep: int64, their numbers."""
        return replace(
            self,
            positions_T=self.positions_T[keep],
            slots_T=self.slots_T[keep],
            sequence_T=self.sequence_T[keep],
            prefix_T=self.prefix_T[keep],
            tail_TE=self.tail_TE[keep],
            tail_len_T=self.tail_len_T[keep],
            first_T=self.first_T[keep],
        )
