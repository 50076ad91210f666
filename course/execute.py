"""Runs one notebook in this process: `python -m course.execute`, its task as JSON on stdin.

The runner starts one such process a lesson and keeps standard input open. When it closes, the
runner is gone, and this process ends everything that the lesson has started, and itself.
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
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import psutil

from course.notebooks import called
from course.results import (
    Facts,
    Result,
    artifacts_of,
    page_of,
    run_folder,
    write_result,
)
from course.verdicts import refusals
from utils import artifacts
from utils.errors import CourseError
from utils.profiles import Profile

# A process that ends with its kernel may need a moment on a busy machine.
GRACE_SECONDS = 5
# The path of a local socket may have about a hundred characters.
LONGEST_SOCKET_FOLDER = 80


def adopt_orphans() -> None:
    """On Linux, processes whose parent dies become our children, and so can be found and ended."""
    if sys.platform == "linux":
        PR_SET_CHILD_SUBREAPER = 36
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def is_alive(process: psutil.Process) -> bool:
    """Whether a process still runs; one that nobody has collected does not."""
    with contextlib.suppress(psutil.Error):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def below(spared: Collection[int] = ()) -> list[psutil.Process]:
    """What this process has started, and what that has, without some children and theirs."""
    found = []
    with contextlib.suppress(psutil.Error, OSError):
        for child in psutil.Process().children():
            if child.pid not in spared:
                found.append(child)
                with contextlib.suppress(psutil.Error):
                    found += child.children(recursive=True)
    return [process for process in found if is_alive(process)]


def end_processes(spared: Collection[int] = (), grace: float = 0) -> int:
    """Kill what still lives after a grace, and what that starts meanwhile; how many there were."""
    start = time.monotonic()
    count = 0
    while processes := below(spared):
        waited = time.monotonic() - start
        if waited > grace + GRACE_SECONDS:
            break
        if waited >= grace:
            count = max(count, len(processes))
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    process.kill()
        time.sleep(0.02)
    return count


def end_with_parent(runtime: str) -> None:
    """In a thread: wait until the runner is gone, however it went; then leave nothing behind."""
    # os.read, because a thread inside sys.stdin would keep the interpreter from ending.
    while os.read(0, 4096):
        pass
    end_processes()
    shutil.rmtree(runtime, ignore_errors=True)
    os._exit(1)


def memory_of(processes: list[psutil.Process]) -> int:
    """Bytes held by those processes that can be read; shared pages count once where Linux can say."""
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            try:
                memory = process.memory_full_info()
            except psutil.AccessDenied:
                # macOS tells this of one's own process only.
                memory = process.memory_info()
            total += getattr(memory, "pss", memory.rss)
    return total


def watch_memory(result: Result) -> None:
    """In a thread: note the most memory that the lesson's processes hold together."""
    while True:
        start = time.monotonic()
        held = memory_of(below())
        # Where nothing can be read, nothing is said, rather than 0.
        if held:
            result.peak_bytes = max(result.peak_bytes or 0, held)
        # The system walks every page held for this: a fiftieth of a core at most.
        took = time.monotonic() - start
        pause = 50 * took if held else 0
        time.sleep(min(3.0, max(0.1, pause)))


