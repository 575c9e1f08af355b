"""Noise and choices by the native kernels, as `sampling.noise` and `sampling.distribution` define them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from alula.kernels.extension import _native
from alula.tree import FloatArray, IntArray


class NativeSampler:
    """Implements `protocol.Sampler`. The noise is numpy's bit for bit; of choices, see there."""

    def __init__(self, level: _native.Level) -> None:
        self._level = level

    def choose(
        self,
        rows_BV: FloatArray,
        temperatures_B: NDArray[np.float64],
        top_k_B: NDArray[np.int64],
        top_p_B: NDArray[np.float64],
        min_p_B: NDArray[np.float64],
        keys_B: NDArray[np.uint64],
    ) -> IntArray:
        _check_rows(rows_BV)
        rows, width = rows_BV.shape
        doubles = [np.ascontiguousarray(values_B, np.float64) for values_B in (temperatures_B, top_p_B, min_p_B)]
        temperatures_B, top_p_B, min_p_B = doubles
        top_k_B, keys_B = np.ascontiguousarray(top_k_B, np.int64), _words(keys_B)
        columns = (temperatures_B, top_k_B, top_p_B, min_p_B, keys_B)
        if any(len(values_B) != rows for values_B in columns):
            counts = ", ".join(str(len(values_B)) for values_B in columns)
            raise ValueError(f"{rows} rows have {counts} temperatures, top-k, top-p, min-p and keys: give one of each")
        chosen_B = np.empty(rows, np.int64)
        where = (rows_BV.ctypes.data, width, rows, width)
        temperature, top_k, top_p, min_p, key = [values_B.ctypes.data for values_B in columns]
        results = (chosen_B.ctypes.data, torch.get_num_threads())
        self._level.choose(*where, temperature, top_k, top_p, min_p, key, *results)
        return chosen_B

    def perturb(
        self,
        rows_RC: FloatArray,
        temperatures_R: FloatArray,
        scale: float,
        keys_R: NDArray[np.uint64],
        ids_C: IntArray,
    ) -> None:
        _check_rows(rows_RC)
        rows, width = rows_RC.shape
        temperatures_R, ids_C = np.ascontiguousarray(temperatures_R, np.float32), np.ascontiguousarray(ids_C, np.int64)
        keys_R = _words(keys_R)
        if not len(temperatures_R) == len(keys_R) == rows or len(ids_C) != width:
            raise ValueError(
                f"{rows} rows of {width} have {len(temperatures_R)} temperatures, {len(keys_R)} keys and {len(ids_C)} "
                "ids: give one of each"
            )
        columns = (temperatures_R.ctypes.data, keys_R.ctypes.data, ids_C.ctypes.data)
        self._level.perturb(rows_RC.ctypes.data, rows, width, *columns, scale, torch.get_num_threads())


def _check_rows(rows: FloatArray) -> None:
    if rows.dtype != np.float32 or not rows.flags.c_contiguous:
        raise ValueError(f"rows are {rows.dtype} or strided: give contiguous float32")


def _words(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    if keys.dtype != np.uint64:
        raise ValueError(f"keys are {keys.dtype}: give uint64, as row_keys makes them")
    return np.ascontiguousarray(keys)
