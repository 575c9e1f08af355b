"""Muon (Jordan et al., 2024): momentum whose update has all singular values near one.

The head's inputs have a large mean and the target's logits are sharp. Adam moves every weight by the same amount,
which adds up along that mean to a shift that undoes a fitted start; an orthogonal update moves all directions alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from alula.train.sharding import gathered, spread

_ROUNDS = (
    (8.0934, -23.6204, 17.4462),
    (3.6366, -2.7219, 0.5365),
    (2.6613, -1.9772, 0.4526),
)
"""Odd quintics a x + b x^3 + c x^5 of the singular values, one after the other. Each is the one that comes closest to 1
everywhere between the bounds that the one before leaves (0.01 and 1 at first; cf. Amsel et al., "The Polar Express",
arXiv 2505.16932); together they bring that whole range to 0.73 .. 1.27."""


class Muon(torch.optim.Optimizer):
    """For matrices; the rest goes to another optimiser. In fp32, as bf16 is slow on most CPUs."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group["lr"], group["momentum"])

    def _move(self, parameter: nn.Parameter, gradient: Tensor, lr: float, momentum: float) -> None:
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        state["momentum"].lerp_(gradient, 1 - momentum)
        update = gradient.lerp(state["momentum"], momentum)
        parameter.add_(spread(orthogonal(gathered(update)), parameter), alpha=-lr)


def orthogonal(matrix: Tensor) -> Tensor:
    """The nearest matrix with orthonormal rows or columns, roughly: singular values above a hundredth of their root
    mean fourth power become 0.7 to 1.3, smaller ones grow seventyfold.

    The rounds run on the Gram matrix of the short side and what they multiply up is applied once: for matrices two or
    three times as long as wide that is half the work of five rounds on the matrix itself.
    """
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    gram = wide @ wide.T
    size = gram.norm().clamp_min(1e-24)  # its root bounds the largest singular value more closely than the norm does
    gram = gram / size
    factor, step = torch.eye(len(gram), device=gram.device), None
    for a, b, c in _ROUNDS:
        if step is not None:
            gram = step @ gram @ step
        step = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        step.diagonal().add_(a)
        factor = factor @ step
    x: Tensor = (factor @ wide) / size.sqrt()
    return x if wide is matrix else x.T
