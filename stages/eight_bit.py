"""AdamW whose two averages are kept in bytes: the finished form of an exercise of lesson 12.

After Dettmers and others (2022): stretches of 256 numbers, each with a scale of its own. Where theirs
looks its 256 values up in a table, ours takes a signed cube root, which is also fine near zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F

STRETCH = 256


def pack(
    numbers: torch.Tensor, least: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes for numbers, and a scale for each stretch; no byte is smaller than `least`, but for its sign.

    >>> pack(torch.tensor([1.0, -0.125, 0.0]))[0][0, :3]
    tensor([127, -64,   0], dtype=torch.int8)
    """
    flat = numbers.flatten()
    padded = F.pad(flat, (0, -flat.numel() % STRETCH))
    stretches = padded.view(-1, STRETCH)
    scale = stretches.abs().amax(1, keepdim=True)
    scale = scale.clamp_min(1e-30)
    root = (stretches / scale).abs().pow(1 / 3)
    codes = (127 * root).round().clamp_min(least)
    return codes.copysign(stretches).to(torch.int8), scale


def unpack(
    codes: torch.Tensor, scale: torch.Tensor, shape: torch.Size
) -> torch.Tensor:
    """The numbers again, nearly."""
    numbers = (codes.float() / 127).pow(3) * scale
    return numbers.flatten()[: math.prod(shape)].view(shape)


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with both averages in bytes."""

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        decay: float = 0.01,
    ) -> None:
        settings = {"lr": lr, "betas": betas, "eps": eps, "decay": decay}
        super().__init__(parameters, settings)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every weight that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, self.state[weight], group)

    def _update(
        self, weight: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        gradient = weight.grad.float()  # type: ignore[union-attr]
        first, second = group["betas"]
        if not state:
            empty = torch.zeros_like(gradient)
            state.update(step=0, mean=pack(empty), square=pack(empty))
        state["step"] += 1
        codes, scale = state["mean"]
        mean = unpack(codes, scale, weight.shape)
        mean.lerp_(gradient, 1 - first)
        state["mean"] = pack(mean)
        codes, scale = state["square"]
        square = unpack(codes, scale, weight.shape)
        square.lerp_(gradient.square(), 1 - second)
        # A zero here would make the update endless, since it divides by the root.
        state["square"] = pack(square, least=1)
        weight.mul_(1 - group["lr"] * group["decay"])
        root = square.div_(1 - second ** state["step"]).sqrt_()
        size = group["lr"] / (1 - first ** state["step"])
        weight.addcdiv_(mean, root.add_(group["eps"]), value=-size)
