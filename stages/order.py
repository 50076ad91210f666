"""Which row is read at which position, by arithmetic: no list of rows is kept, and no state."""

from __future__ import annotations

import math

import numpy as np


def shuffle_epochs(positions: np.ndarray, size: int, seed: int) -> np.ndarray:
    """The rows at these positions where `size` rows come again and again, each time in a new order."""
    epochs, rows = np.divmod(positions, size)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        rows[here] = permute(rows[here], size, seed, int(epoch))
    return rows


def permute(places: np.ndarray, size: int, seed: int, epoch: int = 0) -> np.ndarray:
    """Where each place of `0 … size - 1` goes: a Feistel network, walked until it is inside.

    >>> permute(np.arange(5), 5, seed=42).tolist()
    [3, 1, 4, 2, 0]
    """
    # a number is a pair: left * wide + right
    width = math.isqrt(size - 1) + 1
    wide = np.uint64(width)
    high = np.uint64(-(-size // width))
    state = np.random.SeedSequence([seed, epoch]).generate_state(6, np.uint64)
    rows = np.array(places, np.uint64)
    outside = np.arange(len(rows))
    while len(outside):
        left, right = np.divmod(rows[outside], wide)
        # each line can be undone, by subtracting: so the whole is one to one
        for one, two in state.reshape(3, 2):
            left = (left + scatter_bits(right + one) % high) % high
            right = (right + scatter_bits(left + two) % wide) % wide
        rows[outside] = left * wide + right
        outside = outside[rows[outside] >= size]
    return rows.astype(np.int64)


def scatter_bits(numbers: np.ndarray) -> np.ndarray:
    """Scramble 64-bit numbers (splitmix64): each bit of a result depends on each bit of its number."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def take_turns(rows: list[int]) -> np.ndarray:
    """Whose turn it is at each place of a turn: each source as evenly spread as its rows allow.

    >>> take_turns([3, 1]).tolist()
    [0, 0, 1, 0]
    """
    places = [(np.arange(count) + 0.5) / count for count in rows]
    whose = [np.full(count, number) for number, count in enumerate(rows)]
    order = np.argsort(np.concatenate(places), kind="stable")
    return np.concatenate(whose)[order]


def count_before(whose: np.ndarray) -> np.ndarray:
    """How many places before each one belong to the same source.

    >>> count_before(np.array([0, 0, 1, 0])).tolist()
    [0, 1, 0, 2]
    """
    counts = np.empty(len(whose), np.int64)
    for source in np.unique(whose):
        mine = whose == source
        counts[mine] = np.arange(mine.sum())
    return counts
