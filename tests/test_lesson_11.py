"""The strategies of lesson 11, in its own cells: as they are, and with one line broken.

As they are, losses and norms are those of one process, and bytes those of the formulas. Broken, the
lesson's own checks must refuse them.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import nbformat
import numpy as np
import pytest
import torch
import torch.distributed as dist

from stages.launch import launch, rank_device, start_method
from stages.wire import can_count, wire_bytes
from utils.errors import ROOT

slow = pytest.mark.slow
forks = pytest.mark.skipif(
    start_method().value != "fork", reason="functions of a test travel by fork"
)
# What stands before the strategies: rows, model, judge.
GROUND = "stages rows model norm train alone same"
CUTS = "fsdp zero1"


def sources() -> dict[str, str]:
    """The code of the lesson's cells by name, each with the parts before it."""
    path = ROOT / "notebooks" / "11_sharding.ipynb"
    code: dict[str, str] = {}
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            name = cell.id.split("-part")[0]
            code[name] = code.get(name, "") + cell.source + "\n\n"
    return code


def imports() -> str:
    """The imports of all cells."""
    lines = []
    for source in sources().values():
        for node in ast.parse(source).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                lines.append(ast.unparse(node))
    return "\n".join(lines)


SOURCES = sources()
# Of the cell with the forgotten division, what the later ones use.
SOURCES["shares"] = SOURCES["summed"].split("far =")[0]


def run_cells(
    names: dict[str, Any], wanted: str, old: str = "", new: str = ""
) -> None:
    """Run some cells of the lesson, with one line of them changed."""
    text = "\n\n".join(SOURCES[name] for name in wanted.split())
    assert old in text, f"the lesson no longer has {old!r}"
    exec(text.replace(old, new) if old else text, names)


@pytest.fixture(scope="module", autouse=True)
def untouched_accelerate() -> Iterator[None]:
    """No Accelerator was made in this process, so that a launch forks it."""
    from accelerate.state import AcceleratorState, PartialState

    with pytest.MonkeyPatch.context() as patch:
        for state in (AcceleratorState, PartialState):
            patch.setattr(state, "_shared_state", {})
        yield


@pytest.fixture(scope="module")
def ground() -> dict[str, Any]:
    """What all strategies use, and the figures of one process."""
    torch.set_num_threads(1)
    records: dict[str, float] = {}
    lesson = SimpleNamespace(pick=lambda smoke, laptop: smoke)
    lesson.record = lambda name, value: records.update({name: value})
    names: dict[str, Any] = {"SEED": 42, "TOLERANCE": 1e-5, "weights": 1.0}
    names |= {"lesson": lesson, "records": records}
    exec(imports(), names)
    run_cells(names, f"{GROUND} shares")
    return names


