"""The planner against published runs, none of which its constants may have seen."""

from __future__ import annotations

import statistics

import pytest

from stages import published_runs
from stages.planner import EFFICIENCY, MACHINES, device_hours
from stages.published_runs import RUNS, judge, median_error, share_of_class


def test_half_of_the_runs_are_planned_within_a_tenth_unseen():
    assert median_error() <= 0.10


@pytest.mark.parametrize("kind", ["tuned", "small model", "library loop"])
def test_a_class_is_the_mean_of_its_runs(kind):
    assert EFFICIENCY[kind] == pytest.approx(share_of_class(kind), abs=0.005)


def test_a_run_is_not_judged_by_itself(monkeypatch):
    run = next(run for run in RUNS if run.name == "LLaMA 65B")
    others = [one.share for one in RUNS if one.kind == "tuned" and one != run]
    expected = run.share / statistics.geometric_mean(others) - 1
    assert judge(run) == pytest.approx(expected)
    # With its hours halved its own error doubles: its class's mean does not follow it.
    cheaper = published_runs.replace(run, hours=run.hours / 2)
    runs = [cheaper if one == run else one for one in RUNS]
    monkeypatch.setattr(published_runs, "RUNS", runs)
    assert judge(cheaper) + 1 == pytest.approx(2 * (expected + 1))


def test_a_run_alone_in_its_class_is_judged_by_a_share_from_elsewhere():
    (run,) = [run for run in RUNS if run.kind == "tuned, H100"]
    assert judge(run) == pytest.approx(run.share / 0.40 - 1)


@pytest.mark.parametrize(
    "name", ["Llama 2 7B", "Llama 2 70B", "BLOOM 176B", "Llama 3.1 405B"]
)
def test_large_runs_are_met_within_a_tenth(name):
    run = next(run for run in RUNS if run.name == name)
    machine = MACHINES[run.machine]
    planned = device_hours(run.shape, run.tokens, machine, run.checkpointing)
    assert planned == pytest.approx(run.hours, rel=0.10)


def test_an_operation_count_by_hand():
    run = next(run for run in RUNS if run.name == "BLOOM 176B")
    # 6 * 176e9 + 12 * 70 * 14,336 * 2,048 operations a token, at 3/4 of 312e12 a second
    operations = 1.056e12 + 24_662_507_520
    assert run.plan_hours(1.0) == pytest.approx(
        operations * 366e9 / (0.75 * 312e12) / 3600
    )
