"""A score with its interval, and whether a difference is one.

The bootstrap draws the test set again, with replacement, many times: what the score does then is
what it would do on other test sets of this size. Two models are drawn with the *same* rows each
time, because they were asked the same questions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Statistic = Callable[..., float]
Values = Sequence[Any]


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
        holds_zero = self.low <= 0 <= self.high
        return not holds_zero


def accuracy(labels: Values, predictions: Values) -> float:
    """The share of predictions that are right.

    >>> accuracy([1, 0, 1, 1], [1, 1, 1, 0])
    0.5
    """
    asked = np.asarray(labels)
    right = asked == np.asarray(predictions)
    share = right.mean()
    return float(share)


def bootstrap(
    statistic: Statistic, *columns: Values, repeats: int = 1_000, seed: int = 0
) -> Interval:
    """The statistic of these columns, with the 95% percentile interval of the bootstrap.

    >>> print(bootstrap(accuracy, [1, 0] * 50, [1, 1] * 50))
    0.500 [0.400, 0.600]
    """
    arrays = [np.asarray(column) for column in columns]
    sizes = {len(array) for array in arrays}
    if len(sizes) != 1 or 0 in sizes:
        what = "columns of one length above zero are needed"
        raise ValueError(f"{what}, not of {sorted(sizes)}")
    noise = np.random.default_rng(seed)
    size = sizes.pop()
    values = []
    for _ in range(repeats):
        rows = noise.integers(size, size=size)
        values.append(statistic(*(array[rows] for array in arrays)))
    low, high = np.quantile(values, [0.025, 0.975])
    return Interval(float(statistic(*arrays)), float(low), float(high))


def difference(
    statistic: Statistic,
    labels: Values,
    ours: Values,
    theirs: Values,
    **options: Any,
) -> Interval:
    """What ours has over theirs on the same rows, with its interval.

    >>> difference(accuracy, [1] * 40, [1] * 40, [1, 0] * 20).beyond_noise
    True
    """

    def gap(labels: np.ndarray, ours: np.ndarray, theirs: np.ndarray) -> float:
        return statistic(labels, ours) - statistic(labels, theirs)

    return bootstrap(gap, labels, ours, theirs, **options)


@dataclass(frozen=True)
class Gain:
    """What ours has over theirs, where 95% of the draws put it, and what was drawn."""

    value: float
    low: float
    high: float
    p: float
    drawn: str

    def __str__(self) -> str:
        return f"{self.value:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def gain(
    ours: Values,
    theirs: Values,
    units: Values,
    name: str = "questions",
    repeats: int = 10_000,
    seed: int = 0,
) -> Gain:
    """What ours has over theirs on the same questions; draws whole units and training seeds.

    Points are a line for each training seed; a model without training is a single line.

    >>> found = gain([[1, 1, 0, 1], [1, 1, 1, 1]], [0, 1, 0, 0], list("aabb"), "packages")
    >>> print(found, "|", found.drawn)
    +0.625 [+0.500, +1.000] | 2 packages, 2 seeds against 1
    """
    tables = [np.atleast_2d(np.asarray(points, float)) for points in (ours, theirs)]
    names, place = np.unique(np.asarray(units), return_inverse=True)
    if {table.shape[1] for table in tables} != {len(place)} or not len(place):
        raise ValueError("ours, theirs and units must speak of the same questions")
    noise = np.random.default_rng(seed)
    chosen = draw_counts(len(names), repeats, noise)
    questions = chosen @ np.bincount(place)
    means = []
    for table in tables:
        sums = np.array([np.bincount(place, line) for line in table])
        seeds = draw_counts(len(table), repeats, noise) / len(table)
        means.append(((seeds @ sums) * chosen).sum(1) / questions)
    value = float(tables[0].mean() - tables[1].mean())
    said = f"{len(names)} {name}, {seeds_drawn(*map(len, tables))}"
    return sum_up(means[0] - means[1], value, said)


def sum_up(draws: np.ndarray, value: float, drawn: str) -> Gain:
    """The gain with the middle 95% of its draws, and how rarely they lie on the other side of 0."""
    low, high = np.quantile(draws, [0.025, 0.975])
    tail = min((draws <= 0).mean(), (draws >= 0).mean())
    chance = np.clip(2 * tail, 2 / len(draws), 1)
    return Gain(value, float(low), float(high), float(chance), drawn)


def seeds_drawn(ours: int, theirs: int) -> str:
    """How many training seeds stand on both sides, in words."""
    plural = "" if ours == 1 else "s"
    return f"{ours} seed{plural} against {theirs}"


def draw_counts(size: int, repeats: int, noise: np.random.Generator) -> np.ndarray:
    """How often each of `size` things is drawn when `size` are drawn with replacement."""
    return noise.multinomial(size, np.full(size, 1 / size), repeats)


def holm(chances: Sequence[float]) -> list[float]:
    """The p-values of several tests, raised by Holm's way to allow for their number.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(chances)), key=lambda place: chances[place])
    raised, highest = [0.0] * len(chances), 0.0
    for tried, place in enumerate(order):
        left = len(chances) - tried
        highest = max(highest, min(1.0, left * chances[place]))
        raised[place] = highest
    return raised


def perplexity(loss: float) -> float:
    """The exponential of a loss; infinite where a float ends, and not an error.

    >>> perplexity(0.0), perplexity(1e4)
    (1.0, inf)
    """
    if loss > 709:
        return math.inf
    return math.exp(loss)


def bits_per_byte(loss: float, tokens: int, size: int) -> float:
    """A mean loss in nats a token, as bits for each byte of the text that the tokens spell.

    >>> bits_per_byte(math.log(2), tokens=50, size=100)
    0.5
    """
    bits = loss / math.log(2)
    return bits * tokens / size


def gain_of_sums(
    score: Callable[[np.ndarray], Any],
    ours: Values,
    theirs: Values,
    name: str = "messages",
    repeats: int = 10_000,
    seed: int = 0,
) -> Gain:
    """Like `gain`, for a score of summed counts, such as BLEU's or chrF's.

    Ours and theirs hold an array for each training seed, with the counts of every message;
    `score` takes sums of counts, of one test set or of many at once.

    >>> counts = np.ones((4, 2))
    >>> print(gain_of_sums(lambda sums: sums[..., 0], [counts, 3 * counts], [counts]))
    +4.000 [+0.000, +8.000]
    """
    noise = np.random.default_rng(seed)
    messages = len(ours[0])
    chosen = draw_counts(messages, repeats, noise)
    drawn, value = np.zeros(repeats), 0.0
    for runs, sign in ((ours, 1), (theirs, -1)):
        seeds = draw_counts(len(runs), repeats, noise) / len(runs)
        for place, run in enumerate(runs):
            if len(run) != messages:
                raise ValueError("all runs must speak of the same messages")
            sums = (chosen @ run.reshape(messages, -1)).reshape(-1, *run.shape[1:])
            drawn += sign * seeds[:, place] * score(sums)
            value += sign * float(score(run.sum(0))) / len(runs)
    said = f"{messages} {name}, {seeds_drawn(len(ours), len(theirs))}"
    return sum_up(drawn, value, said)
