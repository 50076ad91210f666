"""Floor 3: a shuffle that is computed and not kept: a seed and k say where place k goes.

A Feistel network: a number is cut into two halves, and each half in turn is shifted by a scatter of
the other. Every shift can be undone, so no two numbers meet. Where halves make more numbers than
are wanted, one that falls outside is sent through again until it is inside.
"""
from __future__ import annotations

import math

import numpy as np


def mix(numbers: np.ndarray) -> np.ndarray:
    """Scatter 64-bit numbers: each bit of a result depends on each bit of its number."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def permute(places: np.ndarray, size: int, seed: int, epoch: int = 0) -> np.ndarray:
    """Where each place of `0 … size - 1` goes: a Feistel network, walked until it is inside.

    >>> sorted(permute(np.arange(5), 5, seed=42).tolist())
    [0, 1, 2, 3, 4]
    """
    wide = math.isqrt(size - 1) + 1  # a number is a pair: left * wide + right
    high, wide = np.uint64(-(-size // wide)), np.uint64(wide)
    keys = np.random.SeedSequence([seed, epoch]).generate_state(6, np.uint64).reshape(3, 2)
    found = np.array(places, np.uint64)
    outside = np.arange(len(found))
    while len(outside):
        left, right = np.divmod(found[outside], wide)
        for one, two in keys:  # each line can be undone, by subtracting: so it is one to one
            left = (left + mix(right + one) % high) % high
            right = (right + mix(left + two) % wide) % wide
        found[outside] = left * wide + right
        outside = outside[found[outside] >= size]
    return found.astype(np.int64)
