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
from alula.train.head import Eagle3Head, HeadConfig, Layer, first_attention
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
    head = Eagle3Head(config, target.embedding_VD.float()).to(target.embedding_VD.device)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in head.midlayer.modules():
            if isinstance(module, nn.Linear):
                draw_normal(module.weight, module.in_features**-0.5, generator)
        # Attention is fitted before fc is; what it gathers until then must not depend on who drew numbers before.
        draw_normal(head.fc.weight, head.fc.in_features**-0.5, generator)
        head.tap_scale_F.copy_(tap_sizes(samples, config))
        head.lm_head.weight.copy_(target.lm_head_VD[vocabulary.target_ids_C.to(target.lm_head_VD.device)])
        wanted_MD = torch.cat([batch.hidden_MD for batch in samples]) / target.norm_D
        layer = head.midlayer
        embedded_MD = torch.cat([layer.input_layernorm(head.embed(advanced(batch))) for batch in samples])
        place_attention(config, layer.self_attn, embedded_MD, wanted_MD)
        state_MD = _fit_attention(head, samples, wanted_MD)
        state_MD = fit_down(head.midlayer, state_MD, wanted_MD)
        # A fit is shorter than what it fits; the norm undoes that, so its weight must not be overconfident.
        head.norm.weight.copy_(target.norm_D * state_MD.square().mean().sqrt())
    return head


def draw_normal(weight: Tensor, size: float, generator: torch.Generator) -> None:
    """Numbers of the CPU generator, so that they are the same on every device."""
    weight.copy_(torch.empty(weight.shape).normal_(0.0, size, generator=generator))


def ridge(inputs_MI: Tensor, wanted_MO: Tensor) -> Tensor:
    """W [O, I] that minimises |inputs W^T - wanted|^2 plus a small penalty in units of each input's size."""
    scale_I = inputs_MI.square().mean(0).sqrt().clamp_min(1e-6)
    scaled_MI = inputs_MI / scale_I
    gram_II = scaled_MI.T @ scaled_MI
    gram_II.diagonal().add_(_RIDGE * len(inputs_MI))
    solution_IO = torch.linalg.solve(gram_II, scaled_MI.T @ wanted_MO)
    weight_OI: Tensor = solution_IO.T / scale_I
    return weight_OI


def tap_sizes(samples: Sequence[Batch], config: HeadConfig) -> Tensor:
    """Root mean square of each feature column [F], as `fc` reads them before its norms have learned anything."""
    squares_F = torch.stack([_entering(batch, config).square().mean(0) for batch in samples]).mean(0)
    return squares_F.sqrt().clamp_min(1e-6)


def _entering(batch: Batch, config: HeadConfig) -> Tensor:
    """Features at the chains' starts [M, F], each tap normed where the head does so."""
    features_MF = at_starts(batch, batch.chains.features_BSF)
    if not config.fc_norm:
        return features_MF
    taps = torch.split(features_MF, config.hidden_size, -1)
    return torch.cat([nn.functional.rms_norm(tap, tap.shape[-1:], eps=config.rms_norm_eps) for tap in taps], -1)


def place_attention(config: HeadConfig, attention: nn.Module, inputs_MW: Tensor, wanted_MD: Tensor) -> None:
    """Queries, keys and values on the first W columns of what attention reads; the others start near zero.

    attention: holds q_proj, k_proj and v_proj. inputs_MW: those columns where predictions are made.
    """
    width = inputs_MW.shape[1]
    constant_W = ridge(inputs_MW, inputs_MW.new_ones(len(inputs_MW), 1))[0]
    query, key, value = (attention.get_parameter(f"{name}_proj.weight") for name in "qkv")
    query_HKE = query.view(config.heads, config.head_dim, -1)
    key_GKE = key.view(config.kv_heads, config.head_dim, -1)
    key_GKE.mul_(0.1)
    query_HKE.mul_(0.1)
    pattern_K = torch.zeros(config.head_dim, device=inputs_MW.device)
    pattern_K[: min(_FREQUENCIES, config.head_dim // 2)] = _FOCUS
    key_GKE[:, :, :width] = pattern_K[:, None] * constant_W
    per_group = config.heads // config.kv_heads
    for index in range(config.heads):
        back = index % per_group
        if back < 2:
            query_HKE[index, :, :width] = _looking_back(pattern_K, back, config.rope_theta)[:, None] * constant_W
    directions_WW = torch.linalg.svd(ridge(inputs_MW, wanted_MD)).Vh[: config.kv_heads * config.head_dim]
    value.zero_()
    value[: len(directions_WW), :width] = directions_WW


def _looking_back(pattern_K: Tensor, entries: int, theta: float) -> Tensor:
    """The query whose score with a constant key ``pattern_K`` is greatest that many entries back."""
    half = len(pattern_K) // 2
    angles = -entries * theta ** (-torch.arange(half, device=pattern_K.device) / half)
    return torch.cat([pattern_K[:half] * angles.cos(), pattern_K[:half] * angles.sin()])


def _fit_attention(head: Eagle3Head, samples: Sequence[Batch], wanted_MD: Tensor) -> Tensor:
    """Fit ``fc`` and the output projection together; returns the state after attention."""
    config = head.config
    taps_MF = torch.cat([_entering(batch, config) for batch in samples]) / head.tap_scale_F
    attended_MX = torch.cat([first_attention(head, batch.chains)[batch.valid_BA] for batch in samples])
    inputs = torch.cat([taps_MF, attended_MX], -1)
    weight = ridge(inputs, wanted_MD)
    head.fc.weight.copy_(weight[:, : taps_MF.shape[1]])
    head.midlayer.self_attn.o_proj.weight.copy_(weight[:, taps_MF.shape[1] :])
    return inputs @ weight.T


def fit_down(layer: Layer, state_MD: Tensor, wanted_MD: Tensor) -> Tensor:
    """Fit the MLP's down projection to what is left; returns the layer's output."""
    normed_MD = layer.post_attention_layernorm(state_MD)
    inner_MI = nn.functional.silu(layer.mlp.gate_proj(normed_MD)) * layer.mlp.up_proj(normed_MD)
    layer.mlp.down_proj.weight.copy_(ridge(inner_MI, wanted_MD - state_MD))
    output_MD: Tensor = state_MD + layer.mlp.down_proj(inner_MI)
    return output_MD


def advanced(batch: Batch) -> Tensor:
    """Advanced token of each chain's start [M]."""
    return batch.chains.tokens_BS.gather(1, batch.chains.starts_BA)[batch.valid_BA]


def at_starts(batch: Batch, x_BSE: Tensor) -> Tensor:
    """Rows at the chains' starts [M, E]."""
    index_BA = batch.chains.starts_BA
    return x_BSE.gather(1, index_BA[..., None].expand(-1, -1, x_BSE.shape[-1]))[batch.valid_BA]
