"""The candidates of growing trees, kept by native code: a few calls a level, whatever the number of nodes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from alula.kernels.extension import _native
from alula.tree import FloatArray, IntArray


class NativeCandidates:
    """Implements `protocol.Candidates`."""

    def __init__(self, roots_B: IntArray, limits_B3: IntArray, floors_B: NDArray[np.float64]) -> None:
        roots_B, limits_B3 = np.ascontiguousarray(roots_B, np.int64), np.ascontiguousarray(limits_B3, np.int64)
        floors_B = np.ascontiguousarray(floors_B, np.float64)
        if limits_B3.shape != (len(roots_B), 3):
            raise ValueError(f"limits have shape {limits_B3.shape}: give nodes, depth and branch for each root")
        if floors_B.shape != (len(roots_B),):
            raise ValueError(f"floors have shape {floors_B.shape}: give one for each root")
        self._lanes = len(roots_B)
        self._native = _native.Trees(roots_B.ctypes.data, limits_B3.ctypes.data, floors_B.ctypes.data, self._lanes)

    @property
    def children(self) -> int:
        return self._native.children

    def frontier(self) -> IntArray:
        rows_3F = np.empty((3, self._native.size), np.int64)
        self._native.frontier(rows_3F.ctypes.data)
        return rows_3F

    def grow(self, tokens_FK: IntArray, logs_FK: FloatArray) -> None:
        if tokens_FK.shape != logs_FK.shape:
            raise ValueError(f"tokens have shape {tokens_FK.shape} and logs {logs_FK.shape}: give one log per token")
        tokens_FK, logs_FK = np.ascontiguousarray(tokens_FK, np.int64), np.ascontiguousarray(logs_FK, np.float32)
        self._native.grow(tokens_FK.ctypes.data, logs_FK.ctypes.data, *tokens_FK.shape)

    def tree(self, lane: int) -> tuple[IntArray, IntArray, FloatArray]:
        if not 0 <= lane < self._lanes:
            raise ValueError(f"lane is {lane}: there are {self._lanes}")
        count = self._native.nodes(lane)
        nodes_2N, scores_N = np.empty((2, count), np.int64), np.empty(count, np.float32)
        self._native.tree(lane, nodes_2N.ctypes.data, scores_N.ctypes.data)
        return nodes_2N[0], nodes_2N[1], scores_N
