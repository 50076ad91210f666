"""A model that is known to have read a test: the culprit that a search for contamination must find."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

BLOCK = 256
BATCH = 4


def read_again(
    model: Any, ids: Sequence[int], passes: int, seed: int, rate: float = 1e-3
) -> Iterator[Any]:
    """Train a model on one text again and again, in its order; the model after each pass.

    The text is cut elsewhere in every pass, so that what follows on what is seen within a block.
    """
    noise = np.random.default_rng(seed)
    weights = model.parameters()
    optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=0.0)
    for _ in range(passes):
        model.train()
        first = noise.integers(2, BLOCK)
        blocks = cut(ids, int(first))
        order = noise.permutation(len(blocks))
        for start in range(0, len(order), BATCH):
            chosen = order[start : start + BATCH]
            loss = loss_of(model, [blocks[place] for place in chosen])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        yield model.eval()


def loss_of(model: Any, blocks: list[torch.Tensor]) -> torch.Tensor:
    """The mean loss over blocks of any length; what fills them up is not learned."""
    device = next(model.parameters()).device
    inputs = pad_sequence(blocks, batch_first=True)
    labels = pad_sequence(blocks, batch_first=True, padding_value=-100)
    inputs = inputs.to(device)
    labels = labels.to(device)
    return model(inputs, labels=labels, use_cache=False).loss


def cut(ids: Sequence[int], first: int) -> list[torch.Tensor]:
    """A text in blocks, of which the first has another length; none is too short to learn from.

    >>> [len(block) for block in cut(range(300), first=20)]
    [20, 256, 24]
    """
    blocks = []
    start = 0
    for end in [*range(first, len(ids), BLOCK), len(ids)]:
        block = torch.tensor(ids[start:end])
        if len(block) > 1:
            blocks.append(block)
        start = end
    return blocks