# name: the cells, the cell with the run, a line of them, and what that line is broken into
FAULTS = {
    "gradients are not divided": (
        "gather sharded by-hand",
        "return mine / dist.get_world_size()",
        "return mine",
    ),
    "a rank holds the slice of another": (
        "gather sharded by-hand",
        "whole = mine.new_empty(mine.numel() * dist.get_world_size())\n"
        "        dist.all_gather_into_tensor(whole, mine)",
        "whole = mine.new_empty(mine.numel() * dist.get_world_size())\n"
        "        dist.all_gather_into_tensor(whole, mine)\n"
        "        whole = torch.cat(whole.chunk(2)[::-1])",
    ),
    "each rank has other weights": (
        "gather sharded by-hand",
        "torch.manual_seed(SEED)",
        "torch.manual_seed(SEED + dist.get_rank())",
    ),
    "shares of the rows overlap": (
        "gather sharded by-hand",
        "return slice(dist.get_rank(), None, dist.get_world_size())",
        "return slice(0, None, dist.get_world_size())",
    ),
    "the norm is that of one rank": (
        "gather sharded by-hand",
        "    if everywhere:\n        dist",
        "    if False:\n        dist",
    ),
    "nothing is clipped": (
        "gather sharded by-hand",
        "min(1.0, 0.5",
        "max(1.0, 0.5",
    ),
    "another learning rate": ("gather sharded by-hand", "lr=1e-3", "lr=2e-3"),
    "other betas": (
        "gather sharded by-hand",
        "lr=1e-3",
        "lr=1e-3, betas=(0.8, 0.9)",
    ),
    "another decay": (
        "gather sharded by-hand",
        "lr=1e-3",
        "lr=1e-3, weight_decay=0.5",
    ),
    "gradients of two steps are added": (
        "gather sharded by-hand",
        "optimizer.zero_grad()",
        "pass",
    ),
    "ZeRO-1 without DDP": (
        f"{CUTS} zero1-run",
        "DistributedDataParallel(make_model())",
        "make_model()",
    ),
    "each rank shards over itself alone": (
        f"{CUTS} zero2-run",
        "(dist.get_world_size(),))",
        '(dist.get_world_size(), 1), mesh_dim_names=("a", "b"))["b"]',
    ),
    "ZeRO-3 without the rest of the model": (
        f"{CUTS} zero3-run",
        "[*model.model.layers, model]",
        "model.model.layers",
    ),
    "an optimizer from before the sharding": (
        f"{CUTS} zero3-run",
        "    for part in [*model.model.layers, model]:",
        "    early = adam(model)\n    for part in [*model.model.layers, model]:",
    ),
    "a sum of tensor parallelism is left out": (
        "tensor-library tensor-run",
        "RowwiseParallel()",
        "RowwiseParallel(output_layouts=torch.distributed.tensor.Partial())",
    ),
    "a pipeline adds gradients of two steps": (
        "stage pipeline",
        "        optimizer.zero_grad()",
        "        pass",
    ),
    "a pipeline's norm counts a stage once for each rank": (
        "stage pipeline",
        "norm_of(part, copies=1)",
        "norm_of(part)",
    ),
    "ranks that share layers read other rows": (
        "tensor-library mesh",
        'slice(mesh.get_local_rank("data"), None, 2)',
        "slice(dist.get_rank() % 2, None, 2)",
    ),
    "copies of the shards do not exchange": (
        "square hsdp",
        "fully_shard(part, mesh=mesh)",
        'fully_shard(part, mesh=mesh["shards"])',
    ),
    "the averages are not loaded": (
        f"{CUTS} save resume resume-run",
        "dcp.load(tensors,",
        "dcp.load({k: v for k, v in tensors.items() if k[:6] != 'state.'},",
    ),
    "the weights are not loaded": (
        f"{CUTS} save resume resume-run",
        "dcp.load(tensors,",
        "dcp.load({k: v for k, v in tensors.items() if k[:6] == 'state.'},",
    ),
}
RUNS = {
    "zero1-run": "same('ZeRO-1', launch(run, zero1)[0])",
    "zero2-run": "same('ZeRO-2', launch(run, fsdp, 2)[0])",
    "zero3-run": "same('ZeRO-3', launch(run, fsdp, 3)[0])",
}
SOURCES["square"] = SOURCES["mesh"].split("def two_cuts")[0]
RUN = SOURCES["sharded-run"].split("same(")[0]
SOURCES |= {name: RUN + call for name, call in RUNS.items()}


@slow
@forks
@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_strategy_is_refused(ground, fault):
    """The same cells pass unbroken: `test_the_strategies_agree_with_one_process`."""
    wanted, old, new = FAULTS[fault]
    names = dict(ground)
    if fault == "an optimizer from before the sharding":
        wanted = wanted.replace("fsdp", "fsdp-early")
        early = SOURCES["fsdp"].replace(
            "return model, adam(model)", "return model, early"
        )
        SOURCES["fsdp-early"] = early
    with pytest.raises(AssertionError, match="loss and norm are .* away"):
        run_cells(names, f"model norm train shares {wanted}", old, new)


@slow
@forks
def test_the_strategies_agree_with_one_process(ground, capsys):
    names = dict(ground)
    run_cells(
        names, f"gather sharded by-hand {CUTS} sharded-run save resume resume-run"
    )
    run_cells(names, "tensor-library tensor-run stage pipeline mesh hsdp")
    resumed = "saved on two, resumed on four"
    assert resumed in names["distance"]
    # A resumed run is held to one process too, and is no strategy of its own.
    assert len(names["distance"]) == 9
    assert names["records"]["strategies that agree with one process"] == 8
    assert "[2.0, 5.0]" in capsys.readouterr().out


def test_figures_that_are_nan_are_refused(ground):
    spoiled = np.full_like(ground["alone"], math.nan)
    with pytest.raises(AssertionError, match="are .*nan.* away"):
        ground["same"]("spoiled", spoiled)


# what is held and sent ----------------------------------------------------------------------------

