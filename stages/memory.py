"""The memory that a piece of work takes, measured or predicted.

    run_fresh(work)       what the system says of a whole fresh process
    driver_bytes()        what the driver of a GPU says of its card
    measure_peak(work)    what torch's allocator had given out at once
    predict_memory(work)  the same on tensors without contents, for any size, in no memory at all
    fake_tensors()        such tensors and their counter, for work in several parts

A notebook's kernel remembers everything done before, so `run_fresh` starts a Python of its own and
reads, every few milliseconds, the memory that the system could not take back from it.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import itertools
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from utils.errors import CourseError
from utils.machine import memory_of, nvidia_driver

WINDOWS = sys.platform == "win32"
PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
{source}
result = {name}(*json.loads(sys.argv[2]))
with open(sys.argv[3], "w", encoding="utf-8") as file:
    json.dump(result, file)
"""


@dataclass(frozen=True)
class FreshRun:
    """What a function returned in a fresh process, and the most bytes that were seen there.

    `private` is its own memory, `resident` counts mapped files too.
    """

    result: Any
    private: int
    resident: int


def run_fresh(function: Callable, *arguments: Any) -> FreshRun:
    """Run `function(*arguments)` in a fresh Python and watch its memory from outside.

    The function travels as its source, so it imports what it needs, and uses no name from outside
    it; what it takes and returns travels as JSON.

    >>> run_fresh(count_to, 3).result                              # doctest: +SKIP
    [1, 2, 3]
    """
    source = textwrap.dedent(inspect.getsource(function))
    program = PROGRAM.format(source=source, name=function.__name__)
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch, "answer.json")
        log = Path(scratch, "log.txt")
        given = [json.dumps(sys.path), json.dumps(arguments), str(answer)]
        python, env = real_interpreter()
        command = [python, "-c", program, *given]
        with log.open("wb") as file:
            child = subprocess.Popen(command, env=env, stdout=file, stderr=file)
            readings = watch(child)
        if child.returncode:
            last = log.read_text("utf-8", "replace").strip().split("\n")[-1]
            problem = f"{function.__name__} failed in its own process: {last}"
            place = f"exit status {child.returncode}"
            raise CourseError(problem, place, "run it here to see all of it")
        private = max((memory["private"] for memory in readings), default=0)
        resident = max((memory["resident"] for memory in readings), default=0)
        return FreshRun(json.loads(answer.read_text("utf-8")), private, resident)


def real_interpreter() -> tuple[str, dict[str, str]]:
    """This Python, and the environment it needs. On Windows a venv's python.exe only starts another.

    What is watched must be that other one; `multiprocessing` starts it in the same way.
    """
    env = dict(os.environ)
    base = vars(sys).get("_base_executable", sys.executable)
    if WINDOWS and base != sys.executable:
        env["__PYVENV_LAUNCHER__"] = sys.executable
        return base, env
    return sys.executable, env


def watch(child: subprocess.Popen) -> list[dict[str, int]]:
    """Readings of a child's memory until it ends; it is ended if the watcher is interrupted."""
    readings = []
    try:
        while child.poll() is None:
            readings.append(memory_of(child.pid))
            time.sleep(0.005)
    except (OSError, psutil.Error):
        child.wait()  # It ended between the two calls.
    finally:
        child.kill()  # This does nothing to a process that has ended.
        child.wait()
    return readings


def driver_bytes() -> int:
    """Bytes in use on torch's current GPU, by all programs: what `nvidia-smi` shows of this card.

    The card is found by its UUID, since `CUDA_VISIBLE_DEVICES` gives torch other numbers.
    """
    current = torch.cuda.get_device_properties(torch.cuda.current_device())
    with nvidia_driver() as driver:
        if driver is None:
            return torch.cuda.memory_reserved()
        card = driver.nvmlDeviceGetHandleByUUID(f"GPU-{current.uuid}")
        return int(driver.nvmlDeviceGetMemoryInfo(card).used)


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of every tensor made while it is on, from its birth to its death.

    A view shares its storage and is not counted twice. A tensor from before counts from the first
    operation that returns it or a view of it, unless it is among the `given`: those count from the
    start. What a kernel takes and gives back within itself is not seen.

    >>> with LiveTensors() as live:
    ...     a = torch.zeros(1000); b = a + 1; del a
    >>> live.now, live.peak
    (4000, 8000)
    """

    def __init__(self, given: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        # The value of `now` after every later birth and death, and when that was.
        self.curve: list[int] = []
        self.times: list[float] = []
        self._alive: dict[int, weakref.ref] = {}
        for tensor in given:
            self._count(tensor)
        self.curve.clear()
        self.times.clear()

    def _count(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage from now on, until it is freed."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        size = storage.nbytes()

        def forget(_: object) -> None:
            del self._alive[address]
            self._change(-size)

        if address not in self._alive:
            self._alive[address] = weakref.ref(storage, forget)
            self._change(size)

    def _change(self, size: int) -> None:
        self.now += size
        if self.now > self.peak:
            self.peak = self.now
        self.curve.append(self.now)
        self.times.append(time.perf_counter())

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf)
        return result


def predict_memory(work: Callable[[], object]) -> LiveTensors:
    """Run `work` on fake tensors, which have sizes and no contents, and count their bytes.

    >>> predict_memory(lambda: torch.zeros(10**12)).peak           # four terabytes, in no time
    4000000000000
    """
    with fake_tensors() as live:
        work()
    return live


@contextlib.contextmanager
def fake_tensors() -> Iterator[LiveTensors]:
    """Let every tensor be one without contents, and count their bytes.

    transformers looks into a row's positions: is it packed of several texts? Of positions without
    contents it believes so, and would keep a mask of all pairs of tokens in each layer.

    >>> with fake_tensors() as live:
    ...     a = torch.zeros(1000)
    >>> live.now
    4000
    """
    from transformers import masking_utils

    def one_text(position_ids: torch.Tensor) -> torch.Tensor | None:
        return None

    look = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = one_text
    try:
        with FakeTensorMode(), LiveTensors() as live:
            yield live
    finally:
        masking_utils.find_packed_sequence_indices = look


def measure_peak(work: Callable[[], object], device: str = "cpu") -> int:
    """The most bytes that torch's allocator had given out for `work` at once.

    What earlier work left in reference cycles is freed first, or it would be freed in the middle.
    """
    gc.collect()
    if device == "cpu":
        return max(allocator_curve(work))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    return torch.cuda.max_memory_allocated() - before


def allocator_curve(work: Callable[[], object]) -> list[int]:
    """Bytes given out by the CPU allocator after each of its calls, as the profiler saw them."""
    # The profiler's greetings are not our output.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, profile_memory=True) as profile:
        work()
    events = profile.profiler.kineto_results.events()
    calls = [event for event in events if event.name() == "[memory]"]
    calls.sort(key=lambda event: event.start_ns())
    return list(itertools.accumulate((call.nbytes() for call in calls), initial=0))
