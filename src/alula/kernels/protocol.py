"""What every kernel set offers. All of it is row-invariant: see `Kernels`.

Shape suffixes: T packed rows, D hidden, I in features, O out features, H query heads, G kv heads, K head dim,
M positions of the RoPE table, R rows of logits, V vocabulary, F = (H + 2 G) K fused query, key and value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from alula.cache.pool import KVLayer
    from alula.kernels.blocks import BlockWeight
    from alula.kernels.pair import PairLayer, PreparedPair
    from alula.kernels.stack import PreparedStack, Stack
    from alula.tree import AttentionInput, FloatArray, IntArray

Activation = Literal["silu", "gelu_tanh"]
Numerics = dict[str, str | int | bool]
WeightFormat = Literal["int8", "file"]
"""int8: weights are rounded when they are prepared. file: the same, but for those that come as `BlockWeight`."""


class Linear(Protocol):
    """A weight prepared by one kernel set; only that set can use it."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Of the weight, as every product reads it."""
        ...


@dataclass(frozen=True)
class RopeTable:
    """Rotation angles of every position, built once: cos and sin, fp32, [M, K / 2] (HF's first half)."""

    cos_MK: torch.Tensor
    sin_MK: torch.Tensor


@dataclass(frozen=True)
class HeadNorm:
    """RMS norm of each query and key head before the rotation (Qwen3, Gemma3)."""

    query_K: torch.Tensor
    key_K: torch.Tensor
    eps: float
    round_last: bool = False


class Sampler(Protocol):
    """Noise for rows in host memory, in one pass. Keys and noise are those of `sampling.noise`."""

    def choose(
        self,
        rows_BV: FloatArray,
        temperatures_B: NDArray[np.float64],
        top_k_B: NDArray[np.int64],
        top_p_B: NDArray[np.float64],
        min_p_B: NDArray[np.float64],
        keys_B: NDArray[np.uint64],
    ) -> IntArray:
        """Ids [B] that rule `coupled` chooses, each row by its own parameters, as `sampling.distribution` defines it.

        rows_BV: shaped logits, fp32, the best of each row finite. Temperature 0 takes the largest logit; top-k 0 (or
        the whole vocabulary), top-p 1 and min-p 0 cut nothing. Masses are summed otherwise than in numpy, so the
        outcome may be another one where the mass of some first tokens is within about a millionth of a top-p bound.
        Raises ValueError for rows that are no contiguous fp32, keys that are no uint64 and other numbers of values.
        """
        ...

    def perturb(
        self,
        rows_RC: FloatArray,
        temperatures_R: FloatArray,
        scale: float,
        keys_R: NDArray[np.uint64],
        ids_C: IntArray,
    ) -> None:
        """(row / temperature + noise) / scale in place of each row, fp32; rows of temperature 0 stay as they are.

        The noise of a row is that of the ids under its key, rounded to fp32. Raises ValueError as `choose` does.
        """
        ...


class Candidates(Protocol):
    """The candidates of the trees of B lanes that grow by the rule of EAGLE-2, see `draft.expand.DynamicGrowth`."""

    @property
    def children(self) -> int:
        """The most children that a row of the frontier may get."""
        ...

    def frontier(self) -> IntArray:
        """Lane, row in the frontier before (of the roots: -1) and token of each row; [3, F], lanes in order."""
        ...

    def grow(self, tokens_FK: IntArray, logs_FK: FloatArray) -> None:
        """Children of each row of the frontier, best first, and their log scores; -inf marks one that is missing."""
        ...

    def tree(self, lane: int) -> tuple[IntArray, IntArray, FloatArray]:
        """Tokens, parents (of the root: -1) and scores of the kept nodes, parents first; each [N]."""
        ...


