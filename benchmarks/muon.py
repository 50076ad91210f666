"""A Muon whose step costs less: matrices of one shape together, wide ones by way of their Gram matrix.

`torch.optim.Muon` orthogonalizes one matrix after the other in bfloat16: five rounds of
X <- (a + b G + c G G) X with G = X X'. Here matrices of one shape (a tall one lies on its side) are one
batch. A wide matrix costs most where it is multiplied itself, so only the small square factors are
multiplied in the rounds, because G follows from them too, and X once at the end. That wants float32,
which on processors without a fast bfloat16 is quicker anyway. The state is that of torch's.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from benchmarks.timing import Row, interleaved, row

Coefficients = tuple[float, float, float]
# Those of torch's own, for each of five rounds.
ROUNDS: tuple[Coefficients, ...] = ((3.4445, -4.7750, 2.0315),) * 5
EPSILON = 1e-7


def orthogonalize(
    batch: torch.Tensor, rounds: Iterable[Coefficients] = ROUNDS
) -> torch.Tensor:
    """Matrices no taller than wide, with their singular values brought near one.

    >>> values = torch.linalg.svdvals(orthogonalize(torch.randn(2, 8, 32)))
    >>> bool((values > 0.5).all() and (values < 1.5).all())
    True
    """
    size = batch.norm(dim=(-2, -1), keepdim=True)
    batch = batch / size.clamp(min=EPSILON)
    if batch.shape[-1] < 2 * batch.shape[-2]:
        for factor in rounds:
            gram = batch @ batch.mT
            batch = polynomial(gram, factor) @ batch
        return batch
    gram = batch @ batch.mT
    product = None
    for factor in rounds:
        step = polynomial(gram, factor)
        product = step if product is None else step @ product
        # All of them are polynomials of one matrix, so their order does not matter.
        gram = step @ (step @ gram)
    return batch if product is None else product @ batch


def polynomial(gram: torch.Tensor, factor: Coefficients) -> torch.Tensor:
    """`a + b G + c G G` of each matrix of a batch."""
    a, b, c = factor
    result = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
    result.diagonal(dim1=-2, dim2=-1).add_(a)
    return result


def lying(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix with its longer side along the rows."""
    rows, columns = matrix.shape
    return matrix if rows <= columns else matrix.T


class BatchedMuon(torch.optim.Optimizer):
    """`torch.optim.Muon` with the same arguments, state and mathematics, for whole matrices on one device."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        rounds: tuple[Coefficients, ...] = ROUNDS,
    ) -> None:
        facts = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__(params, {**facts, "rounds": rounds})
        for group in self.param_groups:
            if any(parameter.ndim != 2 for parameter in group["params"]):
                raise ValueError("Muon is for matrices")

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update of every matrix that has a gradient."""
        for group in self.param_groups:
            shapes = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes[lying(parameter).shape].append(parameter)
            for parameters in shapes.values():
                self.update(parameters, group)

    def update(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        """One update of matrices of one shape."""
        gradients: list[Any] = [parameter.grad for parameter in parameters]
        buffers = [self.buffer_of(parameter) for parameter in parameters]
        keep = group["momentum"]
        torch._foreach_lerp_(buffers, gradients, 1 - keep)
        # Nesterov's: a look ahead along the mean.
        ahead = torch._foreach_lerp(gradients, buffers, keep)
        batch = torch.stack([lying(matrix).float() for matrix in ahead])
        updates = orthogonalize(batch, group["rounds"])
        rate = group["lr"]
        torch._foreach_mul_(parameters, 1 - rate * group["weight_decay"])
        for parameter, update in zip(parameters, updates):
            rows, columns = parameter.shape
            turned = update if rows <= columns else update.T
            scale = max(1, rows / columns) ** 0.5
            parameter.add_(turned, alpha=-rate * scale)

    def buffer_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The running mean of a matrix's gradients."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return state["momentum_buffer"]


def matrices(width: int, layers: int) -> list[torch.nn.Parameter]:
    """The matrices of a transformer's layers, with gradients: four square ones, a tall and a wide one."""
    square = (width, width)
    shapes = [square] * 4 + [(4 * width, width), (width, 4 * width)]
    torch.manual_seed(0)
    made = []
    for shape in itertools.chain(*[shapes] * layers):
        parameter = torch.nn.Parameter(torch.randn(shape) * 0.04)
        parameter.grad = torch.randn(shape) * 0.01
        made.append(parameter)
    return made


def rows(repeats: int = 9) -> Iterator[Row]:
    """CPU seconds of the optimizer's step, at the size of launch/recipes/modern.toml."""
    torch.set_num_threads(1)
    theirs = torch.optim.Muon(matrices(192, 4), lr=0.03, weight_decay=0.0)
    ours = BatchedMuon(matrices(192, 4), lr=0.03, weight_decay=0.0)
    works = (ours.step, theirs.step)
    clock = time.process_time
    fast, slow = interleaved(*works, repeats=repeats, warm_up=1, clock=clock)
    what = "Muon's step, 24 matrices of width 192, one thread"
    peers = {"torch.optim.Muon": slow * 1000}
    yield row("muon-step", what, "CPU ms", fast * 1000, peers, 0.8, False)
