"""The roofline of serving, by hand and against what was published."""

import pytest

from stages import serving_plan as plan
from stages.machines import MACHINES
from stages.serving_plan import Efficiency, Served, Traffic
from utils.errors import CourseError

A100 = MACHINES["A100"]
FULL = Efficiency(1, 1)


def test_a_step_fetches_all_weights_and_the_cache_of_every_answer():
    model = Served("round", 1e9, 10, 1000)
    load = plan.carry(model, Traffic(100, 200), A100, FULL, batch=4)
    # 2 GB of weights; 2 × 10 layers × 1000 × 2 bytes × 200 tokens on average, for each of four.
    fetched = 2e9 + 4 * 200 * 40_000
    assert load.step == pytest.approx(fetched / 2039e9)
    prompt = (2 * 1e9 * 100 + 2 * 10 * 1000 * 100**2) / 312e12
    assert load.first == pytest.approx(prompt)
    assert load.requests == pytest.approx(4 / (4 * prompt + 200 * load.step))
    assert load.tokens == pytest.approx(200 * load.requests)
    assert load.dollars == pytest.approx(1.8 / 3600 / load.tokens * 1e6)


def test_a_batch_that_is_large_enough_is_bound_by_arithmetic():
    model = Served("narrow", 1e9, 1, 1)
    one = plan.carry(model, Traffic(1, 100), A100, FULL, batch=1)
    assert plan.carry(model, Traffic(1, 100), A100, FULL, 8).step == pytest.approx(
        one.step
    )
    many = plan.carry(model, Traffic(1, 100), A100, FULL, batch=10_000)
    assert many.step == pytest.approx(2 * 1e9 * 10_000 / 312e12)


def test_memory_decides_how_many_fit_and_none_is_an_error():
    model = Served("round", 1e9, 10, 1000)
    assert plan.largest_batch(model, Traffic(500, 500), A100) == int(70e9 / 40e6)
    assert plan.largest_batch(model, Traffic(500, 500), A100, 2) == int(
        142e9 / 40e6
    )
    with pytest.raises(CourseError, match="not even one answer"):
        plan.carry(plan.LLAMA_70B, Traffic(10, 10), A100, FULL)


def test_the_constants_are_what_the_published_runs_say():
    assert plan.fit(plan.PUBLISHED) == plan.GOOD_SERVER


def test_runs_that_no_constant_knows_are_planned_well():
    errors = [abs(plan.judge(one, plan.GOOD_SERVER)) for one in plan.HELD_OUT]
    assert plan.median_error(plan.HELD_OUT, plan.GOOD_SERVER) < 0.10
    assert max(errors) < 0.25


def test_each_published_run_is_planned_without_knowing_it():
    errors = []
    for one in plan.PUBLISHED:
        others = [other for other in plan.PUBLISHED if other is not one]
        errors.append(abs(plan.judge(one, plan.fit(others))))
    assert sorted(errors)[len(errors) // 2] < 0.15


def test_the_column_is_of_each_card_and_not_of_all():
    """Were it of all, no run on several cards would come near the plan."""
    several = [one for one in plan.PUBLISHED if one.devices > 2]
    as_all = [
        one.tokens / (one.plan(plan.GOOD_SERVER) * one.devices) for one in several
    ]
    assert max(as_all) < 0.3
    as_each = [one.tokens / one.plan(plan.GOOD_SERVER) for one in several]
    assert sum(share > 0.85 for share in as_each) >= 3
