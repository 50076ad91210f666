"""Runs one notebook in this process: `python -m course.execute`, its task as JSON on stdin.

The runner starts one such process a lesson, and reads a line of JSON from it at each cell and at
the end. Standard input stays open as long as the runner lives: when it closes, this process ends
everything that the lesson has started, and itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

# A process that ends with its kernel may need a moment on a busy machine.
GRACE_SECONDS = 5
# The path of a local socket may have about a hundred characters.
LONGEST_SOCKET_FOLDER = 80


@dataclass
class Task:
    """What to run, with what, for how long, and where to leave it and its page."""

    notebook: str
    output: str
    page: str
    parameters: dict[str, Any]
    cell_seconds: int = 900
    refusals: dict[str, str] = field(default_factory=dict)


# processes ----------------------------------------------------------------------------------------


def adopt_orphans() -> None:
    """On Linux, processes whose parent dies become our children, and so can be found and ended."""
    if sys.platform == "linux":
        PR_SET_CHILD_SUBREAPER = 36
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def below(pid: int, recursive: bool = True) -> list[psutil.Process]:
    """The live processes that a process has started, and those that they have."""
    alive = []
    with contextlib.suppress(psutil.Error, OSError):
        for child in psutil.Process(pid).children(recursive=recursive):
            with contextlib.suppress(psutil.Error):
                if child.status() != psutil.STATUS_ZOMBIE:
                    alive.append(child)
    return alive


def end_everything_below(pid: int) -> None:
    """Kill all descendants, and what they start meanwhile."""
    deadline = time.monotonic() + GRACE_SECONDS
    while (processes := below(pid)) and time.monotonic() < deadline:
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.02)


def end_children_but(pids: set[int]) -> None:
    """Kill what came to us as an orphan, from a process that could not end it any more."""
    for child in below(os.getpid(), recursive=False):
        if child.pid not in pids:
            end_everything_below(child.pid)
            with contextlib.suppress(psutil.Error):
                child.kill()


def end_survivors() -> int:
    """Kill what has outlived its kernel; how many processes that were."""
    deadline = time.monotonic() + GRACE_SECONDS
    while below(os.getpid()) and time.monotonic() < deadline:
        time.sleep(0.02)
    survivors = below(os.getpid())
    end_everything_below(os.getpid())
    return len(survivors)


def end_with_parent(runtime: str) -> None:
    """Wait until the runner is gone, however it went; then leave nothing behind."""
    # os.read, because a thread inside sys.stdin would keep the interpreter from ending.
    while os.read(0, 4096):
        pass
    end_everything_below(os.getpid())
    shutil.rmtree(runtime, ignore_errors=True)
    os._exit(1)


def memory_of(processes: list[psutil.Process]) -> int:
    """Bytes held by processes; shared pages count once where Linux can say."""
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            try:
                memory = process.memory_full_info()
            except (
                psutil.AccessDenied
            ):  # macOS tells this of one's own process only
                memory = process.memory_info()
            total += getattr(memory, "pss", memory.rss)
    return total


def last_words(log: Path) -> str:
    """The last line that a process has left in its log."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.strip()), "no last words")


# the notebook -------------------------------------------------------------------------------------


def prepare(task: Task) -> Any:
    """The notebook to run: parameters behind their cell, wrong answers behind their solutions."""
    import nbformat

    from course.notebooks import called
    from utils.errors import CourseError

    notebook = nbformat.read(task.notebook, as_version=4)
    refusals = dict(task.refusals)
    cells = []
    for cell in notebook.cells:
        cells.append(cell)
        if "parameters" in cell.metadata.get("tags", []):
            values = [
                f"{name} = {value!r}" for name, value in task.parameters.items()
            ]
            cells.append(new_cell("\n".join(values), "injected-parameters"))
        for function, name in (
            called(cell.source) if cell.cell_type == "code" else []
        ):
            if function == "solution" and name in refusals:
                cells.append(new_cell(refusals.pop(name), "refused"))
    if refusals:
        file = f"expected/refused/{Path(task.notebook).name[:2]}.py"
        what = f"{file} has wrong answers for {min(refusals)}, which has no solution cell"
        raise CourseError(
            what, Path(task.notebook), "mend the number, or add the solution"
        )
    notebook.cells = cells
    return notebook


