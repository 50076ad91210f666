"""Processes start, fail and end as they should; every parallel form is held to one process.

The forms stand in the cells of lesson 10, and it is those cells that run here: as they are, where
the lesson's own check must pass, and with one line broken, where it must not.
"""
import json
import math
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
import torch
import torch.distributed as dist
import yaml

from utils.errors import CourseError, ROOT
from stages.launch import free_port, launch, rank_device, require_world, start_method

NOTEBOOK = ROOT / "notebooks/10_many_processes.ipynb"
SHARED = "imports model train same by-hand clock stage timed rank-bytes plain-bytes"
DECISION = "imports ring-link decide-types decide-layouts decide"
forks = pytest.mark.skipif(start_method().value != "fork", reason="functions of a test travel by fork")


def rank_and_sum(extra):
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    print(f"rank {dist.get_rank()} of {os.environ['WORLD_SIZE']}")
    return {"rank": dist.get_rank() + extra, "sum": total}


def raise_on(rank):
    if dist.get_rank() == rank:
        raise ValueError("boom")
    dist.all_reduce(torch.ones(1))


def die_on(rank):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def hang_on(rank, folder):
    Path(folder, f"{dist.get_rank()}.pid").write_text(str(os.getpid()))
    if dist.get_rank() != rank:
        dist.all_reduce(torch.ones(1))
    else:
        time.sleep(60)


def alive(folder):
    """The processes that left their numbers in a folder and still run."""
    numbers = [int(path.read_text()) for path in Path(folder).glob("*.pid")]
    assert numbers
    return [n for n in numbers if Path(f"/proc/{n}").exists()
            and Path(f"/proc/{n}/stat").read_text().split(") ")[1][0] != "Z"]


@forks
def test_results_come_back_in_the_order_of_ranks(capsys):
    found = launch(rank_and_sum, 10, world=3)
    assert [one["rank"] for one in found] == [10, 11, 12]
    assert all(one["sum"].item() == 3 for one in found)
    assert capsys.readouterr().out.splitlines()[2] == "rank 2 | rank 2 of 3"


def test_a_spawned_process_gets_the_function_by_value():
    add = 5  # a closure, as a cell has
    assert launch(lambda: add + int(os.environ["RANK"]), world=2, start="spawn") == [5, 6]


@forks
def test_the_rank_that_raised_first_is_named():
    with pytest.raises(CourseError, match=r"rank 1 failed first: ValueError: boom\n  where: raise_on:"):
        launch(raise_on, 1, seconds=30)


@forks
def test_a_rank_that_died_in_silence_is_named_and_not_its_neighbour():
    with pytest.raises(CourseError, match="rank 1 ended by signal 9"):
        launch(die_on, 1, seconds=30)


@forks
@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
def test_a_hang_ends_with_the_place_of_each_rank_and_leaves_nobody(tmp_path):
    start = time.monotonic()
    with pytest.raises(CourseError, match=r"(?s)rank 0: hang_on.*rank 1: all_reduce.*hang_on"):
        launch(hang_on, 0, str(tmp_path), seconds=1)
    assert time.monotonic() - start < 20
    assert alive(tmp_path) == []


def test_the_clock_starts_when_all_are_ready_however_long_their_imports_take(tmp_path):
    with pytest.raises(CourseError, match=r"(?s)after 1 s these ranks.*rank 0: hang_on.*hang_on"):
        launch(hang_on, 0, str(tmp_path), seconds=1, start="spawn")


