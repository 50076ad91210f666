"""The engine's Muon does what torch's does, and on a processor not in bfloat16."""

import copy

import pytest
import torch
from torch.optim._muon import _zeropower_via_newtonschulz
from torch.utils._python_dispatch import TorchDispatchMode

from stages.muon import Muon, orthogonalize

SHAPES = [(8, 8), (32, 8), (8, 32), (12, 8)]


def weights():
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def steps(optimizer, matrices, count, seed=1):
    torch.manual_seed(seed)
    for _ in range(count):
        for weight in matrices:
            weight.grad = torch.randn(weight.shape)
        optimizer.step()


class Formats(TorchDispatchMode):
    """Which number formats the operations below it give back."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.seen.add(result.dtype)
        return result


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_steps_are_torchs_as_far_as_bfloat16_allows(decay):
    ours, theirs = weights(), weights()
    steps(Muon(ours, lr=0.03, weight_decay=decay), ours, 5)
    steps(torch.optim.Muon(theirs, lr=0.03, weight_decay=decay), theirs, 5)
    moved = max((w - s).abs().max() for w, s in zip(theirs, weights()))
    assert moved > 0.03
    for mine, other in zip(ours, theirs):
        torch.testing.assert_close(mine, other, rtol=0, atol=3e-3)


@pytest.mark.parametrize("shape", SHAPES)
def test_in_bfloat16_a_direction_is_torchs_to_the_bit(shape):
    torch.manual_seed(0)
    matrix = torch.randn(shape).bfloat16()
    group = Muon(weights(), 0.1, 0).param_groups[0]
    facts = [group[name] for name in ("ns_coefficients", "ns_steps", "eps")]
    theirs = _zeropower_via_newtonschulz(matrix, *facts)
    assert torch.equal(orthogonalize(matrix, group), theirs)


def test_nothing_is_rounded_to_bfloat16_on_a_processor():
    matrices = weights()
    with Formats() as formats:
        steps(Muon(matrices, lr=0.03, weight_decay=0.1), matrices, 1)
    assert formats.seen <= {torch.float32}
    with Formats() as formats:
        steps(torch.optim.Muon(matrices, lr=0.03), matrices, 1)
    assert torch.bfloat16 in formats.seen, "then torch's own would do"


def test_a_run_begun_with_torchs_goes_on_with_ours():
    ours, theirs = weights(), weights()
    first = torch.optim.Muon(theirs, lr=0.03, weight_decay=0.0)
    steps(first, theirs, 3)
    steps(torch.optim.Muon(ours, lr=0.03, weight_decay=0.0), ours, 3)
    second = Muon(ours, lr=0.03, weight_decay=0.0)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    steps(first, theirs, 2, seed=2)
    steps(second, ours, 2, seed=2)
    for mine, other in zip(ours, theirs):
        torch.testing.assert_close(mine, other, rtol=0, atol=2e-3)


def test_a_matrix_without_a_gradient_stays():
    matrices = weights()
    optimizer = Muon(matrices, lr=0.03, weight_decay=0.1)
    before = [weight.clone() for weight in matrices]
    matrices[0].grad = torch.zeros_like(matrices[0])
    matrices[1].grad = torch.ones_like(matrices[1])
    optimizer.step()
    assert torch.equal(matrices[0], before[0] * (1 - 0.03 * 0.1)), "only decayed"
    assert not torch.equal(matrices[1], before[1])
    assert all(map(torch.equal, matrices[2:], before[2:]))
