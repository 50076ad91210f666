"""The memory of a training step: one convention, counted and not assumed.

    count_step(recipe, words, block)   what a recipe takes on one device, tensor by tensor
    CONVENTIONS                        the same as a few numbers, for a decoder of any size

The numbers are those of GPT-2's layer with a fused GELU and a fused attention, trained by AdamW.
They are what `count_step` finds, and the tests count them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from stages.chunked_loss import chunk_loss
from stages.memory import fake_tensors
from stages.recipe import Recipe, build_model, make_optimizers
from stages.tokens import split_rows


@dataclass(frozen=True)
class Convention:
    """Bytes of a training step in one precision."""

    # A parameter: weight, gradient and AdamW's two averages, four bytes each.
    states: float
    # The 16-bit copy of a parameter, from the forward to the backward pass.
    copy: float
    # A token and a unit of width: what a layer keeps for the backward pass, …
    layer: float
    # … what it keeps if it is computed again (its input), …
    entry: float
    # … what is there at most while a layer goes backward: what it keeps, and gradients on their way, …
    working: float
    # … and what lies before the first layer and behind the last.
    edge: float
    # A token and a word of the vocabulary: logits, their logarithms, and the gradient.
    scores: float

    def state_bytes(self, parameters: float) -> float:
        """Weights, gradients, averages and copies of a model that is whole on its device.

        >>> CONVENTIONS["bfloat16"].state_bytes(1e9) / 1e9
        18.0
        """
        return (self.states + self.copy) * parameters


CONVENTIONS = {
    "float32": Convention(16, 0, 64, 4, 72, 8, 12),
    "bfloat16": Convention(16, 2, 36, 4, 56, 6, 12),
}


@dataclass(frozen=True)
class StepBytes:
    """What a step of a recipe takes on one device that holds the whole model."""

    parameters: int
    # Weights and averages, which stay from step to step.
    states: int
    # The most bytes at once, with as many rows at once as the recipe says.
    peak: int
    # What one more row at once adds to it.
    row: int


class Words:
    """What a model must know of its tokenizer."""

    bos_token_id = eos_token_id = pad_token_id = 0

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count


def count_step(recipe: Recipe, words: int, block: int) -> StepBytes:
    """Count a step of a recipe, with a vocabulary of `words` and rows of `block` tokens.

    Nothing is compiled, and "auto" counts as bfloat16.

    >>> recipe = Recipe.load("launch/recipes/gpt2-110m.toml")       # doctest: +SKIP
    >>> count_step(recipe, 32_768, 1024).peak / 1e9                 # doctest: +SKIP
    """
    with fake_tensors() as live:
        model = build_model(recipe, Words(words)).train()
        if recipe.loss_chunk:
            chunk_loss(model, recipe.loss_chunk)
        optimizers = make_optimizers(model, recipe)
        peaks = []
        # The first step makes the optimizer's averages.
        for rows_at_once in (1, recipe.micro, 2 * recipe.micro):
            live.peak = live.now
            for piece in pieces(recipe, rows_at_once, block):
                add_gradients(model, recipe, piece)
            update(optimizers)
            peaks.append(live.peak)
        parameters = sum(weight.numel() for weight in model.parameters())
        row = (peaks[2] - peaks[1]) // recipe.micro
        return StepBytes(parameters, live.now, peaks[1], row)


def pieces(recipe: Recipe, rows: int, block: int) -> Iterator[torch.Tensor]:
    """The first two pieces of a step, or its only one; a third finds memory as the second did."""
    count = 1 if recipe.rows <= recipe.micro else 2
    for _ in range(count):
        yield torch.zeros(rows, block + 1, dtype=torch.long)


def add_gradients(model: Any, recipe: Recipe, rows: torch.Tensor) -> None:
    """Forward and backward of some rows, as the training loop does it."""
    narrow = recipe.precision != "float32"
    with torch.autocast(rows.device.type, torch.bfloat16, enabled=narrow):
        loss = model(**split_rows(rows), use_cache=False).loss
    loss.backward()


def update(optimizers: list[torch.optim.Optimizer]) -> None:
    """One update; the gradients go."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
