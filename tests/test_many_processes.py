"""What lesson 10 proves: its cells run here as they are, and with one fault planted, which is refused."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lesson_cells import cell, cells, run_cells
from test_launch import forks, slow, untouched_accelerate  # noqa: F401

from stages.launch import launch
from stages.planner import Link
from stages.wire import can_count, wire_bytes

# The cells that every form of the lesson uses.
SHARED = "model recipe average train same by-hand"


# the ring ----------------------------------------------------------------------------------------


def rings() -> tuple[Any, Any]:
    """The ring of the solution, and the half of it that the lesson shows."""
    exercise = SimpleNamespace(solution=lambda name: None)
    names = run_cells("10", "pass-on ring-half ex1-solution", {"lesson": exercise})
    return names["ring_all_reduce"], names["ring_reduce_scatter"]


@slow
@forks
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_ring_by_hand_gives_the_sum_and_sends_what_the_formula_says(world):
    whole, half = rings()

    def by_hand() -> list[Any]:
        rank = dist.get_rank()
        x = torch.arange(12.0) * (1 + rank)
        total, sent = whole(x, rank, world)
        place = (rank + 1) % world
        piece = half(list(x.chunk(world)), rank, world)[place]
        dist.all_reduce(x)
        finished = torch.equal(piece, x.chunk(world)[place])
        return [torch.equal(total, x), finished, sent / x.nbytes]

    share = pytest.approx(2 * (world - 1) / world)
    assert launch(by_hand, world=world) == [[True, True, share]] * world


def test_the_cost_of_the_lesson_is_that_of_the_planner():
    seconds = run_cells("10", "ring-seconds", {})["ring_seconds"]
    for world in (1, 2, 8):
        planned = Link(1e-3, 1e9).seconds("all_reduce", 4e9, world)
        assert seconds(4e9, world, 1e-3, 1e9) == pytest.approx(planned)


@slow
@forks
@pytest.mark.skipif(not can_count(world=4), reason="TCP is counted by Linux only")
def test_a_collective_sends_the_bytes_that_are_counted():
    def weigh() -> list[float]:
        x, shares = torch.ones(1 << 18), []
        parts = [torch.empty_like(part) for part in x.chunk(4)]
        for call in (
            lambda: dist.all_reduce(x),
            lambda: dist.all_gather(parts, parts[0].clone()),
            lambda: None,
        ):
            dist.barrier()
            start = wire_bytes()
            call()
            dist.barrier()
            shares.append((wire_bytes() - start) / x.nbytes)
        return shares

    sent = np.max(launch(weigh, world=4), axis=0)
    assert sent == pytest.approx([1.5, 0.75, 0], abs=0.02)


# the forms ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """What the forms use, with random rows for those of the token store, and one process's figures."""
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    # Some tokens are common, others rare.
    rows = (512 * torch.rand(32, 33, generator=draw) ** 8).long()
    found: dict[str, Any] = {"SEED": 42, "TOLERANCE": 1e-5, "batch": 8, "steps": 4}
    found |= {"store": SimpleNamespace(header={"vocabulary": 512})}
    found |= {"rows": rows, "batches": rows.split(8)}
    found |= {"lesson": SimpleNamespace(solution=lambda name: None)}
    found = run_cells("10", SHARED, found)
    found["alone"] = launch(lambda: found["train"](found["make_model"]()), world=1)[
        0
    ]
    return found


OVERLAPPED = """
def overlapped():
    model = make_model(SEED + dist.get_rank())
    wrapped = Overlapped(model)
    return train(model, my_share(), lambda model: wrapped.finish())
"""
# each form: the cells that define it, what is to run, and on how many processes
FORMS = {
    "by hand": ("", "by_hand", 2),
    "by hand, four ranks": ("", "by_hand", 4),
    "DDP": ("ddp", "ddp", 2),
    "overlapped": ("ex2-solution", "overlapped", 2),
    "Accelerate": ("accelerated", "accelerated", 2),
}


def source_of(form: str) -> str:
    """All that a form needs, without the line of the lesson that starts it."""
    own = "\n\n".join(cell("10", name) for name in FORMS[form][0].split())
    shared = "\n\n".join(cell("10", name) for name in SHARED.split())
    lines = [line for line in own.splitlines() if not line.startswith("same(")]
    return "\n".join([shared, *lines, OVERLAPPED])


