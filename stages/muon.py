"""`torch.optim.Muon`, whose products are in float32 on a processor.

torch's own always multiplies in bfloat16. A processor without a bfloat16 of its own, such as most
laptops have, takes about twenty times as long for that as for float32, which is longer than all else
in the step of a small model. On a GPU the products stay in bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch


class Muon(torch.optim.Muon):
    """torch's Muon with its defaults, its state and its mathematics; above is the one difference."""

    def __init__(self, params: Any, lr: float, weight_decay: float) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of every matrix that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self.update(weight, group)
        return loss

    def update(self, weight: torch.Tensor, group: dict[str, Any]) -> None:
        """Momentum, looked at one step ahead, then orthogonalized."""
        gradient: Any = weight.grad
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        mean = state["momentum_buffer"]
        mean.lerp_(gradient, 1 - group["momentum"])
        ahead = gradient.lerp(mean, group["momentum"])

        on_processor = weight.device.type == "cpu"
        dtype = torch.float32 if on_processor else torch.bfloat16
        direction = orthogonalize(ahead.to(dtype), group)

        rows, columns = weight.shape
        rate = group["lr"]
        weight.mul_(1 - rate * group["weight_decay"])
        weight.add_(direction, alpha=-rate * max(1, rows / columns) ** 0.5)


def orthogonalize(matrix: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """A matrix with its singular values brought near one, computed in its own dtype.

    >>> group = torch.optim.Muon([torch.zeros(8, 32)]).param_groups[0]
    >>> values = torch.linalg.svdvals(orthogonalize(torch.randn(8, 32), group))
    >>> bool((values > 0.5).all() and (values < 1.5).all())
    True
    """
    first, second, third = group["ns_coefficients"]
    tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if tall else matrix
    wide = wide / wide.norm().clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = wide @ wide.T
        factor = torch.addmm(gram, gram, gram, beta=second, alpha=third)
        wide = torch.addmm(wide, factor, wide, beta=first)
    return wide.T if tall else wide
