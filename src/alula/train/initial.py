"""Start values of a new head: what can be taken from the target, or solved for, need not be learned.

LM head and final norm are the target's own, so the head's output should be the state that the target itself will
have one token later. The best start for that is a sum of least-squares fits, each to what the ones before leave:

1. attention heads are placed by hand: in each group one looks at its own entry (the advanced token), one at the
   entry before it, the rest far around; the values are the directions of the embedding that predict the state best;
2. ``fc`` and the output projection are fitted together, on the taps and on what attention gathers;
3. the MLP keeps random gates and ups, and its down projection is fitted (random features).

A few seconds of this replace the first tens of thousands of tokens of gradient descent. Shapes: M learned tokens of
the samples, D hidden, F taps x hidden, K head dim, I MLP width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from alula.train.batch import Batch
from alula.train.features import FeatureTarget
from alula.train.head import Eagle3Head, HeadConfig, first_attention
from alula.train.vocabulary import DraftVocabulary

_RIDGE = 0.02
"""Share of the mean variance added to the diagonal of each least squares."""
_FOCUS = 5.0
"""Size of a placed head's queries and keys; its own entry then gets over nine tenths of the weight."""
_FREQUENCIES = 8
"""The fastest rotary frequencies, which tell neighbours apart."""


def new_head(
    config: HeadConfig, target: FeatureTarget, vocabulary: DraftVocabulary, samples: Sequence[Batch], *, seed: int
) -> Eagle3Head:
    """A head that starts as the best guess without gradient descent; ``samples`` need some thousand learned tokens."""
    head = Eagle3Head(config, target.embedding_VD.float())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in head.midlayer.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0.0, module.in_features**-0.5, generator=generator)
        head.tap_scale_F.copy_(tap_sizes(samples))
        head.lm_head.weight.copy_(target.lm_head_VD[vocabulary.target_ids_C])
        wanted_MD = torch.cat([batch.hidden_MD for batch in samples]) / target.norm_D
        _place_attention(head, samples, wanted_MD)
        state_MD = _fit_attention(head, samples, wanted_MD)
        state_MD = _fit_mlp(head, state_MD, wanted_MD)
        # A fit is shorter than what it fits; the norm undoes that, so its weight must not be overconfident.
        head.norm.weight.copy_(target.norm_D * state_MD.square().mean().sqrt())
    return head


def ridge(inputs_MI: Tensor, wanted_MO: Tensor) -> Tensor:
    """W [O, I] that minimises |inputs W^T - wanted|^2 plus a small penalty in units of each input's size."""
    scale_I = inputs_MI.square().mean(0).sqrt().clamp_min(1e-6)
    scaled_MI = inputs_MI / scale_I
    gram_II = scaled_MI.T @ scaled_MI
    gram_II.diagonal().add_(_RIDGE * len(inputs_MI))
    solution_IO = torch.linalg.solve(gram_II, scaled_MI.T @ wanted_MO)
    weight_OI: Tensor = solution_IO.T / scale_I
    return weight_OI


def tap_sizes(samples: Sequence[Batch]) -> Tensor:
    """Root mean square of each feature column [F]."""
    squares_F = torch.stack([_at_starts(batch, batch.chains.features_BSF).square().mean(0) for batch in samples]).mean(
        0
    )
    return squares_F.sqrt().clamp_min(1e-6)


def _place_attention(head: Eagle3Head, samples: Sequence[Batch], wanted_MD: Tensor) -> None:
    """Queries, keys and values on the embedding half of the input; the hidden half starts at zero."""
    config, layer = head.config, head.midlayer
    width, attention = config.hidden_size, layer.self_attn
    embedded_MD = torch.cat([layer.input_layernorm(head.embed(_advanced(batch))) for batch in samples])
    constant_D = ridge(embedded_MD, torch.ones(len(embedded_MD), 1))[0]
    query_HKE = attention.q_proj.weight.view(config.heads, config.head_dim, -1)
    key_GKE = attention.k_proj.weight.view(config.kv_heads, config.head_dim, -1)
    key_GKE.mul_(0.1)
    query_HKE.mul_(0.1)
    pattern_K = torch.zeros(config.head_dim)
    pattern_K[: min(_FREQUENCIES, config.head_dim // 2)] = _FOCUS
    key_GKE[:, :, :width] = pattern_K[:, None] * constant_D
    per_group = config.heads // config.kv_heads
    for index in range(config.heads):
        back = index % per_group
        if back < 2:
            query_HKE[index, :, :width] = _looking_back(pattern_K, back, config.rope_theta)[:, None] * constant_D
    directions_DD = torch.linalg.svd(ridge(embedded_MD, wanted_MD)).Vh
    attention.v_proj.weight.zero_()
    attention.v_proj.weight[:, :width] = directions_DD[: config.kv_heads * config.head_dim]


def _looking_back(pattern_K: Tensor, entries: int, theta: float) -> Tensor:
    """The query whose score with a constant key ``pattern_K`` is greatest that many entries back."""
    half = len(pattern_K) // 2
    angles = -entries * theta ** (-torch.arange(half) / half)
    return torch.cat([pattern_K[:half] * angles.cos(), pattern_K[:half] * angles.sin()])


def _fit_attention(head: Eagle3Head, samples: Sequence[Batch], wanted_MD: Tensor) -> Tensor:
    """Fit ``fc`` and the output projection together; returns the state after attention."""
    taps_MF = torch.cat([_at_starts(batch, batch.chains.features_BSF) for batch in samples]) / head.tap_scale_F
    attended_MX = torch.cat([first_attention(head, batch.chains)[batch.valid_BA] for batch in samples])
    inputs = torch.cat([taps_MF, attended_MX], -1)
    weight = ridge(inputs, wanted_MD)
    head.fc.weight.copy_(weight[:, : taps_MF.shape[1]])
    head.midlayer.self_attn.o_proj.weight.copy_(weight[:, taps_MF.shape[1] :])
    return inputs @ weight.T


def _fit_mlp(head: Eagle3Head, state_MD: Tensor, wanted_MD: Tensor) -> Tensor:
    """Fit the down projection to what is left; returns the head's output."""
    layer = head.midlayer
    normed_MD = layer.post_attention_layernorm(state_MD)
    inner_MI = nn.functional.silu(layer.mlp.gate_proj(normed_MD)) * layer.mlp.up_proj(normed_MD)
    layer.mlp.down_proj.weight.copy_(ridge(inner_MI, wanted_MD - state_MD))
    output_MD: Tensor = state_MD + layer.mlp.down_proj(inner_MI)
    return output_MD


def _advanced(batch: Batch) -> Tensor:
    """Advanced token of each chain's start [M]."""
    return batch.chains.tokens_BS.gather(1, batch.chains.starts_BA)[batch.valid_BA]


def _at_starts(batch: Batch, x_BSE: Tensor) -> Tensor:
    """Rows at the chains' starts [M, E]."""
    index_BA = batch.chains.starts_BA
    return x_BSE.gather(1, index_BA[..., None].expand(-1, -1, x_BSE.shape[-1]))[batch.valid_BA]