WEIGHING = f"{CUTS} held weigh formula weigh-run memory traffic"
COUNTED = {
    "buckets that are the gradients": (
        "DistributedDataParallel(make_model())",
        "DistributedDataParallel(make_model(), gradient_as_bucket_view=True)",
    ),
    "stage 2 drops what it has gathered": (
        "reshard_after_forward=stage == 3",
        "reshard_after_forward=True",
    ),
    "stage 3 keeps what it has gathered": (
        "reshard_after_forward=stage == 3",
        "reshard_after_forward=False",
    ),
    "a formula forgets the shard beside the gathered copy": ("3 * part + 1", "1.0"),
    "a formula forgets the second gather": ("2 * ring + scatter", "ring + scatter"),
    "a formula takes Gloo's reduce-scatter for a ring": (
        "scatter = 2 * ring",
        "scatter = ring",
    ),
}


@pytest.fixture(scope="module")
def weighed(ground) -> dict[str, Any]:
    names = dict(ground)
    run_cells(names, WEIGHING)
    return names


@slow
@forks
def test_bytes_held_and_sent_are_those_of_the_formulas(weighed):
    records = weighed["records"]
    assert records["memory held, largest error of the formula"] < 0.02
    if can_count(world=4):
        assert records["traffic of a step, largest error of the formula"] < 0.02


@slow
@forks
@pytest.mark.parametrize("fault", COUNTED)
def test_another_number_of_bytes_is_refused(weighed, fault):
    old, new = COUNTED[fault]
    names = dict(weighed)
    formulas = "formula memory traffic"
    with pytest.raises(AssertionError):
        run_cells(names, formulas if "formula" in fault else WEIGHING, old, new)


def send_to_the_next(count: int) -> int:
    """Bytes that rank 0 sends, for a message of `count`."""
    dist.barrier()
    start = wire_bytes()
    if dist.get_rank() == 0:
        dist.send(torch.zeros(count, dtype=torch.uint8), 1)
    else:
        dist.recv(torch.zeros(count, dtype=torch.uint8), 0)
    dist.barrier()
    return wire_bytes() - start


@slow
@forks
@pytest.mark.skipif(
    not can_count(world=4), reason="Linux counts the bytes of a connection"
)
def test_bytes_on_the_wire_are_those_of_the_message():
    sender, receiver = launch(send_to_the_next, 1_000_000)
    assert sender == pytest.approx(1_000_000, rel=0.01)
    assert receiver < 10_000


# what the lesson tells and does not run -----------------------------------------------------------


@slow
@forks
def test_shards_in_main_memory_train_the_same(ground):
    from torch.distributed.fsdp import CPUOffloadPolicy

    names = dict(ground)
    run_cells(names, CUTS)
    pinned = rank_device(least=4).type == "cuda"
    policy = CPUOffloadPolicy(pin_memory=pinned)

    def offloaded() -> Any:
        model, optimizer = names["fsdp"](3, offload_policy=policy)
        return names["train"](model, optimizer, names["my_share"]())

    names["same"]("offload", launch(offloaded)[0])


@slow
@forks
@pytest.mark.skipif(not find_spec("deepspeed"), reason="an optional install")
@pytest.mark.parametrize("stage", range(4))
def test_deepspeed_trains_the_same_if_told_not_to_clip(ground, stage):
    names = dict(ground)

    def zero(**clipping: float) -> Any:
        import deepspeed

        model = names["make_model"]()
        config = {"train_micro_batch_size_per_gpu": 4, **clipping}
        config |= {"zero_optimization": {"stage": stage}}
        config |= {"zero_allow_untested_optimizer": True}
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=names["adam"](model),
            dist_init_required=False,
            config=config,
        )
        losses = []
        for rows in names["batches"]:
            loss = names["loss_of"](engine, rows[names["my_share"]()])
            engine.backward(loss)
            engine.step()
            losses.append(names["mean_over_ranks"](loss.detach()))
        return losses

    # The lesson clips to a half; so must the engine.
    same = launch(lambda: zero(gradient_clipping=0.5))[0]
    assert same == pytest.approx(names["alone"][:, 0].tolist(), rel=1e-5)
    plain, silent = (
        launch(lambda k=k: zero(**k))[0] for k in ({"gradient_clipping": 0.0}, {})
    )
    assert silent != pytest.approx(plain, rel=1e-5), "it clips though nobody asked"
