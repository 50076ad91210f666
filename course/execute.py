"""Runs one notebook in this process: `python -m course.execute`, with its task as JSON on standard input.

The runner starts one such process a lesson and reads a line of JSON from it at each cell and at the
end. Standard input stays open as long as the runner lives: when it closes, this process ends
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

# A process that ends with its kernel may need a moment on a busy machine.
GRACE_SECONDS = 5
# The path of a local socket may have about a hundred characters.
LONGEST_SOCKET_FOLDER = 80


@dataclass
class Task:
    """What to run, with what, for how long, and where to leave it."""

    notebook: str
    output: str
    page: str
    parameters: dict[str, Any]
    cell_seconds: int
    refusals: dict[str, str] = field(default_factory=dict)


# processes ------------------------------------------------------------------------------------------


def adopt_orphans() -> None:
    """On Linux, processes whose parent dies become our children, and so can be found and ended."""
    if sys.platform == "linux":
        PR_SET_CHILD_SUBREAPER = 36
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def alive(process: psutil.Process) -> bool:
    """Whether a process still runs."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def below(pid: int) -> list[psutil.Process]:
    """The live processes that a process has started, and those that they have."""
    try:
        children = psutil.Process(pid).children(recursive=True)
    except (psutil.Error, OSError):
        return []
    return [child for child in children if alive(child)]


def kill(processes: list[psutil.Process]) -> None:
    """Kill processes, also those that another hand has ended meanwhile."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def end_everything_below(pid: int) -> None:
    """Kill all descendants, and what they start meanwhile."""
    deadline = time.monotonic() + GRACE_SECONDS
    while (processes := below(pid)) and time.monotonic() < deadline:
        kill(processes)
        time.sleep(0.02)


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


# the notebook ---------------------------------------------------------------------------------------


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
        if cell.cell_type != "code":
            continue
        if "parameters" in cell.metadata.get("tags", []):
            values = [f"{name} = {value!r}" for name, value in task.parameters.items()]
            cells.append(added_cell("\n".join(values), "injected-parameters"))
        for function, name in called(cell.source):
            if function == "solution" and name in refusals:
                cells.append(added_cell(refusals.pop(name), "refused"))
    if refusals:
        file = f"expected/refused/{Path(task.notebook).name[:2]}.py"
        what = f"{file} has wrong answers for {min(refusals)}, which has no solution cell"
        raise CourseError(what, Path(task.notebook), "mend the number, or add the solution")
    notebook.cells = cells
    return notebook


def added_cell(source: str, tag: str) -> Any:
    """A folded cell that only the executed copy has."""
    import nbformat

    metadata = {"tags": [tag], "jupyter": {"source_hidden": True}}
    return nbformat.v4.new_code_cell(source.strip(), metadata=metadata)


def make_client(notebook: Any, task: Task, runtime: str) -> Any:
    """A client whose kernel is this very interpreter, whatever kernels the reader has registered."""
    from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    class ThisInterpreter(KernelSpecManager):
        def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
            argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
            return KernelSpec(argv=argv, display_name="Python 3", language="python")

    manager = AsyncKernelManager(kernel_spec_manager=ThisInterpreter())
    if os.name == "posix" and len(runtime) < LONGEST_SOCKET_FOLDER:
        # Local sockets: two lessons that start at once cannot choose the same port.
        manager.transport = "ipc"
        manager.ip = os.path.join(runtime, "kernel")
    client = NotebookClient(
        notebook,
        resources={"metadata": {"path": str(Path(task.notebook).parent)}},
        timeout=task.cell_seconds,
        startup_timeout=600,
        on_cell_execute=Progress(notebook, Path(task.output)).next_cell,
    )
    # Given after its making, so that the client also ends the kernel.
    client.km = manager
    return client


class Progress:
    """Says which cell begins, and now and then writes what there is so far."""

    def __init__(self, notebook: Any, output: Path) -> None:
        self.notebook = notebook
        self.output = output
        self.cell = 0
        self.cells = sum(bool(c.cell_type == "code" and c.source.strip()) for c in notebook.cells)
        self.written = time.monotonic()

    def next_cell(self, **_: Any) -> None:
        self.cell += 1
        say(cell=self.cell, cells=self.cells)
        # Writing a notebook at each cell costs a lesson eight seconds.
        if time.monotonic() - self.written > 2:
            write(self.notebook, self.output)
            self.written = time.monotonic()


def write(notebook: Any, path: Path) -> None:
    """Write a notebook aside, and rename it over the old one."""
    import nbformat

    aside = path.with_name(f".{path.name}.part")
    aside.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
    os.replace(aside, path)


def say(**facts: Any) -> None:
    """One line of JSON for the runner."""
    print(json.dumps(facts), flush=True)


def execute(task: Task, runtime: str) -> dict[str, Any]:
    """Run a notebook and leave its copy; what became of it."""
    from nbclient.exceptions import CellExecutionError, CellTimeoutError

    notebook = prepare(task)
    client = make_client(notebook, task, runtime)
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
        error = (
            f"the kernel died (out of memory?): {last_words(Path(task.output).with_suffix('.log'))}"
        )
    seconds = round(time.perf_counter() - start, 2)
    write(notebook, Path(task.output))
    survivors = end_survivors()
    if survivors and not error:
        error = f"{survivors} processes outlived the kernel and were ended"
    return {"status": "failed" if error else "passed", "error": error, "seconds": seconds}


def last_words(log: Path) -> str:
    """The last line that a process has left in its log."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.strip()), "no last words")


def main() -> None:
    """Read the task, run it, say what became of it, and leave its page."""
    from course.report import export
    from utils.artifacts import plain_disk_errors
    from utils.errors import CourseError

    adopt_orphans()
    task = Task(**json.loads(sys.stdin.readline()))
    with tempfile.TemporaryDirectory(prefix="k") as runtime:
        os.environ["JUPYTER_RUNTIME_DIR"] = runtime
        threading.Thread(target=end_with_parent, args=(runtime,), daemon=True).start()
        try:
            with plain_disk_errors(Path(task.output).parent):
                result = execute(task, runtime)
                export(Path(task.output), Path(task.page))
        except CourseError as error:
            result = {"status": "failed", "error": str(error)}
        say(**result)


if __name__ == "__main__":
    main()