def hold(names: dict[str, Any], form: str, *changes: str) -> None:
    """Run a form, with each `before -> after` of its source, and the lesson's own check."""
    source = source_of(form)
    for change in changes:
        before, after = change.split(" -> ")
        assert before in source, f"the lesson no longer has {before!r}"
        source = source.replace(before, after)
    own = dict(names)
    exec(source, own)
    _, call, world = FORMS[form]
    for got in launch(own[call], world=world):
        own["same"](form, got)


@slow
@forks
@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_one_process(names, untouched_accelerate, form):
    hold(names, form)


ALL_RANKS = "slice(dist.get_rank(), None, dist.get_world_size())"
FAULTS = {
    "no all-reduce": ("by hand", "average(parameter.grad) -> pass"),
    "summed": (
        "by hand",
        "average(parameter.grad) -> dist.all_reduce(parameter.grad)",
    ),
    "divided twice": (
        "by hand",
        "average(parameter.grad) -> average(parameter.grad).div_(2)",
    ),
    "one tensor left out": (
        "by hand",
        "in model.parameters(): -> in list(model.parameters())[1:]:",
    ),
    "a seed for each rank": (
        "by hand",
        "make_model(seed) -> make_model(seed + dist.get_rank())",
    ),
    "the same rows": ("by hand", f"{ALL_RANKS} -> slice(0, None, 2)"),
    "shares overlap": (
        "by hand",
        f"{ALL_RANKS} -> slice(4 * dist.get_rank(), 4 * dist.get_rank() + 5)",
    ),
    "a row in no share": (
        "by hand",
        f"{ALL_RANKS} -> slice(4 * dist.get_rank(), 4 * dist.get_rank() + 3)",
    ),
    "unequal shares": (
        "by hand",
        f"{ALL_RANKS} -> slice(5) if dist.get_rank() else slice(5, 8)",
    ),
    "batches in another order": (
        "by hand",
        "whole in batches -> whole in batches[::-1]",
    ),
    "one row too few for all": ("by hand", "whole[share] -> whole[:-2][share]"),
    "clipped before the average": (
        "by hand",
        "        if exchange: -> "
        "        nn.utils.clip_grad_norm_(model.parameters(), clip)\n        if exchange:",
    ),
    "clipped before it is unscaled": (
        "by hand",
        "loss.backward() -> (2.0**10 * loss).backward()",
        "        optimizer.step() -> "
        "        for p in model.parameters():\n            p.grad /= 2**10\n        optimizer.step()",
    ),
    "not clipped": ("by hand", "clip=0.5 -> clip=1e9"),
    "averaged after the step": (
        "by hand",
        "        if exchange:\n            exchange(model)\n -> ",
        "        optimizer.step()\n ->         optimizer.step()\n        exchange(model)\n",
    ),
    "gradients of the last step kept": ("by hand", "optimizer.zero_grad() -> pass"),
    "other betas": ("by hand", "betas=(0.9, 0.95) -> betas=(0.9, 0.999)"),
    "another schedule": ("by hand", "warm_up=4 -> warm_up=2"),
    "the rate times the ranks": ("by hand", "1e-3, betas -> 2e-3, betas"),
    "not wrapped": ("DDP", "DistributedDataParallel(model) -> model"),
    "never synchronized": (
        "DDP",
        "    return train(DistributedDataParallel(model) -> "
        "    model = DistributedDataParallel(model)\n"
        "    model.require_backward_grad_sync = False\n"
        "    return train((model)",
    ),
    "a hook that sums": (
        "DDP",
        "    return train(DistributedDataParallel(model) -> "
        "    model = DistributedDataParallel(model)\n"
        "    model.register_comm_hook(None, lambda state, bucket: dist.all_reduce(\n"
        "        bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0]))\n"
        "    return train((model)",
    ),
    "not prepared": (
        "Accelerate",
        "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"
        " -> loader = accelerator.prepare(loader)",
    ),
    "a schedule that is prepared": (
        "Accelerate",
        "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"
        " -> model, optimizer, loader, schedule ="
        " accelerator.prepare(model, optimizer, loader, schedule)",
    ),
    "a batch for each process": (
        "Accelerate",
        "batch // accelerator.num_processes -> batch",
    ),
    "a norm, and no clipping": (
        "Accelerate",
        "accelerator.clip_grad_norm_(model.parameters(), 0.5)"
        " -> nn.utils.get_total_norm([p.grad for p in model.parameters()])",
    ),
    "no broadcast": (
        "overlapped",
        "            dist.broadcast(parameter.data, src=0)\n -> ",
    ),
    "handles that are kept": ("overlapped", "        self.waiting.clear()\n -> "),
}


