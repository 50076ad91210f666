"""The four bits that lesson 17 makes by hand."""

from __future__ import annotations

from typing import Any

import lesson_cells
import pytest
import torch


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    found: dict[str, Any] = {"torch": torch, "device": torch.device("cpu")}
    for wanted in ("codes", "unpacked", "four-bit"):
        exec(lesson_cells.cell("17", wanted), found)
    return found


@pytest.fixture
def layer() -> torch.nn.Linear:
    torch.manual_seed(3)
    return torch.nn.Linear(128, 32, bias=False)


def test_every_weight_takes_the_nearest_of_sixteen_values(names, layer) -> None:
    small = names["FourBit"](layer)
    blocks = layer.weight.detach().view(-1, 64)
    scales = blocks.abs().amax(1, keepdim=True)
    away = (blocks / scales).unsqueeze(-1) - names["CODES"]
    nearest = names["CODES"][away.abs().argmin(-1)] * scales
    assert torch.equal(small.weight.view(-1, 64), nearest)


def test_half_a_byte_for_a_weight_and_a_scale_for_each_block(names, layer) -> None:
    small = names["FourBit"](layer)
    assert small.packed.nbytes == layer.weight.numel() // 2
    assert small.scales.numel() == layer.weight.numel() // 64


def test_product_and_gradient_are_those_of_the_unpacked_weight(
    names, layer
) -> None:
    small = names["FourBit"](layer)
    rows = torch.randn(5, 128, requires_grad=True)
    ours, plain = small(rows), rows @ small.weight.T
    assert torch.equal(ours, plain)
    [own] = torch.autograd.grad(ours.square().sum(), rows)
    [right] = torch.autograd.grad(plain.square().sum(), rows)
    assert torch.allclose(own, right, rtol=1e-5)


def test_a_bias_is_not_lost_in_silence(names) -> None:
    with pytest.raises(AssertionError, match="bias"):
        names["FourBit"](torch.nn.Linear(64, 8))
