"""Functions on several processes, from a notebook.

    launch(function, world=4) -> a result a rank, or one error that names the rank that failed first

The processes of `launch` are forks of the kernel, which have its functions and data at once; where a fork
cannot work they are spawned. Each finds its place in RANK, LOCAL_RANK and WORLD_SIZE, is a member
of one process group, and leaves files: `0.out`, `0.log`, `0.stack`, `0.error`, `0.pt`.
What a cell of a notebook starts, and on which devices, is decided in `stages/notebook_launch.py`,
which takes these processes where accelerate's launcher would start one only.
"""

from __future__ import annotations

import functools
import multiprocessing
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
from utils.machine import list_gpus

# Seconds that a rank may take to import its libraries and join the group: a busy machine takes long.
START_LIMIT = 600


def free_port() -> int:
    """A port that nobody listens on now, for launchers that need one; `launch` does not.

    >>> 1024 < free_port() < 65536
    True
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_method() -> Choice:
    """Fork if a fork of this kernel can work, else spawn, and why."""
    if sys.platform != "linux":
        return Choice("spawn", "a fork is safe on Linux only")
    accelerate = sys.modules.get("accelerate.state")
    if accelerate and accelerate.PartialState._shared_state:
        reason = "this kernel made an Accelerator: a fork would think it is alone"
        return Choice("spawn", reason)
    if torch.cuda.is_initialized():
        reason = "this kernel has used the GPU, and a fork of it could not"
        return Choice("spawn", reason)
    return Choice("fork", "no GPU and no Accelerator has been used in this kernel")


@functools.cache
def a_gpu_is_split() -> bool:
    """Whether a GPU of this machine is cut into parts (MIG), of which a process can use only one."""
    return any(card.split for card in list_gpus())


def count_gpus() -> int:
    """How many GPUs can be shared out, one to each process; no CUDA context is made by asking."""
    count = torch.cuda.device_count()
    if count > 1 and a_gpu_is_split():
        return 1
    return count


def rank_device(least: int = 1) -> torch.device:
    """This rank's own GPU if the machine has one for each rank, and `least` in all, else the CPU.

    To compare one process with two, ask for two: else the one might use a GPU where the two cannot.

    >>> rank_device(least=1_000_000)
    device(type='cpu')
    """
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if ranks_here and max(ranks_here, least) <= count_gpus():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def count_ranks() -> int:
    """How many processes work together here: as the `Accelerator` sees it, else as was promised."""
    state = sys.modules.get("accelerate.state")
    if state and state.PartialState._shared_state:
        return state.PartialState().num_processes
    return int(os.environ.get("WORLD_SIZE", "1"))


def require_world(expected: int) -> None:
    """Stop a run of another number of processes than it is meant for, or whose processes are alone.

    Before an `Accelerator` is made it holds the launcher to its promise, and after it the sight too.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    fix = f"torchrun --nproc_per_node {expected}"
    if started != expected:
        problem = f"this run has {started} process(es), not {expected}"
        raise CourseError(problem, "WORLD_SIZE", fix)
    if count_ranks() != expected:
        problem = f"{started} processes were started, and each believes it is alone"
        raise CourseError(problem, "Accelerator", "make it with cpu=True")


def write_stack_after(seconds: float, path: Path) -> None:
    """Write down, later, which calls the main thread is in, the innermost first.

    A thread does it that holds the interpreter: `faulthandler` reads frames while they change.
    """

    def write() -> None:
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        calls = traceback.walk_stack(frame)
        names = [f"{inner.f_code.co_name}:{line}" for inner, line in calls]
        path.write_text(" < ".join(names[:4]), encoding="utf-8")

    timer = threading.Timer(seconds, write)
    timer.daemon = True
    timer.start()


