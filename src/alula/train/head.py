"""The trainable EAGLE-3 head and its training-time test (Li et al., EAGLE-3, arXiv 2503.01840, section 3).

The module's parameter names are those of the official checkpoints. Training-time test: step 0 sees the target's
features; every later step sees the head's own output instead, with the true tokens, so that the head learns to
live on what it will be fed in service. A *chain* is one such run: it starts at the pair (f_p, t_{p+1}), and its
step i predicts t_{p+2+i}. At step i it sees the step-0 keys up to p and its own keys of steps 1..i, exactly what
a draft path sees in service, and has RoPE position p + i. Chains are independent of each other, so any subset of
them may be continued.

Shapes: B texts, S entries (pairs) of a text, A chains of a text, D hidden, F = taps x target hidden, H heads,
G kv heads, R = H / G, K head dim, C draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alula.config import AlulaError


@dataclass(frozen=True)
class HeadConfig:
    """Sizes of an EAGLE head."""

    hidden_size: int
    """D; also the target's hidden size."""
    intermediate_size: int
    """Width of the MLP."""
    heads: int
    """H, query heads."""
    kv_heads: int
    """G, key and value heads; divides H."""
    head_dim: int
    """K, even."""
    vocab_size: int
    """V, the target's vocabulary."""
    draft_vocab_size: int
    """C, the head's own vocabulary."""
    taps: tuple[int, ...]
    """Target layers whose inputs are the features; -1 is the LM head's input, which EAGLE-1 reads."""
    rope_theta: float = 10000.0
    """Base of the rotary embedding; not the target's."""
    rms_norm_eps: float = 1e-5
    """Added to the mean square in every norm."""
    max_position_embeddings: int = 8192
    """Written to config.json; training uses positions up to the longest text only."""
    fc_norm: bool = False
    """A norm per tap before ``fc`` (EAGLE-3.1)."""
    norm_output: bool = False
    """The state fed back is the output of the final norm, not what goes into it (EAGLE-3.1)."""

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise AlulaError("head sizes: heads must be a multiple of kv_heads, and head_dim even")


class RMSNorm(nn.Module):
    """Root-mean-square norm with a weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension, in the weight's numbers whatever the products before it were made in."""
        return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """The projections of rows ``width`` wide; what attends to what is the training-time test's affair."""

    def __init__(self, config: HeadConfig, width: int) -> None:
        super().__init__()
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(width, queries, bias=False)
        self.k_proj = nn.Linear(width, keys, bias=False)
        self.v_proj = nn.Linear(width, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)


class MLP(nn.Module):
    """Gated MLP with SiLU."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """down(silu(gate x) * up x)."""
        down: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class Layer(nn.Module):
    """A decoder layer from its normed input on."""

    def __init__(self, config: HeadConfig, width: int) -> None:
        super().__init__()
        self.add_norms(config)
        self.self_attn = Attention(config, width)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def add_norms(self, config: HeadConfig) -> None:
        """Norms on the way in come first: optimiser states in checkpoints go by the order of the parameters."""

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Output projection, residuals and MLP."""
        hidden = residual + self.self_attn.o_proj(attended)
        result: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return result


class MidLayer(Layer):
    """The one decoder layer of EAGLE-3; its attention reads [embedding; hidden]."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config, 2 * config.hidden_size)

    def add_norms(self, config: HeadConfig) -> None:
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def combined(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """[normed embedding; normed hidden], 2D wide."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)