@forks
@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
def test_children_end_when_their_parent_is_killed(tmp_path):
    program = (f"import sys; sys.path[:] = {sys.path!r}\n"
               f"import test_distributed as t\nt.launch(t.hang_on, 0, {str(tmp_path)!r}, seconds=60)")
    path = os.pathsep.join([str(Path(__file__).parent), str(ROOT)])
    parent = subprocess.Popen([sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": path})
    try:
        until = time.monotonic() + 60
        while len(list(tmp_path.glob("*.pid"))) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        assert len(alive(tmp_path)) == 2
    finally:
        parent.kill()
        parent.wait()
    until = time.monotonic() + 10
    while alive(tmp_path) and time.monotonic() < until:
        time.sleep(0.05)
    assert alive(tmp_path) == []


@forks
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_ring_by_hand_gives_the_sum(world):
    own = {}
    for name in ("imports", "ring"):
        exec(cell(name), own)

    def by_hand():
        x = torch.arange(12.0) * (1 + dist.get_rank())
        total, sent = own["ring_all_reduce"](x, dist.get_rank(), world)
        dist.all_reduce(x)
        return [torch.equal(total, x), sent / x.nbytes]
    assert launch(by_hand, world=world) == [[True, pytest.approx(2 * (world - 1) / world)]] * world


@forks
def test_a_launch_needs_no_port(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "nowhere.invalid")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert launch(lambda: dist.get_world_size(), world=2) == [2, 2]


@forks
def test_two_launches_at_once_do_not_meet():
    here = f"import sys; sys.path[:] = {sys.path!r}\nfrom utils.distributed import *\n"
    program = here + "print(launch(lambda: dist.get_world_size(), world=2))"
    both = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
            for _ in range(2)]
    assert [one.communicate(timeout=120)[0].strip() for one in both] == ["[2, 2]"] * 2


def test_a_free_port_is_free_and_never_the_fixed_one():
    ports = {free_port() for _ in range(20)}
    assert 29500 not in ports and all(1024 < port < 65536 for port in ports)


def test_a_kernel_that_made_an_accelerator_is_not_forked(monkeypatch):
    held = SimpleNamespace(PartialState=SimpleNamespace(_shared_state={"device": "cpu"}))
    monkeypatch.setitem(sys.modules, "accelerate.state", held)
    assert start_method().value == "spawn" and "Accelerator" in start_method().reason
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert "Accelerator" in start_method().reason  # the lesson prints it, with a GPU and without
    held.PartialState._shared_state.clear()
    assert start_method().value == "spawn" and "GPU" in start_method().reason


def test_a_launch_of_one_process_is_noticed(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(CourseError, match="1 process"):
        require_world(2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    require_world(2)


def test_a_gpu_is_taken_only_if_there_is_one_for_each_rank(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for cards, device in ((0, "cpu"), (1, "cpu"), (2, "cuda:1")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda cards=cards: cards)
        assert str(rank_device()) == device


@pytest.mark.parametrize("cards, world, least, device", [
    (1, 1, 1, "cuda:0"), (1, 1, 2, "cpu"), (1, 2, 2, "cpu"), (2, 1, 2, "cuda:0"), (2, 0, 2, "cpu")])
def test_one_process_is_compared_with_two_on_the_same_kind_of_device(monkeypatch, cards, world, least, device):
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(world))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    assert str(rank_device(least)) == device


def cell(name):
    """The source of a cell of the lesson, with the parts before it that belong to it."""
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    return "\n\n".join(c.source for c in cells if c.id.split("-part")[0] == name)


def names_of(cells):
    """What some cells of the lesson define."""
    names = {}
    for name in cells.split():
        exec(cell(name), names)
    return SimpleNamespace(**names)


def test_a_ring_costs_what_the_formula_says():
    link = names_of("imports ring-link").Link(1e-3, 1e9)
    assert link.seconds("all_reduce", 4e9, 4) == pytest.approx(6 * (1e-3 + 1))
    pair = link.seconds("reduce_scatter", 1e9, 8) + link.seconds("all_gather", 1e9, 8)
    assert pair == pytest.approx(link.seconds("all_reduce", 1e9, 8))
    assert link.seconds("all_reduce", 1e9, 1) == 0


PLACES = {"one device": (1, 1, 1e9), "one node, fast": (8, 1, 300e9), "one node, slow": (8, 1, 1e9),
          "nodes, fast": (8, 4, 300e9), "nodes, slow": (8, 4, 1e9)}
SIZES = [(0.5e9, 24), (7e9, 32), (400e9, 96)]


@pytest.fixture(scope="module")
def decision():
    return names_of(DECISION)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("size", range(3))
def test_every_cell_of_the_matrix_is_reached_and_gives_its_reasons(decision, place, size):
    devices, nodes, bandwidth = PLACES[place]
    hardware, link = decision.Hardware(24e9, 60e12, devices, nodes), decision.Link(1e-5, bandwidth)
    made = decision.choose_parallelism(decision.Need(*SIZES[size]), hardware, link)
    said = "; ".join(made.reasons)
    assert made.value == decision.LAYOUTS[place][size]
    assert "GB of states" in said and "a layer" in said
    assert ("link" in said) == (devices > 1)
    assert made.fits == (size < 2 or devices == 1)
    assert ("with states cut evenly" in said) == (not made.fits)


@pytest.mark.parametrize("nodes, fits", [(1, False), (2, True)])
def test_a_layout_that_the_devices_cannot_hold_is_said_not_to_fit(decision, nodes, fits):
    # 18 * 16e9 = 288 GB of states: 36 + 4 of them on each of 8 devices, 18 + 4 on each of 16
    hardware = decision.Hardware(40e9, 60e12, 8, nodes)
    made = decision.choose_parallelism(decision.Need(16e9, 32), hardware, decision.Link(1e-5, 300e9))
    assert (made.value, made.fits) == ("FSDP (ZeRO-3)", fits)
    assert fits or "cut evenly by 8 and its activations a device would hold 40.0 GB of 36.0" in made.reasons[-1]


@pytest.mark.parametrize("parameters, fits", [(7e9, True), (30e9, False)])
def test_a_layout_with_a_copy_in_each_node_must_fit_into_a_node(decision, parameters, fits):
    # 30e9: 540 GB of states, 67.5 + 4 on each of the 8 devices of a node, however many nodes
    hardware, link = decision.Hardware(24e9, 60e12, 8, 64), decision.Link(1e-5, 1e9)
    made = decision.choose_parallelism(decision.Need(parameters, 60), hardware, link)
    assert "DDP across" in made.value and made.fits == fits
    assert fits or "by 8 and its activations a device would hold 71.5 GB of 21.6" in made.reasons[-1]
    fast = decision.choose_parallelism(decision.Need(parameters, 60), hardware, decision.Link(1e-5, 300e9))
    assert fast.fits  # sharded over all nodes


def test_more_tokens_make_a_slow_link_fast_enough(decision):
    card, link = decision.Hardware(24e9, 60e12, 8), decision.Link(1e-5, 5e9)
    few, many = (decision.choose_parallelism(decision.Need(7e9, 32, tokens), card, link).value
                 for tokens in (8e3, 8e4))
    assert (few, many) == ("pipeline", "FSDP (ZeRO-3)")


def test_clocks_wait_for_a_gpu_and_only_for_a_gpu(monkeypatch):
    names, waits = names_of("imports clock"), []

    class Event:
        """A marker that lies in the queue of a GPU."""

        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = len(waits)

        def synchronize(self):
            waits.append("event")

        def elapsed_time(self, end):
            return 5.0 if waits else None
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append("device"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert names.milliseconds(names.mark(), names.mark() + 1) == pytest.approx(1000, abs=100)
    assert names.now() > 0 and waits == []
    monkeypatch.setitem(names.now.__globals__, "rank_device", lambda: torch.device("cuda", 0))
    assert names.now() > 0 and waits == ["device"]
    assert names.milliseconds(names.mark(), names.mark()) == 5.0 and waits == ["device", "event"]


@pytest.mark.parametrize("name", ["buckets", "timed", "meet", "link", "step"])
def test_no_cell_that_measures_reads_the_clock_of_the_cpu_alone(name):
    source = cell(name)
    assert "perf_counter" not in source
    assert any(call in source for call in ("now()", "mark()", "meet()"))


@pytest.fixture(scope="module")
def lesson_names():
    """What the lesson's forms use, with random rows for those of the token store."""
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    names = {"SEED": 42, "TOLERANCE": 2e-5, "batch": 8, "store": SimpleNamespace(header={"vocabulary": 512})}
    names["rows"] = (512 * torch.rand(32, 33, generator=draw) ** 8).long()  # some are common
    names["batches"] = names["rows"].split(8)
    for name in SHARED.split():
        exec(cell(name), names)
    return names


def hold(names, form, old="", new=""):
    """Run a form of the lesson, changed or not, and the lesson's own check of its losses."""
    cells, call = FORMS[form][:2]
    source = "\n\n".join(map(cell, dict.fromkeys(["by-hand", *cells.split()])))
    assert old in source, f"the lesson no longer has {old!r}"
    own = dict(names)
    exec(source.replace(old, new) if old else source, own)
    own["same"](form, eval(call, own))


FORMS = {  # the cell, what runs it, a line of it, and what that line is broken into
    "by hand": ("by-hand", "launch(by_hand)[0]", "        average(parameter.grad)", "        pass"),
    "DDP": ("ddp", "launch(ddp)[0]", "DistributedDataParallel(make_model())", "make_model()"),
    "Accelerate": ("accelerated", "launch(accelerated)[0]",
                   "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
                   "loader = accelerator.prepare(loader)"),
    "notebook_launcher": ("accelerated notebook-launcher", "in_notebook_launcher()",
                          "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
                          "loader = accelerator.prepare(loader)"),
    "ZeRO-1": ("zero1", "launch(zero1)[0]",
               "DistributedDataParallel(make_model(), gradient_as_bucket_view=True)", "make_model()"),
    "ZeRO-2": ("fsdp", "launch(fsdp, 2)[0]", "optimizer = adam(model)",
               "model.set_requires_gradient_sync(False); optimizer = adam(model)"),
    "ZeRO-3": ("fsdp", "launch(fsdp, 3)[0]", "[*model.model.layers, model]", "model.model.layers"),
    "offload": ("offload", "launch(offloaded_losses)[0]", "[*model.model.layers, model]",
                "model.model.layers"),
    "DeepSpeed": ("deepspeed", "launch(zero, 3)[0]", 'clipping={"gradient_clipping": 0.0}', "clipping={}"),
    "tensor parallel": ("tensor-library", "launch(tensor_parallel)[0]",
                        "RowwiseParallel()",
                        "RowwiseParallel(output_layouts=torch.distributed.tensor.Partial())"),
    "pipeline": ("pipeline-train", "launch(pipeline)[-1]['losses']",
                 "optimizer.zero_grad()", "pass")}


OPTIONAL = pytest.mark.skipif(not find_spec("deepspeed"), reason="DeepSpeed is an optional install")
EACH = [pytest.param(form, marks=OPTIONAL if form == "DeepSpeed" else ()) for form in FORMS]


@pytest.fixture
def untouched_accelerate(monkeypatch):
    """No Accelerator was made in this process: accelerate's launcher refuses where one was."""
    from accelerate.state import AcceleratorState, PartialState

    for state in (AcceleratorState, PartialState):
        monkeypatch.setattr(state, "_shared_state", {})


@forks
@pytest.mark.parametrize("form", EACH)
def test_a_form_reaches_the_loss_of_one_process(lesson_names, untouched_accelerate, form):
    hold(lesson_names, form)


def test_losses_that_become_nan_are_refused(lesson_names):
    alone = lesson_names["alone"]
    with pytest.raises(AssertionError, match="late is nan away"):
        lesson_names["same"]("late", [alone[0]] + [math.nan] * (len(alone) - 1))
    own = lesson_names | {"launch": lambda *given: [[alone[0]] + [math.nan] * (len(alone) - 1)], "zero": None}
    exec(cell("deepspeed-run").split("recorded =")[0], own)
    assert all(math.isnan(far) for far in own["run_stages"]().values())


@forks
@pytest.mark.parametrize("form", EACH)
def test_a_broken_form_is_refused(lesson_names, untouched_accelerate, form):
    with pytest.raises(AssertionError, match="is .* away|nan"):
        hold(lesson_names, form, *FORMS[form][2:])


@pytest.mark.parametrize("name", ["ddp", "fsdp", "zero2", "zero3", "multi_node"])
def test_accelerate_reads_each_configuration(name):
    from accelerate.commands.config.config_args import load_config_from_file

    path = ROOT / "launch" / f"{name}.yaml"
    read, said = load_config_from_file(str(path)), yaml.safe_load(path.read_text())
    assert read.distributed_type.value == said["distributed_type"] != "NO"
    assert read.num_processes == said["num_processes"] > 1
    if "deepspeed_config_file" in (inner := said.get("deepspeed_config", {})):
        zero = json.loads((ROOT / inner["deepspeed_config_file"]).read_text())
        assert zero["zero_optimization"]["stage"] == 3


def test_the_slurm_script_parses_and_starts_what_is_there():
    path = ROOT / "launch/slurm.sbatch"
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True).returncode == 0
    text = path.read_text()
    assert "launch/multi_node.yaml" in text and "--machine_rank \"$SLURM_NODEID\"" in text


def test_the_recorded_run_of_deepspeed_agrees_with_one_process_and_its_broken_form_does_not():
    record = json.loads((ROOT / "results/11_deepspeed.json").read_text())
    allowed = names_of("parameters").TOLERANCE
    assert {"deepspeed", "torch"} <= set(record["versions"]) and "deepspeed==" in record["command"]
    assert list(record["distance"]) == list(record["distance_with_default_clipping"]) == list("0123")
    assert max(record["distance"].values()) < allowed
    assert min(record["distance_with_default_clipping"].values()) > 10 * allowed


def test_the_recorded_smoke_run_keeps_its_time():
    runs = json.loads((ROOT / "results/smoke.json").read_text())["notebooks"]
    assert 0 < runs["08"]["seconds"] <= 100
