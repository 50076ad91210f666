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
    # While a token of each of the four is written, 4 / 200 of a prompt is read.
    assert load.gap == pytest.approx(load.step + 4 / 200 * prompt)
    assert load.reading == pytest.approx(4 / 200 * prompt / load.gap)
    assert load.batch / load.gap == pytest.approx(load.tokens)
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


def test_the_constants_are_what_the_runs_on_one_card_say():
    """And no other: what is judged later, or is in doubt, must not have made them."""
    assert len(plan.FITTED) == 8
    assert {one.devices for one in plan.FITTED} == {1}
    assert not {*plan.FITTED} & {*plan.UNSEEN}
    assert plan.fit(plan.FITTED) == plan.GOOD_SERVER


def test_no_run_alone_makes_the_constants():
    for one in plan.FITTED:
        others = [other for other in plan.FITTED if other is not one]
        assert abs(plan.judge(one, plan.fit(others))) < 0.15


def test_runs_on_one_card_that_no_constant_knows_are_planned_well():
    runs = [one for one in plan.UNSEEN if one.devices == 1]
    assert len(runs) == 5
    assert max(abs(plan.judge(one, plan.GOOD_SERVER)) for one in runs) < 0.17


def test_the_column_is_of_each_card_and_not_of_all():
    """Were it of all, no run on several cards would come near a plan that has seen none of them."""
    several = [one for one in plan.UNSEEN if one.devices > 1]
    as_each = {one: one.tokens / one.plan(plan.GOOD_SERVER) for one in several}
    as_all = [share / one.devices for one, share in as_each.items()]
    assert max(as_all) < 0.55
    pairs = [share for one, share in as_each.items() if one.devices == 2]
    assert len(pairs) == 3 and all(0.94 < share < 1.05 for share in pairs)
    assert sum(0.8 < share < 1.05 for share in as_each.values()) == 6