class ChainHead(Protocol):
    """A head of one decoder layer, as far as the training-time test runs it."""

    config: HeadConfig

    @property
    def attention(self) -> Attention: ...

    def fuse(self, features: Tensor) -> Tensor:
        """The state that stands for a true feature."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Rows of the frozen embedding, one more dimension at the end."""

    def enter(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(what attention reads, the residual beside it) of pairs of embedding and state."""

    def leave(self, residual: Tensor, attended: Tensor) -> Tensor:
        """The state that is fed back."""

    def readout(self, state: Tensor) -> Tensor:
        """The LM head's input."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Of LM-head inputs."""


class Eagle3Head(nn.Module):
    """fc on the taps, one layer, a norm and its own LM head. ``embedding_VD`` is the target's and never trained."""

    def __init__(self, config: HeadConfig, embedding_VD: Tensor) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.taps) * config.hidden_size, config.hidden_size, bias=False)
        norms = [RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in config.taps if config.fc_norm]
        self.fc_norm = nn.ModuleList(norms)
        self.midlayer = MidLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.embedding_VD: Tensor
        self.register_buffer("embedding_VD", embedding_VD.detach(), persistent=False)
        self.tap_scale_F: Tensor
        self.register_buffer("tap_scale_F", torch.ones(self.fc.in_features))

    def fuse(self, features: Tensor) -> Tensor:
        """fc on the taps, each divided by its size.

        Raw taps grow with depth to twenty times unit size. An optimiser that moves every weight by the same amount
        would throw the fused feature about; so ``fc`` is trained on scaled taps, and the scale is folded in on export.
        """
        fused: Tensor = self.fc(self.normed(features) / self.tap_scale_F)
        return fused

    def normed(self, features: Tensor) -> Tensor:
        """The taps, each normed where the head does so."""
        if not self.config.fc_norm:
            return features
        taps = torch.split(features, self.config.hidden_size, -1)
        return torch.cat([norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)], -1)

    def official_weights(self) -> dict[str, Tensor]:
        """The tensors of the official layout, the taps' scale folded into ``fc``."""
        weights = {name: tensor for name, tensor in self.state_dict().items() if name != "tap_scale_F"}
        return weights | {"fc.weight": self.fc.weight.detach() / self.tap_scale_F}

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.embedding_VD)

    @property
    def attention(self) -> Attention:
        return self.midlayer.self_attn

    def enter(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.midlayer.combined(embedded, hidden), hidden

    def leave(self, residual: Tensor, attended: Tensor) -> Tensor:
        output = self.midlayer.finish(residual, attended)
        return self.norm(output) if self.config.norm_output else output

    def readout(self, state: Tensor) -> Tensor:
        return state if self.config.norm_output else self.norm(state)

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        return logits


def rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate ``x`` [..., heads, K] by ``positions`` [...] (halves convention)."""
    half = x.shape[-1] // 2
    inverse = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = positions[..., None, None].float() * inverse
    cos, sin = angles.cos(), angles.sin()
    low, high = x[..., :half], x[..., half:]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


@dataclass(frozen=True)
class Chains:
    """What the head is trained on in one batch."""

    tokens_BS: Tensor
    """int64: advanced token t_{p+1} of entry p, padded with anything."""
    features_BSF: Tensor
    """fp32: f_p of entry p."""
    starts_BA: Tensor
    """int64: entry p at which each chain starts, padded with 0."""


@dataclass(frozen=True)
class UnrolledStep:
    """Outputs of one step for the chains that were continued to it."""

    hidden_BAD: Tensor
    """States that would be fed back."""
    columns_A: Tensor
    """int64: which chains (columns of ``starts_BA``) these are."""


def unroll(head: ChainHead, chains: Chains, *, steps: int, kept_A: Tensor | None = None) -> list[UnrolledStep]:
    """Run the training-time test; only the chains ``kept_A`` (all by default) are continued beyond step 0."""
    memory = Memory(head, chains)
    hidden_BAD = memory.first()
    every_A = torch.arange(chains.starts_BA.shape[1], device=hidden_BAD.device)
    results = [UnrolledStep(hidden_BAD, every_A)]
    kept_A = every_A if kept_A is None else kept_A
    memory.keep(kept_A)
    hidden_BAD = hidden_BAD[:, kept_A]
    for step in range(1, steps):
        hidden_BAD = memory.step(hidden_BAD, step)
        results.append(UnrolledStep(hidden_BAD, kept_A))
    return results


def first_attention(head: ChainHead, chains: Chains) -> Tensor:
    """What attention gathers at step 0, before the output projection: [B, A, H x K]."""
    memory = Memory(head, chains)
    return memory.attend(_take(memory.entered_BSE, chains.starts_BA), chains.starts_BA)


class Memory:
    """Keys and values of a batch: step 0 for all entries, later steps per chain."""

    def __init__(self, head: ChainHead, chains: Chains) -> None:
        self.head, self.tokens_BS, self.starts_BA = head, chains.tokens_BS, chains.starts_BA
        self.entered_BSE, self.residual_BSD = head.enter(head.embed(chains.tokens_BS), head.fuse(chains.features_BSF))
        entries_S = torch.arange(chains.tokens_BS.shape[1], device=chains.tokens_BS.device)
        self.entries_S = entries_S
        self.keys_BGSK = self._key(self.entered_BSE, entries_S.expand_as(chains.tokens_BS)).transpose(1, 2)
        self.values_BGSK = self._value(self.entered_BSE).transpose(1, 2)
        self.later: list[tuple[Tensor, Tensor]] = []

    def first(self) -> Tensor:
        """Step 0 of every chain, on true features: the new states."""
        residual_BAD, entered_BAE = (_take(x, self.starts_BA) for x in (self.residual_BSD, self.entered_BSE))
        return self.head.leave(residual_BAD, self.attend(entered_BAE, self.starts_BA))

    def keep(self, columns_A: Tensor) -> None:
        """Go on with these chains only; one that is named twice becomes two."""
        self.starts_BA = self.starts_BA[:, columns_A]
        self.later = [(key_BAGK[:, columns_A], value_BAGK[:, columns_A]) for key_BAGK, value_BAGK in self.later]

    def step(self, hidden_BAD: Tensor, step: int, tokens_BA: Tensor | None = None) -> Tensor:
        """A later step of every chain: the new states. ``tokens_BA``: other tokens than the text's."""
        if tokens_BA is None:
            tokens_BA = self.tokens_BS.gather(1, (self.starts_BA + step).clamp(max=self.tokens_BS.shape[1] - 1))
        entered_BAE, residual_BAD = self.head.enter(self.head.embed(tokens_BA), hidden_BAD)
        self.later.append((self._key(entered_BAE, self.starts_BA + step), self._value(entered_BAE)))
        return self.head.leave(residual_BAD, self.attend(entered_BAE, self.starts_BA + step))

    def attend(self, entered_BAE: Tensor, positions_BA: Tensor) -> Tensor:
        """Mixed values of all heads [B, A, H x K], before the output projection."""
        query_BAHK = self._split(self.head.attention.q_proj(entered_BAE), self.head.config.heads)
        return self._mix(rope(query_BAHK, positions_BA, self.head.config.rope_theta))

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:-1], heads, self.head.config.head_dim)

    def _key(self, combined: Tensor, positions: Tensor) -> Tensor:
        key = self._split(self.head.attention.k_proj(combined), self.head.config.kv_heads)
        return rope(key, positions, self.head.config.rope_theta)

    def _value(self, combined: Tensor) -> Tensor:
        return self._split(self.head.attention.v_proj(combined), self.head.config.kv_heads)

    def _mix(self, query_BAHK: Tensor) -> Tensor:
        """Attention over step-0 entries up to each chain's start and over the chain's own later entries."""
        batch, count = query_BAHK.shape[:2]
        groups, width = self.head.config.kv_heads, self.head.config.head_dim
        query_BGRAK = query_BAHK.view(batch, count, groups, -1, width).permute(0, 2, 3, 1, 4) * width**-0.5
        rows_BGXK = query_BGRAK.reshape(batch, groups, -1, width)
        first = (rows_BGXK @ self.keys_BGSK.transpose(2, 3)).view(batch, groups, -1, count, len(self.entries_S))
        hidden_BAS = self.entries_S > self.starts_BA[..., None]
        first = first.masked_fill(hidden_BAS[:, None, None], float("-inf"))
        own = [(query_BGRAK * _per_chain(key)).sum(-1, keepdim=True) for key, _ in self.later]
        weights = torch.cat([first, *own], -1).softmax(-1)
        entries = len(self.entries_S)
        mixed_BGXK = weights[..., :entries].reshape(batch, groups, -1, entries) @ self.values_BGSK
        mixed_BGRAK = mixed_BGXK.view_as(query_BGRAK)
        for index, (_, value) in enumerate(self.later):
            mixed_BGRAK = mixed_BGRAK + weights[..., entries + index, None] * _per_chain(value)
        return mixed_BGRAK.permute(0, 3, 1, 2, 4).reshape(batch, count, -1)


def _per_chain(x_BAGK: Tensor) -> Tensor:
    """[B, A, G, K] -> [B, G, 1, A, K]."""
    return x_BAGK.permute(0, 2, 1, 3)[:, :, None]


def _take(x_BSE: Tensor, index_BA: Tensor) -> Tensor:
    """Rows of each text."""
    return x_BSE.gather(1, index_BA[..., None].expand(-1, -1, x_BSE.shape[-1]))
