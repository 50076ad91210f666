"""Floor 1: how much memory a piece of work takes, measured where nothing else has been.

A notebook's kernel remembers everything done before, so a function is measured in a fresh Python.
Its parent reads, every few milliseconds, the memory that the system could not take back by
dropping file pages: `RssAnon` on Linux, private bytes on Windows. macOS tells a process nothing
of the kind; there the whole resident memory is read, and `measure()` says so.
"""
from __future__ import annotations

import inspect
import json
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from utils.common import CourseError

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


def measure() -> str:
    """Which number of the system's stands for private memory here.

    >>> measure() in ("RssAnon", "private bytes", "RSS, mapped files included")
    True
    """
    if Path("/proc/self/status").exists():
        return "RssAnon"
    return "private bytes" if sys.platform == "win32" else "RSS, mapped files included"


def memory_of(pid: int | None = None) -> dict[str, int]:
    """Bytes of a process (this one by default): `private`, `mapped` (files), and all: `resident`.

    >>> memory_of()["resident"] >= memory_of()["private"] > 0      # doctest: +SKIP
    True
    """
    if measure() == "RssAnon":
        lines = Path(f"/proc/{pid or 'self'}/status").read_text().splitlines()
        sizes = {k: int(v.split()[0]) * 1024 for k, _, v in (line.partition(":") for line in lines)
                 if k in ("VmRSS", "RssAnon", "RssFile", "RssShmem")}
        if not sizes:  # the process has ended and is not collected yet
            raise ProcessLookupError(pid)
        mapped = sizes["RssFile"] + sizes["RssShmem"]
        return {"private": sizes["RssAnon"], "mapped": mapped, "resident": sizes["VmRSS"]}
    info = psutil.Process(pid).memory_info()
    private = getattr(info, "private", info.rss)
    return {"private": private, "mapped": max(0, info.rss - private), "resident": info.rss}


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
