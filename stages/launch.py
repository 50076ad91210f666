"""Floor 3: functions on several processes from a notebook.

    launch(function, world=4) -> a result a rank, or one error that names the rank that failed first

The processes are forks of the kernel, which have its functions and data at once; where that cannot
be they are spawned. Each finds its place in RANK, LOCAL_RANK and WORLD_SIZE, and is in a group.
"""
from __future__ import annotations

import multiprocessing as mp
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import dill
import torch
import torch.distributed as dist

from utils.errors import Choice, CourseError


def free_port() -> int:
    """A port that nobody listens on now; another may still take it first.

    For launchers that must have one. It is better than their fixed 29500, and `launch` needs none.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_method() -> Choice:
    """Fork if a fork of this kernel can work, else spawn, and why."""
    state = sys.modules.get("accelerate.state")
    if "fork" not in mp.get_all_start_methods():
        return Choice("spawn", "this system has no fork")
    if sys.platform == "darwin":
        return Choice("spawn", "system libraries of macOS do not survive a fork")
    if state and state.PartialState._shared_state:
        return Choice("spawn", "this kernel made an Accelerator: a fork would think it is alone")
    if torch.cuda.is_initialized():
        return Choice("spawn", "this kernel has used the GPU, and a fork of it could not")
    return Choice("fork", "no GPU and no Accelerator has been used in this kernel")


def rank_device(least: int = 1) -> torch.device:
    """This rank's own GPU if the machine has one for each rank, and `least` in all, else the CPU.

    To compare one process with two, ask for two: or the one would use a GPU, and the two could not.
    """
    local, many = (int(os.environ.get(name, 0)) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    each = many and max(many, least) <= torch.cuda.device_count()
    return torch.device("cuda", local) if each else torch.device("cpu")


def require_world(wanted: int) -> None:
    """Stop a run that was started as fewer processes than were asked for."""
    found = int(os.environ.get("WORLD_SIZE", 1))
    if found != wanted:
        raise CourseError(f"this run has {found} process(es), not {wanted}", "WORLD_SIZE",
                          f"start it with torchrun --nproc_per_node {wanted}")


def note_stack_after(seconds: float, path: Path) -> None:
    """Write down, later, where this process is, the innermost call first.

    By a thread that holds the interpreter: `faulthandler` reads frames while they change, and may crash.
    """
    def note() -> None:
        frame, calls = sys._current_frames()[threading.main_thread().ident], []
        while frame:
            calls.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
            frame = frame.f_back
        path.write_text("\n".join(calls))
    timer = threading.Timer(seconds, note)
    timer.daemon = True
    timer.start()


def become_rank(rank: int, folder: Path, world: int, seconds: float) -> None:
    """Give a child its place, its files, one thread, and an end if its parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    parent = mp.parent_process().sentinel
    threading.Thread(target=lambda: (wait([parent]), os._exit(1)), daemon=True).start()
    sys.stdout, sys.stderr = (open(folder / f"{rank}.{kind}", "w", 1) for kind in ("said", "log"))
    os.dup2(sys.stderr.fileno(), 1), os.dup2(sys.stderr.fileno(), 2)  # what C++ code prints
    note_stack_after(60 + seconds, folder / f"{rank}.stack")  # should it never get ready
    places = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world,
                  OMP_NUM_THREADS=1)
    os.environ |= {name: str(value) for name, value in places.items()}
    torch.set_num_threads(1)  # a fork may not wait for threads that only its parent has


def work_as_rank(packed: Any, rank: int, folder: Path, world: int, seconds: float) -> None:
    """What a child does: join the group, run the function, leave a result or an error in a file."""
    become_rank(rank, folder, world, seconds)
    try:
        function, arguments = dill.loads(packed) if isinstance(packed, bytes) else packed
        if rank_device().type == "cuda":
            torch.cuda.set_device(rank)
        dist.init_process_group("gloo" if rank_device().type == "cpu" else None, rank=rank,
                                world_size=world, init_method=(folder / "meet").as_uri())
        (folder / f"{rank}.ready").touch()  # imports are over: the clock starts here
        note_stack_after(seconds, folder / f"{rank}.stack")
        torch.save(function(*arguments), folder / f"{rank}.pt")
        dist.barrier()  # nobody leaves while another still talks to it
        sys.stdout.flush()
        os._exit(0)  # a fork must not run its parent's clean-up
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc())
        os._exit(1)