def exit_with_parent() -> None:
    """End this child as soon as its parent has ended, however that happened."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def open_lines(path: Path) -> Any:
    """A file for text that is written a line at a time."""
    return path.open("w", encoding="utf-8", buffering=1)


def become_rank(rank: int, folder: Path, world: int) -> None:
    """Give a child its place, its files, one thread, and an end if its parent ends."""
    # An interrupt reaches the whole group: the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=exit_with_parent, daemon=True).start()
    sys.stdout = open_lines(folder / f"{rank}.out")
    sys.stderr = open_lines(folder / f"{rank}.log")
    # What C++ code prints goes to the log too.
    os.dup2(sys.stderr.fileno(), 1)
    os.dup2(sys.stderr.fileno(), 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    os.environ["OMP_NUM_THREADS"] = "1"
    # A fork would wait for ever for threads that only its parent has.
    torch.set_num_threads(1)


def work_as_rank(
    packed: Any, rank: int, folder: Path, world: int, seconds: float
) -> None:
    """What a child does: join the group, run the function, leave a result or an error in a file."""
    become_rank(rank, folder, world)
    try:
        if isinstance(packed, bytes):
            packed = dill.loads(packed)
        function, arguments = packed
        device = rank_device()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend = "gloo" if device.type == "cpu" else None
        # The ranks meet in a file, which unlike a port nobody else can take.
        store = dist.FileStore(str(folder / "meeting"), world)
        place: dict[str, Any] = {"store": store, "rank": rank, "world_size": world}
        dist.init_process_group(backend, **place)
        # Imports are over: the clock starts here.
        write_stack_after(seconds, folder / f"{rank}.stack")
        torch.save(function(*arguments), folder / f"{rank}.pt")
        # Nobody leaves while another still talks to it.
        dist.barrier()
        sys.stdout.flush()
        # A fork must not run its parent's clean-up.
        os._exit(0)
    except BaseException:
        error = traceback.format_exc()
        (folder / f"{rank}.error").write_text(error, encoding="utf-8")
        os._exit(1)


def find_problem(
    children: list[Any], folder: Path, seconds: float
) -> CourseError | None:
    """What went wrong, if anything: a silent death, else the first error, else a hang."""
    if all(child.exitcode == 0 for child in children):
        return None
    for rank, child in enumerate(children):
        if child.exitcode and not (folder / f"{rank}.error").exists():
            how = "by signal" if child.exitcode < 0 else "with status"
            problem = (
                f"rank {rank} ended {how} {abs(child.exitcode)}, without an error"
            )
            return CourseError(problem, fix="look at the memory first")
    errors = folder.glob("*.error")
    in_order = sorted(errors, key=lambda path: path.stat().st_mtime_ns)
    if in_order:
        return tell_error(in_order[0])
    lines = [
        f"after {seconds:g} s these ranks still work or wait, the innermost call first:"
    ]
    for rank, child in enumerate(children):
        if child.is_alive():
            stack = folder / f"{rank}.stack"
            calls = "not ready yet"
            if stack.exists():
                calls = stack.read_text(encoding="utf-8")
            lines.append(f"  rank {rank}: {calls}")
    fix = "find the collective that not every rank calls"
    return CourseError("\n".join(lines), fix=fix)


def tell_error(path: Path) -> CourseError:
    """The error that a rank wrote down, with its innermost calls."""
    # torch writes the full path of a C++ file in brackets: the file is enough.
    text = path.read_text(encoding="utf-8").strip()
    text = re.sub(r"\[/\S+/(\S+)\]", r"[\1]", text)
    kinds = r"\n(?=[A-Za-z_.]+(?:Error|Exception|Interrupt|Exit)\b)"
    last = re.split(kinds, text)[-1]
    # Behind these words torch lists the frames of C++.
    message = last.split("Exception raised")[0]
    lines = re.findall(r"line (\d+), in (\S+)", text)
    calls = [f"{name}:{line}" for line, name in reversed(lines)]
    what = f"rank {path.stem} failed first: {message}"
    fix = "mend that one; the others only lost their partner"
    if "Detected mismatch" in message:  # which all ranks find out at the same time
        fix = "compare what the ranks were about to do; either may be wrong"
    return CourseError(what, " < ".join(calls[:4]), fix)


def wait_for_end(children: list[Any], folder: Path, seconds: float) -> None:
    """Wait until all have ended, or one has failed, or those that still run wrote their stacks."""
    limit = START_LIMIT + seconds
    end = time.monotonic() + limit
    while time.monotonic() < end:
        alive = [child for child in children if child.is_alive()]
        running = [child.sentinel for child in alive]
        if not running:
            return
        stacks = list(folder.glob("*.stack"))
        failed = any(child.exitcode for child in children)
        if failed or len(stacks) >= len(running):
            break
        wait(running, timeout=0.05)
    # The partners of a rank that failed may leave their errors too.
    for child in children:
        child.join(timeout=0.3)


def launch(
    function: Callable,
    *arguments: Any,
    world: int = 2,
    seconds: float = 120,
    start: str = "",
) -> list[Any]:
    """Run a function on `world` processes; print what they printed, return each rank's result.

    >>> launch(lambda: dist.get_rank(), world=2)                   # doctest: +SKIP
    [0, 1]
    """
    method = start or start_method().value
    work: Any = (function, arguments)
    if method != "fork":
        # Functions of a notebook travel by value.
        work = dill.dumps(work, recurse=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        children: list[Any] = []
        context: Any = multiprocessing.get_context(method)
        try:
            for rank in range(world):
                place = (work, rank, folder, world, seconds)
                child = context.Process(target=work_as_rank, args=place)
                child.start()
                children.append(child)
            wait_for_end(children, folder, seconds)
            problem = find_problem(children, folder, seconds)
        finally:
            for child in children:
                # SIGTERM would be ignored inside a collective.
                child.kill()
                child.join()
        for rank in range(world):
            printed = (folder / f"{rank}.out").read_text(encoding="utf-8")
            for line in printed.splitlines():
                print(f"rank {rank} | {line}")
        if problem:
            raise problem
        results = [folder / f"{rank}.pt" for rank in range(world)]
        return [torch.load(path, weights_only=True) for path in results]
