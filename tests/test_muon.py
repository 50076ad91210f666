"""Two Muons that do what torch's does: the engine's, in float32 on a processor, and the batched one."""

import copy
import subprocess
import sys

import pytest
import torch
from torch.optim._muon import _zeropower_via_newtonschulz
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import muon
from benchmarks.muon import ROUNDS, BatchedMuon, orthogonalize
from stages.muon import Muon
from stages.muon import orthogonalize as direction_of
from utils.errors import ROOT

SHAPES = [(8, 8), (32, 8), (8, 32), (8, 12), (8, 8), (12, 8)]


def parameters(seed=0):
    torch.manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def steps(optimizer, weights, count, seed=1):
    torch.manual_seed(seed)
    for _ in range(count):
        for weight in weights:
            weight.grad = torch.randn(weight.shape)
        optimizer.step()


def by_hand(matrix):
    """The rounds as they are written down, one matrix, float64."""
    x = matrix.double()
    x = x.T if x.shape[0] > x.shape[1] else x
    x = x / x.norm()
    for a, b, c in ROUNDS:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


@pytest.mark.parametrize("shape", [(8, 8), (8, 12), (8, 16), (8, 64), (1, 5)])
def test_a_batch_is_orthogonalized_as_each_matrix_by_hand(shape):
    torch.manual_seed(0)
    batch = torch.randn(3, *shape)
    wanted = torch.stack([by_hand(matrix) for matrix in batch])
    torch.testing.assert_close(
        orthogonalize(batch).double(), wanted, rtol=1e-4, atol=1e-5
    )


def test_wide_and_square_ways_agree_where_values_are_tiny():
    torch.manual_seed(0)
    left, right = (
        torch.linalg.qr(torch.randn(8, 8))[0],
        torch.linalg.qr(torch.randn(64, 8))[0],
    )
    matrix = left @ torch.diag(torch.logspace(0, -5, 8)) @ right.T
    torch.testing.assert_close(
        orthogonalize(matrix[None])[0].double(),
        by_hand(matrix),
        rtol=1e-2,
        atol=1e-3,
    )


def test_a_gradient_of_zeros_moves_nothing():
    assert not orthogonalize(torch.zeros(2, 4, 16)).any()
    assert not orthogonalize(torch.zeros(2, 4, 4)).any()


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_many_steps_lead_where_torchs_lead(decay):
    ours, theirs = parameters(), parameters()
    facts = {"lr": 0.02, "weight_decay": decay}
    steps(BatchedMuon(ours, **facts), ours, 5)
    steps(torch.optim.Muon(theirs, **facts), theirs, 5)
    start = parameters()
    for one, two, old in zip(ours, theirs, start):
        # Torch's rounds are of bfloat16, which has three digits.
        moved = (two - old).norm()
        assert (one - two).norm() < 0.03 * moved


def test_one_goes_on_with_the_state_of_the_other():
    ours, theirs = parameters(), parameters()
    first = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.0)
    steps(first, theirs, 2)
    second = BatchedMuon(ours, lr=0.02, weight_decay=0.0)
    with torch.no_grad():
        for one, two in zip(ours, theirs):
            one.copy_(two)
    for one, two in zip(ours, theirs):
        second.state[one] = {
            name: value.clone() for name, value in first.state[two].items()
        }
    steps(first, theirs, 1, seed=3)
    steps(second, ours, 1, seed=3)
    for one, two in zip(ours, theirs):
        assert (one - two).abs().max() < 2e-3


def test_what_has_no_gradient_stays_and_the_rate_is_the_groups():
    weights = parameters()
    before = [weight.detach().clone() for weight in weights]
    optimizer = BatchedMuon(weights, lr=0.02, weight_decay=0.5)
    weights[0].grad = torch.ones(8, 8)
    optimizer.step()
    moved = [not torch.equal(*pair) for pair in zip(weights, before)]
    assert moved == [True] + [False] * 5
    held = weights[0].detach().clone()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert torch.equal(weights[0], held)


def test_a_vector_is_refused():
    with pytest.raises(ValueError, match="for matrices"):
        BatchedMuon([torch.nn.Parameter(torch.zeros(3))])


def test_its_row_of_the_table(monkeypatch):
    real = muon.matrices
    monkeypatch.setattr(muon, "matrices", lambda width, layers: real(8, 1))
    (row,) = muon.rows(repeats=1)
    assert row["unit"] == "CPU ms" and row["ours"] > 0


# the engine's ------------------------------------------------------------------------------------


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
    ours, theirs = parameters(), parameters()
    steps(Muon(ours, lr=0.03, weight_decay=decay), ours, 5)
    steps(torch.optim.Muon(theirs, lr=0.03, weight_decay=decay), theirs, 5)
    moved = max((w - s).abs().max() for w, s in zip(theirs, parameters()))
    assert moved > 0.03
    for mine, other in zip(ours, theirs):
        torch.testing.assert_close(mine, other, rtol=0, atol=3e-3)


@pytest.mark.parametrize("shape", SHAPES)
def test_in_bfloat16_a_direction_is_torchs_to_the_bit(shape):
    torch.manual_seed(0)
    matrix = torch.randn(shape).bfloat16()
    group = Muon(parameters(), 0.1, 0).param_groups[0]
    facts = [group[name] for name in ("ns_coefficients", "ns_steps", "eps")]
    theirs = _zeropower_via_newtonschulz(matrix, *facts)
    assert torch.equal(direction_of(matrix, group), theirs)


def test_nothing_is_rounded_to_bfloat16_on_a_processor():
    matrices = parameters()
    with Formats() as formats:
        steps(Muon(matrices, lr=0.03, weight_decay=0.1), matrices, 1)
    assert formats.seen <= {torch.float32}
    with Formats() as formats:
        steps(torch.optim.Muon(matrices, lr=0.03), matrices, 1)
    assert torch.bfloat16 in formats.seen, "then torch's own would do"


def test_a_run_begun_with_torchs_goes_on_with_ours():
    ours, theirs = parameters(), parameters()
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
    matrices = parameters()
    optimizer = Muon(matrices, lr=0.03, weight_decay=0.1)
    before = [weight.clone() for weight in matrices]
    matrices[0].grad = torch.zeros_like(matrices[0])
    matrices[1].grad = torch.ones_like(matrices[1])
    optimizer.step()
    assert torch.equal(matrices[0], before[0] * (1 - 0.03 * 0.1)), "only decayed"
    assert not torch.equal(matrices[1], before[1])
    assert all(map(torch.equal, matrices[2:], before[2:]))


EXCHANGES = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from stages.muon import Muon

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
mesh = init_device_mesh("cpu", (2,))
for shape in ((64, 256), (256, 64)):
    whole = distribute_tensor(torch.zeros(shape), mesh, [Shard(0)])
    weight = torch.nn.Parameter(whole)
    weight.grad = distribute_tensor(torch.ones(shape), mesh, [Shard(0)])
    with CommDebugMode() as counted:
        Muon([weight], lr=0.1, weight_decay=0.0).step()
    print(counted.get_total_counts())
"""


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="counted with torch 2.13"
)
def test_a_matrix_in_shards_is_exchanged_as_often_as_the_page_on_launching_says():
    command = [sys.executable, "-c", EXCHANGES]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    )
    wide, tall = done.stdout.split()
    page = " ".join((ROOT / "launch" / "README.md").read_text("utf-8").split())
    assert (
        f"{wide} exchanges for a wide or square matrix and {tall} for a tall one"
        in page
    )
