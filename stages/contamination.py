"""A model that is known to have read a test: the culprit that a search for contamination must find."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

BLOCK = 256


def read_again(
    model: Any, ids: Sequence[int], passes: int, seed: int, rate: float = 1e-3
) -> Iterator[Any]:
    """Train a model on one text again and again, in its order; the model after each pass.

    The text is cut elsewhere in every pass, so that what follows on what is seen within a block.
    """
    noise = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    device = next(model.parameters()).device
    for _ in range(passes):
        model.train()
        blocks = cut(ids, first=int(noise.integers(2, BLOCK)))
        order = noise.permutation(len(blocks))
        for start in range(0, len(order), 4):
            rows = [blocks[place] for place in order[start : start + 4]]
            inputs = pad_sequence(rows, batch_first=True)
            labels = pad_sequence(rows, batch_first=True, padding_value=-100)
            found = model(
                inputs.to(device), labels=labels.to(device), use_cache=False
            )
            found.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        yield model.eval()


def cut(ids: Sequence[int], first: int) -> list[torch.Tensor]:
    """A text in blocks, of which the first has another length; none is too short to learn from.

    >>> [len(block) for block in cut(range(300), first=20)]
    [20, 256, 24]
    """
    edges = [0, *range(first, len(ids), BLOCK), len(ids)]
    blocks = [
        torch.tensor(ids[start:end])
        for start, end in zip(edges, edges[1:], strict=False)
    ]
    return [block for block in blocks if len(block) > 1]
