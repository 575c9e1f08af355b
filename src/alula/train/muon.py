"""Muon (Jordan et al., 2024): momentum whose update has all singular values near one.

The head's inputs have a large mean and the target's logits are sharp. Adam moves every weight by the same amount,
which adds up along that mean to a shift that undoes a fitted start; an orthogonal update moves all directions alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of the Newton-Schulz iteration; they trade exactness (0.7 .. 1.2 instead of 1) for speed."""
_ROUNDS = 5


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
        parameter.add_(orthogonal(update), alpha=-lr)


def orthogonal(matrix: Tensor) -> Tensor:
    """The nearest matrix with orthonormal rows or columns, roughly: its singular values lie between 0.6 and 1.3."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x: Tensor = wide / wide.norm().clamp_min(1e-12)
    a, b, c = _QUINTIC
    for _ in range(_ROUNDS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide is matrix else x.T
