"""Intervals and tests of difference: each property by itself."""

from __future__ import annotations

import numpy as np
import pytest

from stages.evaluation import (
    Interval,
    accuracy,
    bootstrap,
    difference,
    gain,
    holm,
    perplexity,
)


def coins(share: float, size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).random(size) < share


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    held = 0
    for seed in range(100):
        right = coins(0.8, 200, seed)
        interval = bootstrap(np.mean, right, repeats=200, seed=seed)
        held += interval.low <= 0.8 <= interval.high
    assert 87 <= held <= 100


def test_four_times_the_rows_halve_the_interval() -> None:
    narrow, wide = (bootstrap(np.mean, coins(0.7, n, 1)) for n in (4_000, 1_000))
    assert (wide.high - wide.low) / (narrow.high - narrow.low) == pytest.approx(
        2, rel=0.15
    )


def test_the_same_seed_gives_the_same_interval() -> None:
    rows = coins(0.5, 50, 3)
    assert bootstrap(np.mean, rows, seed=4) == bootstrap(np.mean, rows, seed=4)
    assert bootstrap(np.mean, rows, seed=4) != bootstrap(np.mean, rows, seed=5)


def test_a_model_does_not_differ_from_itself() -> None:
    labels = coins(0.5, 100, 0)
    same = difference(accuracy, labels, labels, labels)
    assert same == Interval(0.0, 0.0, 0.0) and not same.beyond_noise


def test_paired_rows_see_a_difference_that_two_separate_intervals_hide() -> None:
    labels = np.ones(400, dtype=int)
    theirs = coins(0.70, 400, 5).astype(int)
    ours = theirs.copy()
    ours[np.flatnonzero(theirs == 0)[:12]] = 1
    one, other = (
        bootstrap(accuracy, labels, ours),
        bootstrap(accuracy, labels, theirs),
    )
    assert (
        one.low < other.high
        and difference(accuracy, labels, ours, theirs).beyond_noise
    )


@pytest.mark.parametrize("columns", [([1, 2], [1]), ([],)])
def test_ragged_or_empty_columns_are_refused(columns: tuple) -> None:
    with pytest.raises(ValueError, match="one length above zero"):
        bootstrap(lambda *_: 0.0, *columns)


def test_two_models_are_asked_the_same_rows_each_time() -> None:
    labels = coins(0.5, 300, 1)
    answers = coins(0.5, 300, 2)
    gap = difference(accuracy, labels, answers, answers)
    assert (gap.low, gap.value, gap.high) == (0, 0, 0)


def test_perplexity_counts_the_choices_that_a_loss_leaves() -> None:
    assert perplexity(float(np.log(10))) == pytest.approx(10)
    assert perplexity(1e4) == float("inf")


def test_the_interval_is_of_95_percent() -> None:
    heads = np.arange(400) < 200
    interval = bootstrap(np.mean, heads, repeats=4_000)
    width = 2 * 1.96 * 0.5 / 20
    assert interval.high - interval.low == pytest.approx(width, rel=0.06)


def packages_of(count: int, size: int) -> np.ndarray:
    return np.repeat(np.arange(count), size)


def test_a_gain_of_one_package_alone_is_not_shown() -> None:
    units = packages_of(8, 50)
    theirs = coins(0.7, 400, 1).astype(float)
    ours = np.where(units == 3, 1.0, theirs)
    by_question = gain(ours, theirs, np.arange(400))
    by_package = gain(ours, theirs, units, "packages")
    assert by_question.low > 0
    assert by_package.low <= 0
    assert by_package.value == by_question.value == pytest.approx(15 / 400)


def test_a_gain_that_one_seed_made_is_not_shown() -> None:
    theirs = coins(0.5, 400, 2).astype(float)
    lucky = np.maximum(theirs, coins(0.3, 400, 3))
    seeds = np.array([lucky, theirs, theirs])
    assert gain(seeds[:1], theirs, np.arange(400)).low > 0
    assert gain(seeds, theirs, np.arange(400)).low <= 0


def test_both_models_are_drawn_on_the_same_units_and_weighed_by_size() -> None:
    units = np.array([0] * 30 + [1])
    theirs = coins(0.5, 31, 4).astype(float)
    assert gain(theirs, theirs, units).low == gain(theirs, theirs, units).high == 0
    ours = theirs + np.where(units == 0, 0.0, 1.0)
    drawn = gain(ours, theirs, units)
    assert drawn.value == pytest.approx(1 / 31)
    assert (drawn.low, drawn.high) == (0, pytest.approx(1))


def test_the_interval_of_a_gain_holds_the_truth_about_as_often_as_it_says() -> None:
    units, held = packages_of(40, 5), 0
    for seed in range(100):
        noise = np.random.default_rng(seed)
        shared = noise.normal(0.1, 0.2, 40)[units]
        gaps = shared + noise.normal(0, 0.3, 200)
        interval = gain(gaps, np.zeros(200), units, repeats=500, seed=seed)
        held += interval.low <= 0.1 <= interval.high
    assert 87 <= held <= 99


def test_a_gain_names_what_it_drew_and_refuses_what_does_not_fit() -> None:
    found = gain(np.ones((3, 6)), np.zeros(6), list("aabbcc"), "packages")
    assert found.drawn == "3 packages, 3 seeds against 1"
    assert str(found) == "+1.000 [+1.000, +1.000]" and found.p <= 2e-4
    for wrong in ([1, 2], []):
        with pytest.raises(ValueError, match="the same questions"):
            gain([1.0] * 3, [0.0] * 3, wrong)


def test_holm_multiplies_the_smallest_by_the_number_and_never_falls() -> None:
    assert holm([0.02, 0.01, 0.015]) == pytest.approx([0.03, 0.03, 0.03])
    assert holm([0.5, 0.9, 0.8]) == [1, 1, 1]
    assert holm([0.2]) == [0.2] and holm([]) == []
