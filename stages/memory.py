"""Floor 1: the memory that a piece of work takes, measured or predicted.

Three readings. `run_fresh`: what the system says of a whole process; `driver_bytes`: what a GPU's
driver says of its card. `measure_peak`: what torch's allocator gave out. `predict_memory`: the same
work on tensors without contents, for any model and any size, in no memory at all; `LiveTensors`
does the counting there.

A notebook's kernel remembers everything done before, so a function is measured in a fresh Python.
Its parent reads, every few milliseconds, the memory that the system could not take back by
dropping file pages: `RssAnon` on Linux, private bytes on Windows. macOS tells a process nothing
of the kind; there the whole resident memory is read, and `measure()` says so.
"""
from __future__ import annotations

import gc
import inspect
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from utils.errors import CourseError
from utils.machine import memory_of

CHILD = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
{program}
result = {name}(*json.loads(sys.argv[2]))
with open(sys.argv[3], "w", encoding="utf-8") as file:
    json.dump(result, file)
"""


@dataclass(frozen=True)
class FreshRun:
    """What a function returned in a fresh process, and the most memory it held there, in bytes."""

    result: Any
    private: int  # the highest reading of private memory
    resident: int  # the highest reading of all memory, mapped files included
    readings: int  # how many there were: what rises and falls between two is not seen


def run_fresh(function: Callable, *arguments: Any, every: float = 0.005) -> FreshRun:
    """Run `function(*arguments)` in a fresh Python and watch its memory from outside.

    The function travels as its source, so it imports what it needs, and uses no name from outside
    it; what it takes and returns travels as JSON.

    >>> run_fresh(count_to, 3).result                              # doctest: +SKIP
    [1, 2, 3]
    """
    source = textwrap.dedent(inspect.getsource(function))
    program = CHILD.format(program=source, name=function.__name__)
    with tempfile.TemporaryDirectory() as scratch:
        answer, said = Path(scratch, "answer.json"), Path(scratch, "said.txt")
        given = json.dumps(sys.path), json.dumps(arguments)
        command = [sys.executable, "-c", program, *given, str(answer)]
        with said.open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as child:
            peaks = watch(child, every)
        if child.returncode:
            raise failure(function, child.returncode, said.read_text(errors="replace"))
        return FreshRun(json.loads(answer.read_text("utf-8")), *peaks)


def failure(function: Callable, status: int, said: str) -> CourseError:
    """What went wrong in a child, from the last line of what it said."""
    last = (said.strip().splitlines() or ["it said nothing"])[-1]
    return CourseError(f"{function.__name__} failed in its own process: {last}",
                       f"exit status {status}", "run it here to see all of it")


def watch(child: subprocess.Popen, every: float) -> tuple[int, int, int]:
    """The most private and resident memory of a child until it ends, and how often it was read."""
    readings = [(0, 0)]
    try:
        while child.poll() is None:
            try:
                memory = memory_of(child.pid)
            except (OSError, psutil.Error):  # it ended between the two calls
                break
            readings.append((memory["private"], memory["resident"]))
            time.sleep(every)
        child.wait()
    finally:
        child.kill()  # does nothing to one that has ended
        child.wait()
    return *map(max, zip(*readings)), len(readings) - 1


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
        self.now = self.peak = 0
        self.curve: list[int] = []  # `now` after every later birth and death
        self._alive: dict[int, weakref.ref] = {}
        for tensor in given:
            self._meet(tensor)
        self.curve.clear()

    def _meet(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, lambda _: self._part(key, size))
            self._change(size)

    def _part(self, key: int, size: int) -> None:
        del self._alive[key]
        self._change(-size)

    def _change(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)
        self.curve.append(self.now)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (),
                           kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):  # most operations make one tensor: no tree to search
            self._meet(made)
            return made
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor):
                self._meet(leaf)
        return made


def predict_memory(work: Callable[[], object]) -> LiveTensors:
    """Run `work` on fake tensors, which have sizes and no contents, and count their bytes.

    >>> predict_memory(lambda: torch.zeros(10**12)).peak           # four terabytes, in no time
    4000000000000
    """
    with FakeTensorMode(), LiveTensors() as live:
        work()
    return live


def measure_peak(work: Callable[[], object], device: str = "cpu") -> int:
    """The most bytes that torch's allocator had given out for `work` at once.

    What earlier work left in reference cycles is freed first, or it would be freed in the middle.
    """
    if device not in ("cpu", "cuda"):
        raise CourseError("this device's allocator reports no peak", device, 'measure on "cpu"')
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - before
    return max(allocator_curve(work))


def allocator_curve(work: Callable[[], object]) -> list[int]:
    """Bytes given out by the CPU allocator after each of its calls, as the profiler saw them."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's greetings are not our output
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, profile_memory=True, acc_events=False) as seen:
        work()
    calls = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    curve = [0]
    for call in sorted(calls, key=lambda e: e.start_ns()):
        curve.append(curve[-1] + call.nbytes())
    return curve


def saved_bytes(work: Callable[[], torch.Tensor], parameters: Iterable[torch.Tensor] = ()) -> int:
    """Bytes that autograd keeps for the backward pass of `work`, the parameters left out.

    >>> x = torch.ones(10, requires_grad=True)
    >>> saved_bytes(lambda: (x * x).sum(), [x]), saved_bytes(lambda: x.exp().sum())
    (0, 40)
    """
    own = {p.untyped_storage()._cdata for p in parameters}
    sizes: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            sizes[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = work()
    del result  # only now may the kept tensors go, and their addresses be used again
    return sum(sizes.values())
