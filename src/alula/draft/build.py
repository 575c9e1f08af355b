"""From a head's files to a drafter that runs beside a target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from alula.config import AlulaError
from alula.draft.dialects import HeadFiles
from alula.draft.eagle import Eagle1Head, Eagle3Head, SharedParts
from alula.draft.neural import NeuralDrafter
from alula.draft.policy import TreePolicy
from alula.kernels.protocol import Kernels
from alula.model.rope import build_rope


@dataclass(frozen=True)
class TargetParts:
    """What a head needs of its target.

    embedding_VD: in the model dtype; a head without an embedding of its own shares it. logits: the LM head, [R, D] ->
    fp32 [R, V], for EAGLE-1/2. layers: decoder layers, for the default taps. positions: RoPE positions that the serving
    context needs, drafts beyond its end included.
    """

    embedding_VD: torch.Tensor
    logits: Callable[[torch.Tensor], torch.Tensor]
    layers: int
    positions: int
    kernels: Kernels

    @property
    def vocab_size(self) -> int:
        return self.embedding_VD.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.embedding_VD.shape[1]


def build_head(
    head: HeadFiles, target: TargetParts, policy: TreePolicy, *, own_embedding: bool = False
) -> NeuralDrafter:
    """A drafter of the head, in the target's dtype, on its device, over its kernels.

    own_embedding: keep an embedding of the head's that differs from the target's; otherwise that is an error, since it
    is the usual sign of a head for another target or of a broken export.
    Raises AlulaError, naming the field, for a head that does not fit this target.
    """
    config = head.config
    _check_fit(head, target)
    embedding_VD = _embedding(head, target, own_embedding)
    device, dtype = target.embedding_VD.device, target.embedding_VD.dtype
    weights = {
        name: tensor.to(device) if name == "d2t" else tensor.to(device, dtype)
        for name, tensor in head.weights.items()
        if name != "embed_tokens.weight"
    }
    rope = build_rope(config.rope, config.head_dim, target.positions, device)
    shared = SharedParts(embedding_VD, target.logits)
    make = Eagle3Head if config.kind == "eagle3" else Eagle1Head
    model = make(config, weights, shared, target.kernels, rope)
    taps = config.tap_layers(target.layers)
    return NeuralDrafter(config.kind, model, taps, policy, target.kernels, target.vocab_size)


def _check_fit(head: HeadFiles, target: TargetParts) -> None:
    config = head.config
    pairs = (
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("target_hidden_size", config.target_hidden_size, target.hidden_size),
    )
    for name, theirs, ours in pairs:
        if theirs != ours:
            raise AlulaError(f"the head's {name} is {theirs}, but the target's is {ours}: give a head for this target")
    if config.kind == "eagle1" and config.hidden_size != config.target_hidden_size:
        raise AlulaError(
            f"the head's hidden_size is {config.hidden_size}, but an EAGLE-1/2 head uses the target's LM head of "
            f"{config.target_hidden_size}: give a head for this target"
        )


def _embedding(head: HeadFiles, target: TargetParts, own_allowed: bool) -> torch.Tensor:
    """The target's table, unless the head's is wanted or needed."""
    shared_VD, own = target.embedding_VD, head.weights.get("embed_tokens.weight")
    if own is None:
        if head.config.hidden_size != target.hidden_size:
            raise AlulaError(
                f"the head lacks embed_tokens.weight, and its hidden_size {head.config.hidden_size} is not the "
                f"target's {target.hidden_size}, so the target's cannot serve: export the head with its embedding"
            )
        return shared_VD
    own_VD = own.to(shared_VD.device, shared_VD.dtype)
    if own_VD.shape == shared_VD.shape and torch.equal(own_VD, shared_VD):
        return shared_VD
    if own_VD.shape == shared_VD.shape and not own_allowed:
        raise AlulaError(
            "the head's embed_tokens.weight differs from the target's embedding: give the head of this target, or "
            "remove the tensor to share the target's"
        )
    return own_VD
