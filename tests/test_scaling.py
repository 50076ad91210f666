"""The planner: its formulas against cases worked out by hand, its choices against common sense."""
from __future__ import annotations

from dataclasses import replace

import pytest

from stages import planner as scaling
from stages.planner import Layout, MACHINES, Shape

GPT2 = Shape(124e6, 12, 768, 1024, 50257)
LARGE = Shape(70e9, 80, 8192, 4096, 128_000)
H100 = MACHINES["H100"]


def test_operations_of_a_token_are_those_of_the_literature():
    assert GPT2.flops_per_token() == 6 * 124e6 + 12 * 12 * 768 * 1024
    assert replace(GPT2, context=0).flops_per_token() == 6 * 124e6


def test_states_take_eighteen_bytes_and_only_sharding_spreads_them_over_copies():
    assert scaling.state_bytes(GPT2, Layout(1, 1, 1, False, False)) == 18 * 124e6
    assert scaling.state_bytes(GPT2, Layout(1, 1, 8, False, False)) == 18 * 124e6
    assert scaling.state_bytes(GPT2, Layout(1, 1, 8, True, False)) == 18 * 124e6 / 8
    assert scaling.state_bytes(GPT2, Layout(2, 2, 2, True, False)) == 18 * 124e6 / 8


def test_checkpointing_saves_activations_and_costs_time():
    kept, again = (Layout(1, 1, 1, False, flag) for flag in (False, True))
    assert scaling.activation_bytes(LARGE, again) < scaling.activation_bytes(LARGE, kept) / 5
    assert scaling.activation_bytes(GPT2, kept, 4) == 4 * scaling.activation_bytes(GPT2, kept, 1)
    hours = [scaling.device_hours(GPT2, 1e9, H100, flag) for flag in (False, True)]
    assert hours[1] == pytest.approx(hours[0] / scaling.RECOMPUTE)


def test_a_small_model_lies_whole_and_a_large_one_is_divided():
    assert scaling.choose_layout(GPT2, H100, 1, 5e5)[0] == Layout(1, 1, 1, False, False)
    layout, reasons = scaling.choose_layout(LARGE, H100, 1024, 2**22)
    assert layout.devices == 1024 and layout.sharded
    assert scaling.memory_per_device(LARGE, layout) <= 0.9 * H100.memory
    assert any("too much" in reason for reason in reasons)


def test_every_layout_uses_every_device():
    for devices in (1, 2, 8, 64, 1024):
        assert {layout.devices for layout, _ in scaling.layouts(H100, devices)} == {devices}


def test_what_cannot_fit_says_so():
    with pytest.raises(ValueError, match="too much.*take other devices"):
        scaling.choose_layout(LARGE, MACHINES["T4"], 1, 5e5)
    with pytest.raises(ValueError, match="less than one row"):
        scaling.choose_layout(GPT2, H100, 1024, 4096)


def test_twice_the_tokens_cost_twice_as_much():
    once, twice = (scaling.plan(GPT2, tokens, H100, 8) for tokens in (1e10, 2e10))
    for quantity in ("days", "energy", "money"):
        assert getattr(twice, quantity) == pytest.approx(2 * getattr(once, quantity))


def test_energy_and_money_follow_from_the_hours():
    found = scaling.plan(GPT2, 1e10, H100, 8)
    hours = found.days * 24 * 8
    assert found.money == pytest.approx(hours * H100.hourly)
    assert found.energy == pytest.approx(hours * H100.watts / 1000 * scaling.OVERHEAD)


def test_more_devices_are_never_slower_and_traffic_bounds_a_step():
    steps = [scaling.plan(GPT2, 1e10, H100, n, 2**22).step for n in (1, 8, 64, 512)]
    assert steps == sorted(steps, reverse=True)
    slow = replace(H100, inside=1e6, outside=1e6)
    assert scaling.plan(GPT2, 1e10, slow, 8).communication == pytest.approx(1)
    assert scaling.plan(GPT2, 1e10, H100, 1).communication == 0


def test_sharded_traffic_grows_with_the_passes_and_that_of_copies_does_not():
    for sharded, growth in ((True, 4), (False, 1)):
        layout = Layout(1, 1, 64, sharded, False)
        once, often = (scaling.communication_seconds(LARGE, layout, H100, 8, n) for n in (1, 4))
        assert often == pytest.approx(growth * once)
    layout = Layout(1, 1, 64, True, False)
    steps = [scaling.step_seconds(LARGE, layout, H100, 2**22, rows)[1] for rows in (1, 2, 16)]
    assert steps[0] == pytest.approx(2 * steps[1]) == pytest.approx(16 * steps[2])


def test_a_pass_takes_the_most_rows_that_fit():
    layout = Layout(1, 1, 8, True, False)
    rows = scaling.rows_that_fit(GPT2, layout, H100, 2**22)
    need = [scaling.memory_per_device(GPT2, layout, n) for n in (rows, 2 * rows)]
    assert need[0] <= 0.9 * H100.memory < need[1]
    assert scaling.rows_that_fit(GPT2, layout, H100, 8 * 1024 * 5) == 4  # five rows, a power of two
    assert scaling.rows_that_fit(LARGE, Layout(1, 1, 1, False, False), H100, 2**22) == 0
    found = scaling.plan(GPT2, 1e10, H100, 8, 2**22)
    assert found.memory == scaling.memory_per_device(GPT2, found.layout, found.rows_at_once)


def test_optimal_sizes_spend_the_budget_and_cannot_be_bettered():
    def loss(n: float, d: float) -> float:
        return 482 / n**0.348 + 2085 / d**0.366

    for budget in (1e18, 5.76e23):
        n, d = scaling.optimal_sizes(budget)
        assert 6 * n * d == pytest.approx(budget)
        for other in (0.9, 1.1):
            assert loss(n, d) < loss(n * other, d / other)
    assert 60e9 < n < 85e9  # Chinchilla has 70 billion parameters


@pytest.mark.parametrize("shape, tokens, name, how, hours", [
    (Shape(6.7e9, 32, 4096, 4096), 2e12, "A100", {}, 184320),  # Llama 2 7B
    (Shape(69e9, 80, 8192, 4096), 2e12, "A100", {}, 1720320),  # Llama 2 70B
    (Shape(176e9, 70, 14336, 2048), 366e9, "A100", {"checkpointing": True}, 1082990),  # BLOOM
    (Shape(405e9, 126, 16384, 8192), 15.6e12, "H100", {}, 30.84e6)])  # Llama 3.1 405B
def test_published_runs_are_met_within_a_quarter(shape, tokens, name, how, hours):
    assert scaling.device_hours(shape, tokens, MACHINES[name], **how) == pytest.approx(hours, rel=0.25)
