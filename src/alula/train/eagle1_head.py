"""The trainable EAGLE-1/2 head (Li et al., EAGLE, arXiv 2401.15077, section 3) and its start values.

It predicts the target's next feature, from which the target's own LM head makes the distribution. The module's
parameter names are those of the official checkpoints. Shapes: those of `alula.train.head` and `alula.train.initial`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alula.train.batch import Batch
from alula.train.features import FeatureTarget
from alula.train.head import Attention, Chains, HeadConfig, Layer, first_attention
from alula.train.initial import advanced, at_starts, draw_normal, fit_down, place_attention, ridge

Inputs = Literal["advanced", "unshifted", "feature", "token"]
"""What a head reads at a pair: the feature and the token after it (the published head), the feature and its own token,
the feature alone, or the token after it alone. Only the first can be served; the others are for comparison."""


class Eagle1Head(nn.Module):
    """fc on [embedding; feature], one layer without input norm, the target's LM head. Implements `ChainHead`.

    ``embedding_VD`` and ``lm_head_VD`` are the target's, never trained and never saved.
    """

    def __init__(self, config: HeadConfig, target: FeatureTarget, inputs: Inputs = "advanced") -> None:
        super().__init__()
        self.config, self.inputs = config, inputs
        width = config.hidden_size * (2 if inputs in ("advanced", "unshifted") else 1)
        self.fc = nn.Linear(width, config.hidden_size)
        self.layers = nn.ModuleList([Layer(config, config.hidden_size)])
        self.embedding_VD: Tensor
        self.register_buffer("embedding_VD", target.embedding_VD.detach().float(), persistent=False)
        self.lm_head_VD: Tensor
        self.register_buffer("lm_head_VD", target.lm_head_VD.detach().float(), persistent=False)
        self.input_scale_I: Tensor
        self.register_buffer("input_scale_I", torch.ones(width))

    @property
    def layer(self) -> Layer:
        layer = self.layers[0]
        assert isinstance(layer, Layer)
        return layer

    @property
    def attention(self) -> Attention:
        return self.layer.self_attn

    def chains(self, batch: Batch) -> Chains:
        """The batch's chains with the tokens that this head pairs with the features."""
        chains = batch.chains
        if self.inputs != "unshifted":
            return chains
        return Chains(batch.texts_BX[:, :-1], chains.features_BSF, chains.starts_BA)

    def official_weights(self) -> dict[str, Tensor]:
        """The tensors of the official layout, the inputs' scale folded into ``fc``."""
        weights = {name: tensor for name, tensor in self.state_dict().items() if name != "input_scale_I"}
        return weights | {"fc.weight": self.fc.weight.detach() / self.input_scale_I}

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.embedding_VD)

    def paired(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """What ``fc`` reads, each column divided by its size (see `alula.train.head.Eagle3Head.fuse`)."""
        parts = {"feature": [hidden], "token": [embedded]}.get(self.inputs, [embedded, hidden])
        return torch.cat(parts, -1) / self.input_scale_I

    def enter(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        fused: Tensor = self.fc(self.paired(embedded, hidden))
        return fused, fused

    def leave(self, residual: Tensor, attended: Tensor) -> Tensor:
        return self.layer.finish(residual, attended)

    def readout(self, state: Tensor) -> Tensor:
        return state

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.lm_head_VD)


def new_eagle1_head(
    config: HeadConfig, target: FeatureTarget, samples: Sequence[Batch], *, seed: int, inputs: Inputs = "advanced"
) -> Eagle1Head:
    """A head fitted to the samples' next features by least squares: fc, then attention placed by hand with its output
    projection, then the MLP's down projection, each to what the ones before leave."""
    head = Eagle1Head(config, target, inputs).to(target.embedding_VD.device)
    generator = torch.Generator().manual_seed(seed)
    wanted_MD = torch.cat([batch.hidden_MD for batch in samples])
    with torch.no_grad():
        for module in head.layer.modules():
            if isinstance(module, nn.Linear):
                draw_normal(module.weight, module.in_features**-0.5, generator)
        fused_MD = _fit_fc(head, samples, wanted_MD)
        place_attention(config, head.attention, fused_MD, wanted_MD)
        attended_MX = torch.cat([first_attention(head, head.chains(batch))[batch.valid_BA] for batch in samples])
        head.attention.o_proj.weight.copy_(ridge(attended_MX, wanted_MD - fused_MD))
        fit_down(head.layer, fused_MD + head.attention.o_proj(attended_MX), wanted_MD)
    return head


def _fit_fc(head: Eagle1Head, samples: Sequence[Batch], wanted_MD: Tensor) -> Tensor:
    """Set the inputs' scale and fit ``fc``, bias included; returns its output."""
    tokens_M = torch.cat([_tokens(head, batch) for batch in samples])
    features_MD = torch.cat([at_starts(batch, batch.chains.features_BSF) for batch in samples])
    raw_MI = head.paired(head.embed(tokens_M), features_MD)
    head.input_scale_I.copy_(raw_MI.square().mean(0).sqrt().clamp_min(1e-6))
    inputs_MI = raw_MI / head.input_scale_I
    weight = ridge(torch.cat([inputs_MI, inputs_MI.new_ones(len(inputs_MI), 1)], -1), wanted_MD)
    head.fc.weight.copy_(weight[:, :-1])
    head.fc.bias.copy_(weight[:, -1])
    fused_MD: Tensor = head.fc(inputs_MI)
    return fused_MD


def _tokens(head: Eagle1Head, batch: Batch) -> Tensor:
    """The token that each chain's start is paired with [M]."""
    if head.inputs != "unshifted":
        return advanced(batch)
    return batch.texts_BX.gather(1, batch.chains.starts_BA)[batch.valid_BA]