def last_words(log: Path) -> str:
    """The last line that a process has left in its log."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    words = [line for line in lines if line.strip()]
    return words[-1] if words else "no last words"


def prepare(path: Path, parameters: Facts) -> Any:
    """The notebook to run: parameters behind their cell, wrong answers behind their solutions."""
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    wrong = refusals(path.name[:2])
    tagged = False
    cells = []
    for cell in notebook.cells:
        cells.append(cell)
        if "parameters" in cell.metadata.get("tags", []):
            tagged = True
            values = [f"{name} = {value!r}" for name, value in parameters.items()]
            cells.append(new_cell("\n".join(values), "injected-parameters"))
        code = cell.source if cell.cell_type == "code" else ""
        for function, name in called(code):
            if function == "solution" and name in wrong:
                cells.append(new_cell(wrong.pop(name), "refused"))
    if not tagged:
        way = "tag the cell with PROFILE and SEED"
        raise CourseError("no cell is tagged `parameters`", path, way)
    if wrong:
        file = f"expected/refused/{path.name[:2]}.py"
        what = (
            f"{file} has wrong answers for {min(wrong)}, which has no solution cell"
        )
        raise CourseError(what, path, "mend the number, or add the solution")
    notebook.cells = cells
    return notebook


def new_cell(source: str, tag: str) -> Any:
    """A folded cell that only the executed copy has."""
    from nbformat.v4 import new_code_cell

    metadata = {"tags": [tag], "jupyter": {"source_hidden": True}}
    return new_code_cell(source.strip(), metadata=metadata)


def make_kernel(runtime: str) -> Any:
    """A kernel that is this very interpreter, whatever kernels the reader has registered."""
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager

    manager = AsyncKernelManager()
    manager.kernel_spec_manager = KernelSpecManager(kernel_dirs=[])
    if sys.platform != "win32" and len(runtime) < LONGEST_SOCKET_FOLDER:
        # Local sockets: two lessons that start at once cannot choose the same port.
        manager.transport = "ipc"
        manager.ip = os.path.join(runtime, "kernel")
    return manager


def make_client(
    notebook: Any, path: Path, profile: Profile, result: Result, end: float
) -> Any:
    """A client that counts the cells it begins and gives each its seconds, and all until `end`."""
    from nbclient import NotebookClient

    told = time.monotonic()

    def next_cell(**_: Any) -> None:
        nonlocal told
        result.cell += 1
        # The runner shows it, and a lesson that is killed has left its place.
        if time.monotonic() > told + 1:
            write_result(result, profile)
            told = time.monotonic()

    def seconds_left(_: Any) -> int:
        left = int(end - time.monotonic())
        return max(1, min(profile.cell_seconds, left))

    resources = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(notebook, resources=resources)
    client.on_cell_execute = next_cell
    client.timeout_func = seconds_left
    client.startup_timeout = 600
    return client


def execute(path: Path, profile: Profile, result: Result, runtime: str) -> None:
    """Run a notebook and leave its copy; what became of it stands in `result`."""
    import nbformat
    from nbclient.exceptions import CellExecutionError, CellTimeoutError

    output = run_folder(profile) / path.name
    notebook = prepare(path, result.parameters)
    codes = [cell for cell in notebook.cells if cell.cell_type == "code"]
    filled = [cell for cell in codes if cell.source.strip()]
    result.cells = len(filled)
    start = time.monotonic()
    limit = profile.notebook_seconds
    client = make_client(notebook, path, profile, result, start + limit)
    client.km = make_kernel(runtime)
    try:
        client.execute()
    except CellExecutionError as problem:
        result.error = f"{problem.ename}: {problem.evalue}"
    except CellTimeoutError:
        result.error = f"the cell ran past its {profile.cell_seconds} s"
    except RuntimeError:
        words = last_words(output.with_suffix(".log"))
        result.error = f"the kernel died (out of memory?): {words}"
    result.seconds = round(time.monotonic() - start, 2)
    # A cell is given whole seconds, so the last one may be cut a little early.
    early = 0
    if result.error:
        early = 2
    if result.seconds > limit - early:
        result.error = (
            f"the notebook ran past the {limit} s of profile {profile.name}"
        )
    # As Jupyter writes it, but whole or not at all.
    artifacts.write_json(output, json.loads(nbformat.writes(notebook)))
    survivors = end_processes(grace=GRACE_SECONDS)
    if survivors and not result.error:
        result.error = f"{survivors} processes outlived the kernel and were ended"


def in_thread(work: Callable, given: object) -> None:
    """Do something beside all else, until this process ends."""
    thread = threading.Thread(target=work, args=(given,))
    thread.daemon = True
    thread.start()


def main() -> None:
    """Read the task, run it, leave its page and what became of it."""
    # jsonschema, which nbformat imports, spends two seconds on a grammar of web addresses, of which
    # the schema of a notebook has none. Without that module it goes on.
    sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]
    from course.report import export

    adopt_orphans()
    task = json.loads(sys.stdin.readline())
    path = Path(task["path"])
    profile = Profile(**task["profile"])
    result = Result(**task["result"])
    folder = run_folder(profile)
    with tempfile.TemporaryDirectory(prefix="k") as runtime:
        os.environ["JUPYTER_RUNTIME_DIR"] = runtime
        in_thread(end_with_parent, runtime)
        in_thread(watch_memory, result)
        try:
            with artifacts.plain_disk_errors(folder):
                execute(path, profile, result, runtime)
                export(folder / path.name, page_of(path.stem, profile))
        except CourseError as error:
            result.error = str(error)
        result.status = "failed" if result.error else "passed"
        result.artifacts = artifacts_of(path, profile)
        write_result(result, profile)


if __name__ == "__main__":
    main()