class Kernels(Protocol):
    """One kernel set.

    Row invariance: the result for a row depends, bit for bit, only on that row's own logical inputs, not on
    how many rows are beside it, its place among them, the slots its keys lie in, or the tree's layout. A
    set that cannot keep this says so in `row_invariant`; the sets here keep it by construction or by padding.

    Activations are fp32 or bf16 (the model dtype); products accumulate in fp32; logits are fp32. Inputs are
    contiguous in their last dimension. Ties are ordered by (value descending, index ascending). Wrong
    shapes, dtypes or devices raise ValueError. Results are new tensors; inputs stay as they are, except
    the cache in `rope_write`.
    """

    @property
    def name(self) -> str:
        """`torch` or `native`."""
        ...

    @property
    def row_invariant(self) -> bool: ...

    @property
    def weight_format(self) -> WeightFormat | None:
        """How weights are quantised; None where they stay as they are given."""
        ...

    @property
    def sampler(self) -> Sampler | None:
        """None where numpy's definition is all there is."""
        ...

    def candidates(self, roots_B: IntArray, limits_B3: IntArray, floors_B: NDArray[np.float64]) -> Candidates | None:
        """Those of trees at these roots; None where lists are all there is.

        limits_B3: nodes, depth, branch. floors_B: the least score of a node, -inf for none.
        """
        ...

    def describe(self) -> Numerics:
        """What fixes the bits of the results (set, dispatch level, linear path, threads, probe results)."""
        ...

    def release_threads(self) -> None:
        """End the threads that wait for the calling thread's next parallel work, before another thread takes over."""
        ...

    def prepare_linear(
        self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> Linear:
        """Pack a weight once. The weight (fp32 or bf16) may be freed after.

        out_dtype: dtype of the results; None is the weight's dtype. LM heads ask for fp32: the accumulated
        value, unrounded.
        """
        ...

    def prepare_blocks(
        self, weight: BlockWeight, bias_O: torch.Tensor | None = None, *, out_dtype: torch.dtype
    ) -> Linear:
        """Pack a weight that is quantised already, as it is. For `weight_format` file; other sets raise ValueError."""
        ...

    def prepare_stack(self, stack: Stack) -> PreparedStack:
        """All layers of a decoder, made of this set's linears, as it runs them best. Same bits as step by step."""
        ...

    def prepare_pair(self, pair: PairLayer) -> PreparedPair:
        """A draft head's layer, made of this set's linears, as it runs it best. Same bits as step by step."""
        ...

    def linear(self, x_TI: torch.Tensor, linear: Linear) -> torch.Tensor:
        """x W^T + b, [T, O]. x has the weight's dtype."""
        ...

    def rms_norm(
        self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, *, round_last: bool = False
    ) -> torch.Tensor:
        """RMS norm over the last dimension (Zhang and Sennrich, arXiv 1910.07467), [T, D] in x's dtype.

        The row is normalised in fp32. round_last False is Llama's way: round to x's dtype, multiply by the
        weight, round again. True is Gemma's: multiply by the weight in fp32 and round once; the
        weight is then the stored one plus 1, folded in by the loader. The weight may be fp32 or x's dtype.
        """
        ...

    def add_rms_norm(
        self,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor,
        weight_D: torch.Tensor,
        eps: float,
        *,
        round_last: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(s), s) with s = x + residual rounded to x's dtype."""
        ...

    def rope_write(
        self,
        qkv_TF: torch.Tensor,
        layer: KVLayer,
        where: AttentionInput,
        rope: RopeTable,
        *,
        heads: int,
        norm: HeadNorm | None = None,
    ) -> torch.Tensor:
        """Rotate queries and keys at `positions_T` and write keys and values to the cache at `slots_T`.

        qkv_TF: [T, (H + 2 G) K], all query heads, then key heads, then value heads. G and K are the layer's.
        Pairs are (i, i + K / 2), as in HF's rotate_half. Computed in fp32, rounded once to the cache
        dtype. `norm` is applied to the heads first. Returns the rotated queries, [T, H, K].
        """
        ...

    def gated(self, gate_up_TI: torch.Tensor, activation: Activation) -> torch.Tensor:
        """activation(gate) * up, where gate_up is [T, 2 I] with all gates first; [T, I].

        The activation is computed in fp32 and rounded to the dtype before the product, as HF does.
        """
        ...

    def attention(
        self,
        q_THK: torch.Tensor,
        layer: KVLayer,
        where: AttentionInput,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        """Softmax attention of each row over its own logical keys; [T, H, K] in q's dtype.

        Row t sees keys max(first_T[t], n - window) .. n - 1 with n = prefix_T[t] + tail_len_T[t]; window 0 means no
        window. softcap c > 0 turns a score s into c tanh(s / c). Query head h reads kv head
        h G // H. A row that sees no key gets zeros.
        """
        ...

    def softcap(self, x_RV: torch.Tensor, cap: float) -> torch.Tensor:
        """cap * tanh(x / cap) in x's dtype."""
        ...

    def argmax(self, x_RV: torch.Tensor) -> torch.Tensor:
        """Index of the largest value of each fp32 row, the lowest on ties; int64 [R]."""
        ...

    def topk(self, x_RV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The k largest values (fp32) of each fp32 row and their indices (int64), both [R, k], in tie order."""
        ...

    def logsumexp(self, x_RV: torch.Tensor) -> torch.Tensor:
        """log of the sum of exp over each fp32 row, [R]; -inf entries count nothing."""
        ...

    def softmax(self, x_RV: torch.Tensor) -> torch.Tensor:
        """Probabilities of each fp32 row, [R, V]; a row of nothing but -inf gives zeros."""
        ...

    def log_softmax(self, x_RV: torch.Tensor) -> torch.Tensor:
        """Logarithm of `softmax` of each fp32 row, [R, V]; -inf stays -inf."""
        ...
