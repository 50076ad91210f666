"""Processes start, fail and end as they should; every parallel form is held to one process.

The forms of lesson 11 stand in its cells, and it is those cells that run here: as they are, where
the lesson's own check must pass, and with one line broken, where it must not. Those of lesson 10
run in `test_many_processes.py`.
"""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
import torch
import torch.distributed as dist
import yaml
from lesson_cells import cells

from stages import launch as launching
from stages import notebook_launch
from stages.launch import (
    free_port,
    launch,
    rank_device,
    require_world,
    start_method,
)
from stages.notebook_launch import (
    launch_in_notebook,
    where_to_launch,
    why_not_notebook_launcher,
)
from utils.errors import ROOT, CourseError
from utils.machine import Card

slow = pytest.mark.slow
forks = pytest.mark.skipif(
    start_method().value != "fork", reason="functions of a test travel by fork"
)
proc = pytest.mark.skipif(
    not Path("/proc").exists(), reason="looks for processes in /proc"
)


def rank_and_sum(extra: int) -> dict[str, Any]:
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    print(f"rank {dist.get_rank()} of {os.environ['WORLD_SIZE']}")
    return {"rank": dist.get_rank() + extra, "sum": total}


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("boom")
    dist.all_reduce(torch.ones(1))


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def hang_on(rank: int, folder: str) -> None:
    """One rank waits for a signal that never comes, the other in a collective."""
    Path(folder, f"{dist.get_rank()}.pid").write_text(str(os.getpid()))
    if dist.get_rank() == rank:
        signal.pause()
    else:
        dist.all_reduce(torch.ones(1))


def running(folder: Path) -> list[int]:
    """The processes that left their numbers in a folder and still run."""
    numbers = [int(path.read_text() or 0) for path in folder.glob("*.pid")]
    alive = []
    for number in numbers:
        stat = Path(f"/proc/{number}/stat")
        if stat.exists() and stat.read_text().split(") ")[1][0] != "Z":
            alive.append(number)
    return alive


def wait_until(condition: Any, seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


# launching ---------------------------------------------------------------------------------------


@slow
@forks
def test_results_come_back_in_the_order_of_ranks(capsys):
    results = launch(rank_and_sum, 10, world=3)
    assert [one["rank"] for one in results] == [10, 11, 12]
    assert all(one["sum"].item() == 3 for one in results)
    assert capsys.readouterr().out.splitlines()[2] == "rank 2 | rank 2 of 3"


@slow
@forks
def test_the_output_of_a_rank_stands_in_the_order_of_numbers(capsys):
    launch(lambda: print("here"), world=11)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"rank {rank} | here" for rank in range(11)]


@slow
def test_a_spawned_process_gets_the_function_by_value():
    # a closure, as a cell has
    add = 5
    assert launch(
        lambda: add + int(os.environ["RANK"]), world=2, start="spawn"
    ) == [5, 6]


@slow
@forks
def test_the_rank_that_raised_first_is_named():
    with pytest.raises(
        CourseError,
        match=r"rank 1 failed first: ValueError: boom\n  where: raise_on:",
    ):
        launch(raise_on, 1, seconds=30)


def disagree() -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    group = dist.new_group(backend="gloo")
    dist.all_reduce(torch.ones(2 + dist.get_rank()), group=group)


@slow
@forks
def test_no_rank_is_blamed_where_all_of_them_found_the_mismatch():
    with pytest.raises(CourseError, match="either may be wrong") as told:
        launch(disagree, seconds=30)
    assert "mend that one" not in str(told.value)


@slow
@forks
def test_a_rank_that_died_in_silence_is_named_and_not_its_neighbour():
    with pytest.raises(CourseError, match="rank 1 ended by signal 9"):
        launch(die_on, 1, seconds=30)


@slow
@forks
@proc
def test_a_hang_ends_with_the_place_of_each_rank_and_leaves_nobody(tmp_path):
    with pytest.raises(
        CourseError, match=r"(?s)rank 0: hang_on.*rank 1: all_reduce.*hang_on"
    ):
        launch(hang_on, 0, str(tmp_path), seconds=1)
    assert len(list(tmp_path.glob("*.pid"))) == 2
    assert running(tmp_path) == []


