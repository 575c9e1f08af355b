"""EAGLE-3's layer in one call of the native set: the same steps, without Python between them, and the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from alula.kernels.checks import check_attention_width, check_layer, check_rows, check_same, check_slots
from alula.kernels.extension import _native
from alula.kernels.fused import Resolve, Widths
from alula.kernels.pair import PairLayer

if TYPE_CHECKING:
    from alula.cache.pool import KVLayer
    from alula.kernels.packed import NativeLinear
    from alula.tree import AttentionInput


class FusedPair:
    """A `PreparedPair`. All products are native ones, with results in the dtype of their weights.

    resolve: looks up where rows find their keys.
    """

    def __init__(
        self, level: _native.Level, pair: PairLayer, linears: Sequence[NativeLinear], resolve: Resolve
    ) -> None:
        layer, norms = pair.layer, [pair.embedding_norm_D, pair.state_norm_D, pair.layer.mlp_norm_D]
        norms += [] if pair.output_norm_D is None else [pair.output_norm_D]
        check_same("norms", norms)
        check_same("embedding", [pair.embedding_VD])
        self._pair, self._linears, self._resolve = pair, linears, resolve
        self._widths = widths = Widths.of(linears, layer.rope)
        stack = _native.Stack(
            level,
            widths.dtype == torch.bfloat16,
            widths.hidden,
            widths.middle,
            layer.heads,
            widths.groups,
            widths.head_dim,
            layer.scale,
            0.0,
            layer.eps,
            False,
            layer.activation == "gelu_tanh",
            0 if pair.output_norm_D is None else pair.output_norm_D.data_ptr(),
            norms[0].dtype == torch.bfloat16,
        )
        qkv, output, gate_up, down = linears
        stack.add(
            qkv.packed,
            output.packed,
            gate_up.packed,
            down.packed,
            pair.embedding_norm_D.data_ptr(),
            0,
            layer.mlp_norm_D.data_ptr(),
            0,
            0,
            0,
            False,
            0.0,
            False,
            layer.rope.cos_MK.data_ptr(),
            layer.rope.sin_MK.data_ptr(),
            0,
        )
        self._native = _native.Pair(
            stack,
            pair.embedding_VD.data_ptr(),
            len(pair.embedding_VD),
            pair.state_norm_D.data_ptr(),
            pair.normed_residual,
            len(layer.rope.cos_MK),
        )

    def run(
        self,
        tokens_T: torch.Tensor,
        states_TD: torch.Tensor,
        where: AttentionInput,
        cache: KVLayer,
        keep: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `PreparedPair`. Raises ValueError for a token, position or slot out of range."""
        self._check(tokens_T, states_TD, where, cache, keep)
        resolved = self._resolve(where, keep)
        check_slots(resolved.highest_slot, cache.slots)
        rows = tokens_T.shape[0]
        kept = rows if keep is None else keep.shape[0]
        final_RD = torch.empty((kept, self._widths.hidden), dtype=self._widths.dtype)
        if rows:
            self._native.run(
                resolved,
                tokens_T.data_ptr(),
                states_TD.data_ptr(),
                final_RD.data_ptr(),
                cache.keys.data_ptr(),
                cache.values.data_ptr(),
                cache.keys.dtype == torch.bfloat16,
                cache.slots,
                where.positions_T.data_ptr(),
                where.slots_T.data_ptr(),
                rows,
                0 if keep is None else keep.data_ptr(),
                kept,
                torch.get_num_threads(),
            )
        return final_RD

    def _check(
        self,
        tokens_T: torch.Tensor,
        states_TD: torch.Tensor,
        where: AttentionInput,
        cache: KVLayer,
        keep: torch.Tensor | None,
    ) -> None:
        widths = self._widths
        check_rows("states", states_TD, widths.hidden)
        if states_TD.dtype != widths.dtype or not states_TD.is_contiguous():
            raise ValueError(f"states are {states_TD.dtype} or strided: give contiguous {widths.dtype}")
        tokens, states, slots = tokens_T.shape[0], states_TD.shape[0], where.slots_T.shape[0]
        if not tokens == states == slots:
            raise ValueError(f"there are {tokens} tokens, {states} states and {slots} slots: give one of each per row")
        for name, numbers in (("tokens", tokens_T), ("keep", keep)):
            if numbers is not None and (numbers.dtype != torch.int64 or not numbers.is_contiguous()):
                raise ValueError(f"{name} are {numbers.dtype} or strided: give contiguous int64")
        check_layer(cache)
        check_attention_width(cache, widths.groups, widths.head_dim)
