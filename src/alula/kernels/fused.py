"""All layers of a decoder in one call of the native set: the same steps, without Python between them.

Between steps the threads stay together, so nothing is woken or put to sleep. The bits are those of the single steps.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from alula.kernels.checks import check_attention_width, check_layer, check_rows, check_same, check_slots
from alula.kernels.extension import _native
from alula.kernels.stack import Hidden, Layer, Stack

if TYPE_CHECKING:
    from alula.cache.pool import KVLayer
    from alula.kernels.packed import NativeLinear
    from alula.kernels.protocol import RopeTable
    from alula.tree import AttentionInput

Resolve = Callable[["AttentionInput", "torch.Tensor | None"], _native.Where]


@dataclass(frozen=True)
class Widths:
    """Sizes of a decoder layer, as its products have them. `middle`: inside the MLP."""

    dtype: torch.dtype
    hidden: int
    middle: int
    groups: int
    head_dim: int

    @classmethod
    def of(cls, linears: Sequence[NativeLinear], rope: RopeTable) -> Widths:
        """linears: qkv, output, gate_up, down."""
        qkv, output, _, down = linears
        head_dim = 2 * rope.cos_MK.shape[1]
        groups = (qkv.out_features - output.in_features) // (2 * head_dim)
        return cls(qkv.out_dtype, down.out_features, down.in_features, groups, head_dim)


@dataclass(frozen=True)
class Caches:
    """The cache of every layer, once it has been checked: addresses, slots and dtype. Does not keep it alive."""

    layers: tuple[weakref.ref[KVLayer], ...]
    keys: list[int]
    values: list[int]
    slots: int
    bf16: bool

    @classmethod
    def of(cls, layers: Sequence[KVLayer], widths: Widths) -> Caches:
        """Raises ValueError for layers that differ, are strided, or do not have the widths."""
        for cache in layers:
            check_layer(cache)
            check_attention_width(cache, widths.groups, widths.head_dim)
            if cache.keys.dtype != layers[0].keys.dtype or cache.slots != layers[0].slots:
                raise ValueError("caches have several dtypes or sizes: give one")
        keys, values = ([getattr(layer, part).data_ptr() for layer in layers] for part in ("keys", "values"))
        known = tuple(weakref.ref(layer) for layer in layers)
        return cls(known, keys, values, layers[0].slots, layers[0].keys.dtype == torch.bfloat16)

    def are(self, layers: Sequence[KVLayer]) -> bool:
        """Whether these are the layers that were checked."""
        return len(layers) == len(self.layers) and all(map(operator.is_, (ref() for ref in self.layers), layers))


class FusedStack:
    """A `PreparedStack`. All products are native ones, with results in the dtype of their weights.

    resolve: looks up where rows find their keys, once per forward.
    """

    def __init__(
        self, level: _native.Level, stack: Stack, linears: Sequence[Sequence[NativeLinear]], resolve: Resolve
    ) -> None:
        self._stack, self._linears, self._resolve = stack, linears, resolve
        self._widths = Widths.of(linears[0], stack.layers[0].rope)
        self._positions = min(len(layer.rope.cos_MK) for layer in stack.layers)
        self._norms = [weight for layer in stack.layers for weight in _norms(layer)] + [stack.final_norm_D]
        self._caches: Caches | None = None
        check_same("norms", [weight for weight in self._norms if weight is not None])
        self._native = _native.Stack(
            level,
            self._widths.dtype == torch.bfloat16,
            self._widths.hidden,
            self._widths.middle,
            stack.heads,
            self._widths.groups,
            self._widths.head_dim,
            stack.scale,
            stack.softcap,
            stack.eps,
            stack.round_last,
            stack.activation == "gelu_tanh",
            stack.final_norm_D.data_ptr(),
            stack.final_norm_D.dtype == torch.bfloat16,
        )
        for layer, weights in zip(stack.layers, linears, strict=True):
            self._add(layer, weights)

    def _add(self, layer: Layer, weights: Sequence[NativeLinear]) -> None:
        norm = layer.head_norm
        query, key = (None, None) if norm is None else (norm.query_K, norm.key_K)
        qkv, output, gate_up, down = weights
        self._native.add(
            qkv.packed,
            output.packed,
            gate_up.packed,
            down.packed,
            layer.input_norm_D.data_ptr(),
            _address(layer.output_norm_D),
            layer.mlp_norm_D.data_ptr(),
            _address(layer.mlp_output_norm_D),
            _address(query),
            _address(key),
            query is not None and query.dtype == torch.bfloat16,
            0.0 if norm is None else norm.eps,
            norm is not None and norm.round_last,
            layer.rope.cos_MK.data_ptr(),
            layer.rope.sin_MK.data_ptr(),
            layer.window,
        )

    def run(
        self, embedded_TD: torch.Tensor, where: AttentionInput, caches: Sequence[KVLayer], taps: Sequence[int]
    ) -> Hidden:
        """See `PreparedStack`."""
        resolved = self._resolve(where, None)
        self._check(embedded_TD, where, resolved)
        cache = self._checked(caches)
        check_slots(resolved.highest_slot, cache.slots)
        rows = embedded_TD.shape[0]
        residual_TD = embedded_TD.clone(memory_format=torch.contiguous_format)
        final_TD = torch.empty_like(residual_TD)
        features_TF = torch.empty((rows, len(taps) * self._widths.hidden), dtype=self._widths.dtype) if taps else None
        if rows:
            self._native.run(
                resolved,
                residual_TD.data_ptr(),
                final_TD.data_ptr(),
                cache.keys,
                cache.values,
                cache.bf16,
                cache.slots,
                where.positions_T.data_ptr(),
                where.slots_T.data_ptr(),
                list(taps),
                _address(features_TF),
                torch.get_num_threads(),
            )
        return Hidden(final_TD, features_TF)

    def _check(self, embedded_TD: torch.Tensor, where: AttentionInput, resolved: _native.Where) -> None:
        check_rows("embedded", embedded_TD, self._widths.hidden)
        rows, wanted = embedded_TD.shape[0], where.prefix_T.shape[0]
        if embedded_TD.dtype != self._widths.dtype or rows != wanted:
            raise ValueError(
                f"embedded is {embedded_TD.dtype} with {rows} rows: give {self._widths.dtype} and {wanted} rows, one "
                "for each of the attention input"
            )
        if resolved.highest_position >= self._positions:
            raise ValueError(f"position {resolved.highest_position} is past the rope table: build it longer")

    def _checked(self, layers: Sequence[KVLayer]) -> Caches:
        """Checked once for as long as the same cache comes."""
        if self._caches is None or not self._caches.are(layers):
            if len(layers) != len(self._stack.layers):
                raise ValueError(
                    f"caches has {len(layers)} layers: give {len(self._stack.layers)}, one per decoder layer"
                )
            self._caches = Caches.of(layers, self._widths)
        return self._caches


def _norms(layer: Layer) -> tuple[torch.Tensor | None, ...]:
    return layer.input_norm_D, layer.output_norm_D, layer.mlp_norm_D, layer.mlp_output_norm_D


def _address(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