@slow
@forks
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_refused(names, untouched_accelerate, fault):
    form, *changes = FAULTS[fault]
    with pytest.raises(AssertionError, match="losses off by|not every step"):
        hold(names, form, *changes)


def test_there_are_more_than_twenty_of_them():
    assert len(FAULTS) > 20
    assert {form for form, *_ in FAULTS.values()} == set(FORMS) - {
        "by hand, four ranks"
    }


@pytest.mark.parametrize("place", [0, 1])
def test_what_becomes_nan_is_refused(names, place):
    spoiled = [list(figures) for figures in names["alone"]]
    spoiled[place][-1] = float("nan")
    with pytest.raises(AssertionError, match="by nan"):
        names["same"]("late", spoiled)


@slow
@forks
@pytest.mark.parametrize("fault", ["", "/ 4", "number < 3"])
def test_no_sync_sends_once_and_keeps_the_norm(names, fault):
    own = dict(names)
    source = cell("10", "no-sync")
    assert fault in source
    if fault:
        source = source.replace(
            fault, {"/ 4": "/ 1", "number < 3": "number < 4"}[fault]
        )
    own["print"] = own["format_bytes"] = lambda *words: ""
    own["lesson"] = SimpleNamespace(
        record=lambda name, value: own.update(value=value)
    )
    exec(source, own)
    with pytest.raises(AssertionError) if fault else contextlib.nullcontext():
        exec(cell("10", "no-sync-run"), own)
        assert own["value"] == 0.25


def test_buckets_are_drawn_in_the_order_in_which_they_left(capsys):
    """They are noted as they arrive, and the last to leave may arrive first."""
    drawn = []
    names = run_cells("10", "", {}) | {"trace_buckets": None}
    names["launch"] = lambda trace: [[[700, 0.3, 0.4], [300, 0.1, 0.5]]]
    names["show_figure"] = lambda figure, alt: drawn.append(figure)
    exec(cell("10", "buckets-figure"), names)
    (axes,) = drawn[0].axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["backward pass", "bucket 0, 300 B", "bucket 1, 700 B"]
    assert [bar.get_x() for bar in axes.patches] == [0, 0.1, 0.3]
    assert "30% of the bytes" in capsys.readouterr().out


# what the lesson says of libraries -----------------------------------------------------------------


@slow
@forks
@pytest.mark.parametrize("dispatch, back", [(None, 21), (False, 24)])
def test_the_main_process_reads_a_stream_for_all_unless_told_not_to(
    untouched_accelerate,
    dispatch,
    back,
):
    from accelerate import Accelerator, DataLoaderConfiguration
    from torch.utils.data import DataLoader, IterableDataset

    class Stream(IterableDataset):
        """Twenty-one numbers, of unknown length."""

        def __iter__(self):
            return iter(torch.arange(21))

    def read() -> list[int]:
        settings = DataLoaderConfiguration(dispatch_batches=dispatch)
        accelerator = Accelerator(cpu=True, dataloader_config=settings)
        loader = accelerator.prepare(DataLoader(Stream(), batch_size=4))
        parts = [accelerator.gather_for_metrics(part) for part in loader]
        return torch.cat(parts).tolist()

    seen = launch(read)[0]
    assert (len(seen), len(set(seen))) == (back, 21)


def test_the_lesson_makes_no_accelerator_in_the_kernel():
    for one in cells("10"):
        if one.cell_type == "code" and '"""\n' not in one.source:
            lines = [
                line for line in one.source.splitlines() if "Accelerator(" in line
            ]
            assert all(line.startswith(" ") for line in lines), lines


def test_the_single_process_is_launched_like_its_rivals():
    """In the kernel it would compute on the CPU where the others take GPUs."""
    assert "alone = launch(lambda: train(make_model()), world=1)[0]" in cell(
        "10", "train-alone"
    )


@pytest.mark.parametrize("name", ["node-program", "alone-program"])
def test_ranks_of_a_program_write_whole_lines(name):
    """`print` writes a line and its end one after the other where Python does not buffer."""
    assert "print(" not in cell("10", name)
    assert "os.write(1, " in cell("10", name)