def new_cell(source: str, tag: str) -> Any:
    """A folded cell that only the executed copy has."""
    import nbformat

    metadata = {"tags": [tag], "jupyter": {"source_hidden": True}}
    return nbformat.v4.new_code_cell(source.strip(), metadata=metadata)


def make_kernel(runtime: str) -> Any:
    """A kernel that is this very interpreter, whatever kernels the reader has registered."""
    from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager

    class ThisInterpreter(KernelSpecManager):
        def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
            argv = [
                sys.executable,
                "-m",
                "ipykernel_launcher",
                "-f",
                "{connection_file}",
            ]
            return KernelSpec(argv=argv, display_name="Python 3", language="python")

    manager = AsyncKernelManager(kernel_spec_manager=ThisInterpreter())
    if os.name == "posix" and len(runtime) < LONGEST_SOCKET_FOLDER:
        # Local sockets: two lessons that start at once cannot choose the same port.
        manager.transport = "ipc"
        manager.ip = os.path.join(runtime, "kernel")
    return manager


def make_client(notebook: Any, task: Task, runtime: str) -> Any:
    """A client that says which cell begins, and now and then writes what there is so far."""
    from nbclient import NotebookClient

    codes = [
        cell
        for cell in notebook.cells
        if cell.cell_type == "code" and cell.source.strip()
    ]
    progress = {"cell": 0, "cells": len(codes)}
    written = time.monotonic()

    def next_cell(**_: Any) -> None:
        nonlocal written
        progress["cell"] += 1
        say(progress)
        # To write a notebook at each cell costs a lesson eight seconds.
        if time.monotonic() - written > 2:
            write(notebook, Path(task.output))
            written = time.monotonic()

    folder = str(Path(task.notebook).parent)
    client = NotebookClient(notebook, resources={"metadata": {"path": folder}})
    client.on_cell_execute = next_cell
    client.timeout = task.cell_seconds
    client.startup_timeout = 600
    client.km = make_kernel(runtime)
    return client


def write(notebook: Any, path: Path) -> None:
    """Write a notebook aside, and rename it over the old one."""
    import nbformat

    aside = path.with_name(f".{path.name}.part")
    aside.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
    os.replace(aside, path)


def say(facts: dict[str, Any]) -> None:
    """One line of JSON for the runner."""
    print(json.dumps(facts), flush=True)


def execute(task: Task, runtime: str) -> dict[str, Any]:
    """Run a notebook and leave its copy; what became of it."""
    from nbclient.exceptions import CellExecutionError, CellTimeoutError

    notebook = prepare(task)
    client = make_client(notebook, task, runtime)
    output = Path(task.output)
    start = time.perf_counter()
    error = ""
    try:
        # What a kernel says outside of its cells goes where our own errors go: into the log.
        client.execute(stdout=sys.stderr.fileno(), stderr=sys.stderr.fileno())
    except CellExecutionError as problem:
        error = f"{problem.ename}: {problem.evalue}"
    except CellTimeoutError:
        error = f"the cell ran past its {task.cell_seconds} s"
    except RuntimeError:
        error = f"the kernel died (out of memory?): {last_words(output.with_suffix('.log'))}"
    seconds = round(time.perf_counter() - start, 2)
    write(notebook, output)
    survivors = end_survivors()
    if survivors and not error:
        error = f"{survivors} processes outlived the kernel and were ended"
    return {
        "status": "failed" if error else "passed",
        "error": error,
        "seconds": seconds,
    }


def main() -> None:
    """Read the task, run it, leave its page, and say what became of it."""
    # jsonschema, which nbformat imports, spends two seconds on a grammar of web addresses, of which
    # the schema of a notebook has none. Without that module it goes on.
    sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]
    from course.report import export
    from utils.artifacts import plain_disk_errors
    from utils.errors import CourseError

    adopt_orphans()
    task = Task(**json.loads(sys.stdin.readline()))
    with tempfile.TemporaryDirectory(prefix="k") as runtime:
        os.environ["JUPYTER_RUNTIME_DIR"] = runtime
        threading.Thread(
            target=end_with_parent, args=(runtime,), daemon=True
        ).start()
        try:
            with plain_disk_errors(Path(task.output).parent):
                result = execute(task, runtime)
                export(Path(task.output), Path(task.page))
        except CourseError as error:
            result = {"status": "failed", "error": str(error)}
        say(result)


if __name__ == "__main__":
    main()