def explain(children: list[mp.Process], folder: Path, seconds: float) -> CourseError:
    """The first failure, in words: who died in silence, else who raised first, else who hangs."""
    for rank, child in enumerate(children):
        if child.exitcode and not (folder / f"{rank}.error").exists():
            how = "by signal" if child.exitcode < 0 else "with status"
            return CourseError(f"rank {rank} ended {how} {abs(child.exitcode)}, without an error",
                               fix="look at the memory first")
    if errors := sorted(folder.glob("*.error"), key=lambda path: path.stat().st_mtime_ns):
        text = re.sub(r"\[/\S+/(\S+)\]", r"[\1]", errors[0].read_text().strip())
        said = re.split(r"\n(?=[A-Za-z_.]+(?:Error|Exception|Interrupt|Exit)\b)", text)[-1]
        calls = re.findall(r"line (\d+), in (\S+)", text)[::-1]
        said = said.split("Exception raised")[0]  # C++ frames follow
        return CourseError(f"rank {errors[0].stem} failed first: {said}",
                           " < ".join(f"{name}:{line}" for line, name in calls[:4]),
                           "mend that one; the others only lost their partner")
    waiting = [f"after {seconds:g} s these ranks still work or wait, the innermost call first:"]
    for rank in (rank for rank, child in enumerate(children) if child.is_alive()):
        stack = folder / f"{rank}.stack"
        calls = stack.read_text().split("\n") if stack.exists() else ["not ready yet"]
        waiting.append(f"  rank {rank}: " + " < ".join(calls[:4]))
    return CourseError("\n".join(waiting), fix="find the collective that not every rank calls")


def wait_for(children: list[mp.Process], folder: Path, seconds: float) -> None:
    """Until all have ended, or one has failed, or the time is over since all were ready."""
    latest = time.monotonic() + 60
    while len([*folder.glob("*.ready")]) < len(children) and time.monotonic() < latest and not any(
            child.exitcode for child in children):
        time.sleep(0.01)
    end = time.monotonic() + seconds + 0.5  # the children write their stacks down first
    while (alive := [c.sentinel for c in children if c.is_alive()]) and time.monotonic() < end:
        wait(alive, timeout=max(0, end - time.monotonic()))
        if any(child.exitcode for child in children):
            return time.sleep(0.3)  # its neighbours may have failed before it


def launch(function: Callable, *arguments: Any, world: int = 2, seconds: float = 120,
           start: str = "") -> list[Any]:
    """Run a function on `world` processes; print what they said, return each rank's result.

    >>> launch(lambda: dist.get_rank(), world=2)                   # doctest: +SKIP
    [0, 1]
    """
    context = mp.get_context(start or start_method().value)
    packed: Any = (function, arguments)
    if context.get_start_method() != "fork":
        packed = dill.dumps(packed, recurse=True)  # functions of a notebook travel by value
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        folder, given = Path(scratch), (Path(scratch), world, seconds)
        children = [context.Process(target=work_as_rank, args=(packed, rank, *given))
                    for rank in range(world)]
        try:
            for child in children:
                child.start()
            wait_for(children, folder, seconds)
            good = all(child.exitcode == 0 for child in children)
            problem = None if good else explain(children, folder, seconds)
        finally:
            for child in filter(lambda c: c.pid, children):
                child.kill()  # SIGTERM is ignored inside a collective
                child.join()
        for said in sorted(folder.glob("*.said")):
            for line in said.read_text().splitlines():
                print(f"rank {said.stem} | {line}")
        if problem:
            raise problem
        return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world)]
