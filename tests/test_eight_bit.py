"""AdamW in eight bits: near the real one, in a quarter of its states, and never dividing by zero."""

from __future__ import annotations

import pytest
import torch

from stages import eight_bit
from stages.eight_bit import AdamW8bit, pack, unpack


def test_what_is_packed_comes_back_nearly():
    numbers = torch.randn(300, 7) * torch.logspace(-6, 3, 7)
    codes, scale = pack(numbers)
    again = unpack(codes, scale, numbers.shape)
    stretch = scale.max()
    assert (again - numbers).abs().max() < 0.02 * stretch
    assert codes.dtype == torch.int8
    assert codes.nbytes + scale.nbytes < 1.2 * numbers.numel()


def test_small_numbers_beside_a_large_one_are_not_lost():
    numbers = torch.logspace(-5, 0, 256)
    codes, _ = pack(numbers)
    equally_spaced = (127 * numbers).round()
    assert (codes == 0).float().mean() < 0.05
    assert (equally_spaced == 0).float().mean() > 0.3


def test_nothing_becomes_zero_where_a_least_code_is_asked_for():
    codes, scale = pack(torch.tensor([1.0, 0.0, 1e-9]), least=1)
    assert (unpack(codes, scale, (3,)) > 0).all()


def walk(steps: int) -> tuple[float, torch.optim.Optimizer]:
    """How far two weights have parted, as a share of the way, and the optimizer of one."""
    torch.manual_seed(0)
    ours = torch.nn.Parameter(torch.randn(64, 48))
    theirs = torch.nn.Parameter(ours.detach().clone())
    mine = AdamW8bit([ours])
    real = torch.optim.AdamW([theirs], lr=1e-3, weight_decay=0.01)
    sizes = torch.logspace(-4, 0, 48)
    for _ in range(steps):
        ours.grad = (torch.randn(64, 48) + 0.5) * sizes
        theirs.grad = ours.grad.clone()
        mine.step()
        real.step()
    way = 0.001 * steps * ours.numel() ** 0.5
    return ((ours - theirs).norm() / way).item(), mine


def test_it_walks_where_adamw_walks():
    gap, _ = walk(50)
    assert gap < 0.2


def test_its_states_take_two_bytes_a_parameter():
    _, optimizer = walk(2)
    (state,) = optimizer.state.values()
    held = sum(t.nbytes for pair in (state["mean"], state["square"]) for t in pair)
    assert held / (64 * 48) == pytest.approx(2.03, abs=0.01)


def test_a_weight_without_a_gradient_stays():
    weight = torch.nn.Parameter(torch.ones(8))
    AdamW8bit([weight]).step()
    assert torch.equal(weight, torch.ones(8))


def test_without_the_least_code_it_would_run_away(monkeypatch):
    monkeypatch.setattr(eight_bit, "pack", lambda numbers, least=0: pack(numbers))
    gap, _ = walk(50)
    assert not gap < 1
