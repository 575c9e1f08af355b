"""One drafter spread over several processes (FSDP): each keeps a part of every weight and of the optimiser's state.

What is written, evaluated or gone on from is whole: a checkpoint does not show how many processes wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from alula.train.batch import Batch
from alula.train.distributed import ProcessGroup
from alula.train.methods.method import Loss, Method

Losses: TypeAlias = Callable[[Batch, torch.Generator], list[Loss]]


class ShardedGroup(ProcessGroup):
    """Gradients are added up by FSDP itself, on the way back."""

    def add(self, parameters: Sequence[nn.Parameter], figures: Tensor) -> None:
        super().add((), figures)


def sharded_losses(method: Method, processes: int) -> Losses:
    """Spread the method's weights, and return its losses. Whatever needs them whole has to ask another copy of it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    forward = _Forward(method)
    device = next(method.module.parameters()).device.type
    fully_shard(forward, mesh=init_device_mesh(device, (processes,)))

    def losses(batch: Batch, generator: torch.Generator) -> list[Loss]:
        values = forward(batch, generator)
        # FSDP takes the mean over the processes, and the trainer wants the sum.
        return [Loss(name, v, weight * processes) for v, (name, weight) in zip(values, forward.terms, strict=True)]

    return losses


class _Forward(nn.Module):
    """The losses as a module's forward pass, which is where FSDP gathers the weights and lets them go."""

    def __init__(self, method: Method) -> None:
        super().__init__()
        self._losses, self.module = method.losses, method.module
        self.terms: list[tuple[str, float]] = []

    def forward(self, batch: Batch, generator: torch.Generator) -> tuple[Tensor, ...]:
        losses = self._losses(batch, generator)
        self.terms = [(loss.name, loss.weight) for loss in losses]
        return tuple(loss.value for loss in losses)


def gathered(value: Any) -> Any:
    """``value`` with every spread tensor whole, in dictionaries and lists too. All processes must ask together."""
    from torch.distributed.tensor import DTensor

    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {key: gathered(one) for key, one in value.items()}
    if isinstance(value, list):
        return [gathered(one) for one in value]
    return value


def spread(value: Tensor, like: Tensor) -> Tensor:
    """A whole tensor spread as ``like`` is, which may be whole too."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(like, DTensor) or value.shape != like.shape:
        return value
    return distribute_tensor(value, like.device_mesh, like.placements)