@slow
@forks
def test_the_clock_starts_when_all_are_ready_however_long_their_imports_take(
    tmp_path,
):
    with pytest.raises(
        CourseError, match=r"(?s)after 1 s these ranks.*rank 0: hang_on.*hang_on"
    ):
        launch(hang_on, 0, str(tmp_path), seconds=1, start="spawn")


@slow
@forks
@proc
def test_children_end_when_their_parent_is_killed(tmp_path):
    program = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        f"import test_launch as t\nt.launch(t.hang_on, 0, {str(tmp_path)!r}, seconds=600)"
    )
    path = os.pathsep.join([str(Path(__file__).parent), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": path}
    parent = subprocess.Popen([sys.executable, "-c", program], env=environment)
    try:
        assert wait_until(lambda: len(running(tmp_path)) == 2)
    finally:
        parent.kill()
        parent.wait()
    assert wait_until(lambda: running(tmp_path) == [])


def test_the_end_of_the_last_rank_is_not_missed(monkeypatch, tmp_path):
    """A child may end between two questions: then nobody is left to wait for."""

    class Child:
        """Answers once that it is alive."""

        exitcode = 0
        sentinel = "its end"

        def __init__(self) -> None:
            self.answers = [True]

        def is_alive(self) -> bool:
            return bool(self.answers and self.answers.pop())

    waited = []
    monkeypatch.setattr(
        launching, "wait", lambda ends, timeout: waited.append(ends)
    )
    (tmp_path / "0.ready").touch()
    launching.wait_for_end([Child()], tmp_path, 60)
    assert waited == [["its end"]]


@slow
@forks
def test_a_launch_needs_no_port(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "nowhere.invalid")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert launch(lambda: dist.get_world_size(), world=2) == [2, 2]


@slow
@forks
def test_ranks_meet_in_a_folder_whose_name_has_a_space(monkeypatch, tmp_path):
    folder = tmp_path / "my files"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    assert launch(lambda: dist.get_world_size(), world=2) == [2, 2]


@slow
@forks
def test_two_launches_at_once_do_not_meet():
    program = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "from stages.launch import dist, launch\n"
        "print(launch(lambda: dist.get_world_size(), world=2))"
    )
    command = [sys.executable, "-c", program]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [one.communicate(timeout=300)[0].strip() for one in both] == [
        "[2, 2]"
    ] * 2


def test_a_free_port_is_free_and_never_the_fixed_one():
    ports = {free_port() for _ in range(20)}
    assert 29500 not in ports
    assert all(1024 < port < 65536 for port in ports)


def test_a_kernel_that_made_an_accelerator_is_not_forked(monkeypatch):
    state = SimpleNamespace(
        PartialState=SimpleNamespace(_shared_state={"device": "cpu"})
    )
    monkeypatch.setitem(sys.modules, "accelerate.state", state)
    assert start_method().value == "spawn"
    assert "Accelerator" in start_method().reason
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    # the lesson prints this reason, with a GPU and without
    assert "Accelerator" in start_method().reason
    state.PartialState._shared_state.clear()
    assert start_method().value == "spawn"
    assert "GPU" in start_method().reason


@pytest.fixture
def untouched_accelerate(monkeypatch) -> Iterator[None]:
    """No Accelerator was made in this process: accelerate's launcher refuses where one was."""
    from accelerate.state import AcceleratorState, PartialState

    for state in (AcceleratorState, PartialState):
        monkeypatch.setattr(state, "_shared_state", {})
    yield


def test_a_launch_of_one_process_is_noticed(monkeypatch, untouched_accelerate):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(CourseError, match="1 process"):
        require_world(2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    require_world(2)


def test_processes_that_believe_they_are_alone_are_noticed(
    monkeypatch, untouched_accelerate
):
    """What `torchrun` and a plain `Accelerator()` make of two processes without a GPU."""
    from accelerate.state import PartialState

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setitem(PartialState._shared_state, "num_processes", 1)
    monkeypatch.setitem(PartialState._shared_state, "distributed_type", "NO")
    with pytest.raises(CourseError, match="each believes it is alone"):
        require_world(2)
    PartialState._shared_state["num_processes"] = 2
    require_world(2)


@pytest.mark.parametrize("cards, device", [(0, "cpu"), (1, "cpu"), (2, "cuda:1")])
def test_a_gpu_is_taken_only_if_there_is_one_for_each_rank(
    monkeypatch, cards, device
):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    assert str(rank_device()) == device


@pytest.mark.parametrize(
    "cards, world, least, device",
    [
        (1, 1, 1, "cuda:0"),
        (1, 1, 2, "cpu"),
        (1, 2, 2, "cpu"),
        (2, 1, 2, "cuda:0"),
        (2, 0, 2, "cpu"),
    ],
)
def test_one_process_is_compared_with_two_on_the_same_kind_of_device(
    monkeypatch, cards, world, least, device
):
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(world))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    assert str(rank_device(least)) == device


# where a cell starts processes ---------------------------------------------------------------------


@pytest.fixture
def pretend(monkeypatch, untouched_accelerate) -> Iterator[Any]:
    """Makes this process believe in other GPUs, in another driver, in Colab or in Kaggle."""
    for name in list(os.environ):
        if name.startswith("KAGGLE") or name in ("TPU_NAME", "PJRT_DEVICE"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.delitem(sys.modules, "bitsandbytes", raising=False)
    monkeypatch.setattr(launching.sys, "platform", "linux")
    launching.a_gpu_is_split.cache_clear()

    def change(cards: int = 0, split: bool = False, shell: str = "", **more: str):
        card = Card("H100", 0, 80 * 10**9, 9, split=split)
        reason = more.pop("problem", "" if cards else "torch sees no GPU")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cards > 0)
        monkeypatch.setattr(launching, "list_gpus", lambda: [card] * cards)
        monkeypatch.setattr(notebook_launch, "why_no_cuda", lambda: reason)
        ipython = SimpleNamespace(get_ipython=lambda: shell)
        monkeypatch.setitem(sys.modules, "IPython", ipython)
        for name, value in more.items():
            monkeypatch.setenv(name, value)

    yield change
    launching.a_gpu_is_split.cache_clear()


COLAB = "<google.colab._shell.Shell object at 0x7f>"


@pytest.mark.parametrize(
    "cards, wanted, processes, device",
    [
        (0, {}, 2, "cpu"),
        (1, {}, 2, "cpu"),
        (2, {}, 2, "cuda"),
        (8, {}, 8, "cuda"),
        (8, {"most": 2}, 2, "cuda"),
        (8, {"most": 4}, 4, "cuda"),
        (6, {"batch": 8}, 4, "cuda"),
        (8, {"batch": 8}, 8, "cuda"),
        (3, {"batch": 8}, 2, "cuda"),
        (3, {"batch": 5}, 2, "cpu"),
    ],
)
def test_a_cell_takes_the_gpus_that_are_there_else_two_processes_on_the_cpu(
    pretend, cards, wanted, processes, device
):
    pretend(cards)
    place = where_to_launch(**wanted)
    assert (place.processes, place.device) == (processes, device)
    assert place.launcher == "notebook_launcher"
    assert ("CUDA_VISIBLE_DEVICES" in place.variables()) == (device == "cpu")


def test_the_line_says_which_and_why(pretend):
    pretend(0)
    line = "2 processes on the CPU, by notebook_launcher (torch sees no GPU)"
    assert str(where_to_launch()) == line
    pretend(8)
    end = (
        "8 processes on a GPU each, by notebook_launcher (GPUs to be shared out: 8)"
    )
    assert str(where_to_launch()) == end


def test_the_parts_of_a_split_gpu_are_not_shared_out(pretend, monkeypatch):
    """The driver counts eight cards where a process can use one part of one."""
    pretend(8, split=True)
    place = where_to_launch()
    assert (place.processes, place.device) == (2, "cpu")
    assert "split" in place.reason
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert rank_device().type == "cpu"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert rank_device().type == "cuda"


def test_gpus_that_torch_cannot_use_are_not_shared_out(pretend):
    pretend(2, problem="the driver is too old for CUDA 13.0")
    place = where_to_launch()
    assert (place.processes, place.device) == (2, "cpu")
    assert place.reason == "the driver is too old for CUDA 13.0"


# the GPUs, the surroundings, and whether accelerate's launcher starts several processes there
SURROUNDINGS = {
    "laptop": (0, {}, True),
    "two GPUs": (2, {}, True),
    "Colab, CPU": (0, {"shell": COLAB}, False),
    "Colab, T4": (1, {"shell": COLAB}, False),
    "Colab, two GPUs": (2, {"shell": COLAB}, True),
    "Colab, TPU": (0, {"shell": COLAB, "PJRT_DEVICE": "TPU"}, False),
    "Kaggle, CPU": (0, {"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, True),
    "Kaggle, P100": (1, {"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, True),
    "Kaggle, two T4": (2, {"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, True),
    "Kaggle, TPU": (0, {"KAGGLE_URL_BASE": "x", "TPU_NAME": "local"}, False),
    "Colab with a key of Kaggle": (0, {"shell": COLAB, "KAGGLE_KEY": "x"}, True),
}


@pytest.mark.parametrize("where", SURROUNDINGS)
def test_what_accelerates_launcher_will_do_is_foreseen(pretend, monkeypatch, where):
    """Its own code is asked, with only the start of processes and `nvidia-smi` replaced."""
    from accelerate import launchers
    from torch.distributed.launcher import api

    cards, surroundings, several = SURROUNDINGS[where]
    pretend(cards, **surroundings)
    assert (why_not_notebook_launcher() == "") == several
    assert (where_to_launch().launcher == "launch") != several

    began = []

    def elastic_launch(config: Any, entrypoint: Any) -> Any:
        return lambda *arguments: began.append(config.nproc_per_node)

    def spawn(*_: Any, **__: Any) -> None:
        began.append("TPU")

    xla = SimpleNamespace(spawn=spawn)
    package = SimpleNamespace(xla_multiprocessing=xla)
    monkeypatch.setitem(
        sys.modules, "torch_xla", SimpleNamespace(distributed=package)
    )
    monkeypatch.setitem(sys.modules, "torch_xla.distributed", package)
    name = "torch_xla.distributed.xla_multiprocessing"
    monkeypatch.setitem(sys.modules, name, xla)
    monkeypatch.setattr(launchers, "get_gpu_info", lambda: (["T4"] * cards, cards))
    monkeypatch.setattr(api, "elastic_launch", elastic_launch)
    launchers.notebook_launcher(lambda: began.append("kernel"), (), 2)
    assert (began == [2]) == several, began


@pytest.mark.parametrize("cards, device", [(0, "cpu"), (1, "cpu"), (2, "cuda")])
def test_a_kernel_that_used_its_gpu_is_not_forked_but_its_gpus_are_used(
    pretend, monkeypatch, cards, device
):
    pretend(cards)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    place = where_to_launch()
    assert (place.launcher, place.device) == ("launch", device)
    assert "has used the GPU" in place.reason


def test_where_bitsandbytes_is_imported_the_launcher_would_refuse(
    pretend, monkeypatch
):
    from accelerate import notebook_launcher

    pretend(0)
    monkeypatch.setitem(sys.modules, "bitsandbytes", SimpleNamespace())
    assert "bitsandbytes" in where_to_launch().reason
    with pytest.raises(RuntimeError, match="bitsandbytes"):
        notebook_launcher(print, (), 2)


def test_a_launcher_that_starts_one_process_after_all_is_refused(pretend):
    """The function does not run: nobody compares one process with itself."""
    calls: list[int] = []
    pretend(0, shell=COLAB)
    place = where_to_launch()._replace(launcher="notebook_launcher")
    before = os.environ.copy()
    with pytest.raises(CourseError, match=r"1 process\(es\), not 2"):
        launch_in_notebook(calls.append, 1, place=place)
    assert calls == []
    assert os.environ == before


def leave_a_note(folder: str) -> None:
    """Work with a plain `Accelerator()`, which must come to know the others, and write it down."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    total = accelerator.reduce(torch.ones(1, device=accelerator.device)).item()
    note = f"{accelerator.num_processes} {accelerator.device.type} {total:g}"
    Path(folder, os.environ["RANK"]).write_text(note)


@slow
@forks
@pytest.mark.parametrize("launcher", ["notebook_launcher", "launch"])
def test_both_launchers_start_two_processes_that_know_each_other(
    untouched_accelerate, tmp_path, launcher, capsys
):
    place = where_to_launch(most=2)._replace(launcher=launcher)
    handler = signal.getsignal(signal.SIGTERM)
    before = os.environ.copy()
    assert launch_in_notebook(leave_a_note, str(tmp_path), place=place) == place
    assert capsys.readouterr().out.startswith(f"{place}\n")
    notes = [path.read_text() for path in sorted(tmp_path.iterdir())]
    assert notes == [f"2 {place.device} 2"] * 2
    assert signal.getsignal(signal.SIGTERM) == handler
    assert os.environ == before


def believe_to_be_alone() -> None:
    """An `Accelerator` that does not look for others, as in a launch that forgot to say so."""
    from accelerate.state import PartialState

    PartialState._shared_state["num_processes"] = 1
    PartialState._shared_state["distributed_type"] = "NO"


@slow
@forks
def test_processes_that_trained_alone_are_refused_after_the_launch(
    untouched_accelerate,
):
    place = where_to_launch(most=2)._replace(launcher="launch")
    with pytest.raises(CourseError, match="each believes it is alone"):
        launch_in_notebook(believe_to_be_alone, place=place)


# the cells of the lessons ------------------------------------------------------------------------


# It shows that the launcher calls the function of a single process in the kernel.
ON_PURPOSE = {"trainer-run"}


@pytest.mark.parametrize(
    "path", sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")), ids=lambda p: p.name
)
def test_every_cell_that_starts_processes_asks_where(path):
    for one in nbformat.read(path, as_version=4).cells:
        generated = "bootstrap" in one.metadata.get("tags", [])
        if one.cell_type == "code" and not generated:
            assert "google.colab" not in one.source
            if re.search(r"\bnotebook_launcher\(", one.source):
                assert "place." in one.source or one.id in ON_PURPOSE
            if re.search(r"\blaunch_in_notebook\(", one.source):
                assert "place=place" in one.source


@pytest.mark.parametrize("lesson", ["10", "11"])
def test_no_cell_asserts_a_time(lesson):
    clocks = {"seconds", "took", "idle", "link", "over"}
    for one in cells(lesson):
        tree = ast.parse(one.source if one.cell_type == "code" else "")
        claims = [
            node.test for node in ast.walk(tree) if isinstance(node, ast.Assert)
        ]
        for part in ast.walk(ast.Module(claims, [])):
            assert not (isinstance(part, ast.Name) and part.id in clocks)


# the launch files --------------------------------------------------------------------------------

FILES = sorted((ROOT / "launch").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_accelerate_reads_each_configuration(path):
    from accelerate.commands.config.config_args import load_config_from_file

    read = load_config_from_file(str(path))
    written = yaml.safe_load(path.read_text())
    assert read.distributed_type.value == written["distributed_type"] != "NO"
    assert read.num_processes == written["num_processes"] > 1


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_readme_says_which_program_each_file_starts(path):
    lines = (ROOT / "launch/README.md").read_text().splitlines()
    line = next(line for line in lines if line.startswith(f"| `{path.name}`"))
    plain = yaml.safe_load(path.read_text())["distributed_type"] == "MULTI_GPU"
    # The training program shards by itself and refuses a launcher that would do it once more.
    assert ("`stages.training`" in line) == plain
    assert "`stages.classifier`" in line


def test_the_settings_of_deepspeed_are_where_the_configuration_looks():
    inner = yaml.safe_load((ROOT / "launch/zero3.yaml").read_text())[
        "deepspeed_config"
    ]
    settings = json.loads((ROOT / inner["deepspeed_config_file"]).read_text())
    assert settings["zero_optimization"]["stage"] == 3
