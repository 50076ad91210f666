"""What lesson 14 computes by hand for its own statistics."""

from __future__ import annotations

from typing import Any

import lesson_cells
import numpy as np
import pytest


def run(wanted: str, **names: Any) -> dict[str, Any]:
    return lesson_cells.run_cells("14", wanted, {"np": np, **names})


def right_at(limit: float, scores: np.ndarray, labels: np.ndarray) -> float:
    return ((scores >= limit) == labels).mean()


def test_the_threshold_parts_what_can_be_parted() -> None:
    best = run("threshold")["best_threshold"]
    scores, labels = np.array([0.9, 0.1, 0.8, 0.3]), np.array([1, 0, 1, 0])
    assert best(scores, labels) == 0.8


@pytest.mark.parametrize("label", [0, 1])
def test_where_there_is_one_answer_the_threshold_gives_it(label: int) -> None:
    best = run("threshold")["best_threshold"]
    scores, labels = np.array([0.2, 0.7, 0.5]), np.full(3, label)
    assert right_at(best(scores, labels), scores, labels) == 1


def test_no_other_threshold_is_better() -> None:
    best = run("threshold")["best_threshold"]
    draw = np.random.default_rng(3)
    for _ in range(50):
        scores, labels = draw.random(12), draw.integers(0, 2, 12)
        all_limits = [*scores, np.inf]
        most = max(right_at(limit, scores, labels) for limit in all_limits)
        assert right_at(best(scores, labels), scores, labels) == most


def test_the_majority_and_the_threshold_are_those_of_the_learned_pairs() -> None:
    names = {
        "best_threshold": run("threshold")["best_threshold"],
        "cosines": np.array([0.9, 0.8, 0.1, 0.9, 0.2, 0.1]),
        "same": np.array([1, 1, 0, 1, 0, 0]),
    }
    over = run("over-majority", **names)["over_majority"]
    learned, tested = np.arange(3), np.arange(3, 6)
    # all three right, where "yes", the answer of most learned pairs, has one
    assert over(learned, tested) == pytest.approx(2 / 3)
