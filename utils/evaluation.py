"""Floor 3: a score with its interval, and whether a difference is one.

The bootstrap draws the test set again, with replacement, many times: what the score does then is
what it would do on other test sets of this size. Two models are drawn with the *same* rows each
time, because they were asked the same questions.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

import numpy as np

Statistic = Callable[..., float]


@dataclass(frozen=True)
class Interval:
    """A score, and where 95% of the drawn test sets put it."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"

    @property
    def beyond_noise(self) -> bool:
        """Whether zero lies outside: for a difference, that there is one."""
        return not self.low <= 0 <= self.high


def accuracy(labels: Sequence[Any], predictions: Sequence[Any]) -> float:
    """The share of predictions that are right.

    >>> accuracy([1, 0, 1, 1], [1, 1, 1, 0])
    0.5
    """
    return float(np.mean(np.asarray(labels) == np.asarray(predictions)))


def bootstrap(statistic: Statistic, *columns: Sequence[Any], repeats: int = 1_000, seed: int = 0,
              level: float = 0.95) -> Interval:
    """The statistic of these columns, with the percentile interval of the bootstrap.

    >>> print(bootstrap(accuracy, [1, 0] * 50, [1, 1] * 50))
    0.500 [0.400, 0.600]
    """
    held = [np.asarray(column) for column in columns]
    sizes = {len(column) for column in held}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(f"columns of one length above zero are needed, not of {sorted(sizes)}")
    noise, size = np.random.default_rng(seed), sizes.pop()
    drawn = []
    for _ in range(repeats):
        rows = noise.integers(size, size=size)
        drawn.append(statistic(*(column[rows] for column in held)))
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(statistic(*held)), float(low), float(high))


def difference(statistic: Statistic, labels: Sequence[Any], ours: Sequence[Any],
               theirs: Sequence[Any], **options: Any) -> Interval:
    """What ours has over theirs on the same rows, with its interval.

    >>> difference(accuracy, [1] * 40, [1] * 40, [1, 0] * 20).beyond_noise
    True
    """
    def gap(labels: np.ndarray, ours: np.ndarray, theirs: np.ndarray) -> float:
        return statistic(labels, ours) - statistic(labels, theirs)

    return bootstrap(gap, labels, ours, theirs, **options)


def mcnemar(ours_right: Sequence[bool], theirs_right: Sequence[bool]) -> float:
    """How often chance alone parts two equal models as far: the exact two-sided test.

    Only the rows on which they disagree say anything; each is a coin for two equal models.

    >>> mcnemar([True] * 9 + [False], [False] * 9 + [True])
    0.021484375
    """
    ours, theirs = np.asarray(ours_right, dtype=bool), np.asarray(theirs_right, dtype=bool)
    if ours.shape != theirs.shape:
        raise ValueError(f"the same rows are needed: {ours.shape} against {theirs.shape}")
    won, lost = int((ours & ~theirs).sum()), int((theirs & ~ours).sum())
    tosses, fewer = won + lost, min(won, lost)
    tail = sum(comb(tosses, k) for k in range(fewer + 1))
    return min(1.0, 2 * tail / 2**tosses)
