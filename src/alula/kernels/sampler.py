"""Gumbel noise, and the choice it makes, by the native kernels: the definition is that of `sampling.noise`."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from alula.kernels import _native
from alula.tree import FloatArray, IntArray


class NativeSampler:
    """Implements `protocol.Sampler`; bit for bit the numbers of numpy's."""

    def __init__(self, level: _native.Level) -> None:
        self._level = level

    def noisy_argmax(
        self, rows_BV: FloatArray, temperatures_B: NDArray[np.float64], keys_B: NDArray[np.uint64]
    ) -> IntArray:
        if rows_BV.dtype != np.float32 or not rows_BV.flags.c_contiguous:
            raise ValueError(f"rows are {rows_BV.dtype} or strided: give contiguous float32")
        rows, width = rows_BV.shape
        if not len(temperatures_B) == len(keys_B) == rows:
            raise ValueError(f"{rows} rows have {len(temperatures_B)} temperatures and {len(keys_B)} keys: one of each")
        temperatures_B, keys_B = np.ascontiguousarray(temperatures_B, np.float64), _words(keys_B)
        chosen_B = np.empty(rows, np.int64)
        addresses = (temperatures_B.ctypes.data, keys_B.ctypes.data, chosen_B.ctypes.data)
        self._level.noisy_argmax(rows_BV.ctypes.data, width, rows, width, *addresses, torch.get_num_threads())
        return chosen_B

    def gumbel(self, keys_U: NDArray[np.uint64], ids_C: IntArray) -> FloatArray:
        keys_U, ids_C = _words(keys_U), np.ascontiguousarray(ids_C, np.int64)
        noise_UC = np.empty((len(keys_U), len(ids_C)), np.float32)
        counts = (keys_U.ctypes.data, len(keys_U), ids_C.ctypes.data, len(ids_C))
        self._level.gumbel(*counts, noise_UC.ctypes.data, torch.get_num_threads())
        return noise_UC


def _words(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    if keys.dtype != np.uint64:
        raise ValueError(f"keys are {keys.dtype}: give uint64, as row_keys makes them")
    return np.ascontiguousarray(keys)
