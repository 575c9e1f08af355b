"""Kernels over raw addresses; see csrc/module.cpp. Sizes in elements, strides in elements."""

GROUP: int

def levels() -> list[str]: ...
def release_threads() -> None: ...
def packed_bytes(format: str, in_features: int, out_features: int) -> int: ...
def advise_large_pages(begin: int, size: int) -> None: ...

class Where:
    def __init__(
        self,
        sequence: int,
        table: int,
        prefix: int,
        tail: int,
        tail_len: int,
        first: int,
        positions: int,
        slots: int,
        rows: int,
        sequences: int,
        pages: int,
        tail_width: int,
        page_size: int,
        keep: int,
        kept: int,
        /,
    ) -> None: ...
    @property
    def highest_slot(self) -> int: ...
    @property
    def highest_position(self) -> int: ...

class Level:
    def __init__(self, name: str, /) -> None: ...
    def pack(
        self, weight: int, bf16: bool, format: str, packed: int, in_features: int, out_features: int, threads: int, /
    ) -> None: ...
    def pack_blocks(
        self,
        numbers: int,
        scales: int,
        least: int,
        format: str,
        packed: int,
        in_features: int,
        out_features: int,
        threads: int,
        /,
    ) -> None: ...
    def norm(
        self,
        x: int,
        stride: int,
        bf16: bool,
        residual: int,
        residual_stride: int,
        weight: int,
        weight_bf16: bool,
        y: int,
        total: int,
        rows: int,
        width: int,
        eps: float,
        round_last: bool,
        threads: int,
        /,
    ) -> None: ...
    def gated(
        self, x: int, stride: int, bf16: bool, y: int, rows: int, width: int, gelu: bool, threads: int, /
    ) -> None: ...
    def rope(
        self,
        qkv: int,
        stride: int,
        bf16: bool,
        q: int,
        keys: int,
        values: int,
        kv_bf16: bool,
        held: int,
        cos: int,
        sin: int,
        positions: int,
        slots: int,
        query_norm: int,
        key_norm: int,
        norm_bf16: bool,
        eps: float,
        round_last: bool,
        rows: int,
        heads: int,
        groups: int,
        head_dim: int,
        threads: int,
        /,
    ) -> None: ...
    def attention(
        self,
        where: Where,
        q: int,
        y: int,
        bf16: bool,
        keys: int,
        values: int,
        kv_bf16: bool,
        held: int,
        heads: int,
        groups: int,
        head_dim: int,
        window: int,
        scale: float,
        softcap: float,
        threads: int,
        /,
    ) -> None: ...
    def softcap(
        self, x: int, stride: int, bf16: bool, y: int, rows: int, width: int, cap: float, threads: int, /
    ) -> None: ...
    def argmax(self, x: int, stride: int, rows: int, width: int, index: int, threads: int, /) -> None: ...
    def topk(
        self, x: int, stride: int, rows: int, width: int, k: int, values: int, index: int, threads: int, /
    ) -> None: ...
    def perturb(
        self, x: int, rows: int, width: int, temperature: int, key: int, ids: int, scale: float, threads: int, /
    ) -> None: ...
    def choose(
        self,
        x: int,
        stride: int,
        rows: int,
        width: int,
        temperature: int,
        top_k: int,
        top_p: int,
        min_p: int,
        key: int,
        index: int,
        threads: int,
        /,
    ) -> None: ...
    def logsumexp(self, x: int, stride: int, rows: int, width: int, y: int, threads: int, /) -> None: ...
    def softmax(self, x: int, stride: int, rows: int, width: int, y: int, logarithm: bool, threads: int, /) -> None: ...

class Trees:
    def __init__(self, roots: int, limits: int, floors: int, lanes: int, /) -> None: ...
    @property
    def size(self) -> int: ...
    @property
    def children(self) -> int: ...
    def frontier(self, y: int, /) -> None: ...
    def grow(self, tokens: int, logs: int, rows: int, width: int, /) -> None: ...
    def nodes(self, lane: int, /) -> int: ...
    def tree(self, lane: int, tokens_and_parents: int, scores: int, /) -> None: ...

class PackedLinear:
    def __init__(
        self,
        level: Level,
        weight: int,
        format: str,
        bias: int,
        in_features: int,
        out_features: int,
        out_bf16: bool,
        /,
    ) -> None: ...
    def multiply(self, x: int, stride: int, bf16: bool, rows: int, y: int, threads: int, /) -> None: ...

class Stack:
    def __init__(
        self,
        level: Level,
        bf16: bool,
        hidden: int,
        middle: int,
        heads: int,
        groups: int,
        head_dim: int,
        scale: float,
        softcap: float,
        eps: float,
        round_last: bool,
        gelu: bool,
        final_norm: int,
        norm_bf16: bool,
        /,
    ) -> None: ...
    def add(
        self,
        qkv: PackedLinear,
        output: PackedLinear,
        gate_up: PackedLinear,
        down: PackedLinear,
        input_norm: int,
        output_norm: int,
        mlp_norm: int,
        mlp_output_norm: int,
        query_norm: int,
        key_norm: int,
        head_norm_bf16: bool,
        head_eps: float,
        head_round_last: bool,
        cos: int,
        sin: int,
        window: int,
        /,
    ) -> None: ...
    def run(
        self,
        where: Where,
        residual: int,
        final: int,
        keys: list[int],
        values: list[int],
        kv_bf16: bool,
        held: int,
        positions: int,
        slots: int,
        taps: list[int],
        features: int,
        threads: int,
        /,
    ) -> None: ...

class Pair:
    def __init__(
        self,
        stack: Stack,
        embedding: int,
        vocabulary: int,
        state_norm: int,
        normed_residual: bool,
        positions: int,
        /,
    ) -> None: ...
    def run(
        self,
        kept_where: Where,
        tokens: int,
        states: int,
        final: int,
        keys: int,
        values: int,
        kv_bf16: bool,
        held: int,
        positions: int,
        slots: int,
        rows: int,
        keep: int,
        kept: int,
        threads: int,
        /,
    ) -> None: ...
