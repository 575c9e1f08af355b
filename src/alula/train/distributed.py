"""Several processes that train one drafter: each computes some batches of a step, and their gradients are added."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from alula.config import AlulaError

_PATIENCE = timedelta(hours=6)
"""How long a process waits for the others: while one writes data or evaluates, they wait. One that has ended is
noticed at once."""

T = TypeVar("T")


class Processes(Protocol):
    """The processes that train together, as one of them sees it. Rank 0 speaks and writes."""

    rank: int
    count: int

    def add(self, parameters: Sequence[torch.nn.Parameter], figures: torch.Tensor) -> None:
        """Replace every gradient (a missing one is zero) and ``figures`` by the sum over all processes."""

    def agree(self, make: Callable[[], T]) -> T:
        """What rank 0 makes, for all of them. An AlulaError there is raised by all."""

    def meet(self) -> None:
        """Wait for the others."""


class OneProcess:
    """Trains alone."""

    rank, count = 0, 1

    def add(self, parameters: Sequence[torch.nn.Parameter], figures: torch.Tensor) -> None:
        """Nothing to add."""

    def agree(self, make: Callable[[], T]) -> T:
        return make()

    def meet(self) -> None:
        """Nobody to wait for."""


class ProcessGroup:
    """The processes of a `torchrun`. Raises AlulaError when another one is gone."""

    def __init__(self) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()

    def add(self, parameters: Sequence[torch.nn.Parameter], figures: torch.Tensor) -> None:
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([*(gradient.reshape(-1) for gradient in gradients), figures.to(_place(gradients))])
        _with_all(lambda: dist.all_reduce(flat))
        *parts, sums = torch.split(flat, [*(p.numel() for p in parameters), len(figures)])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        figures.copy_(sums)

    def agree(self, make: Callable[[], T]) -> T:
        box: list[Any] = [None, None]
        if self.rank == 0:
            try:
                box[0] = make()
            except AlulaError as error:
                box[1] = str(error)
        _with_all(lambda: dist.broadcast_object_list(box, src=0))
        if box[1] is not None:
            raise AlulaError(box[1])
        made: T = box[0]
        return made

    def meet(self) -> None:
        _with_all(lambda: dist.all_reduce(torch.zeros(1)))


def _place(gradients: Sequence[torch.Tensor]) -> torch.device:
    return gradients[0].device if gradients else torch.device("cpu")


def local_device(device: str) -> str:
    """This process's device: under torchrun, ``cuda`` is the GPU of its local rank.

    Raises AlulaError where several processes would share one GPU.
    """
    if device.split(":")[0] != "cuda" or _world() < 2:
        return device
    if device != "cuda":
        raise AlulaError(f"device is {device!r} for {_world()} processes: give cuda, and each takes its own")
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"


def _world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def joined(device: torch.device) -> Iterator[Processes]:
    """The processes that `torchrun` started, or this one alone. Raises AlulaError where they cannot meet.

    device: this process's. Gradients on GPUs are added over nccl, everything else over gloo.
    """
    if _world() < 2:
        yield OneProcess()
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=_PATIENCE)
    except (RuntimeError, ValueError) as error:
        raise AlulaError(f"the training processes cannot meet ({error}): start them with torchrun") from None
    try:
        yield ProcessGroup()
    finally:
        dist.destroy_process_group()


def _with_all(work: Callable[[], object]) -> None:
    try:
        work()
    except RuntimeError as error:
        raise AlulaError(
            "another training process has ended, and its own message says why; once that is mended, give the same "
            f"command again, which goes on from the checkpoint ({str(error).split('. ')[0]})"
        ) from error
