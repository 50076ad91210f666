"""Executes notebooks with papermill in reading order and answers for every process it starts."""
from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata as metadata
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import nbformat
import papermill
import psutil
from filelock import FileLock, Timeout
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import CellTimeoutError
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import Engine, papermill_engines
from papermill.exceptions import PapermillExecutionError

from utils import artifacts
from utils.errors import ROOT, CourseError, build_folder
from course.guard import end_all, TOKEN
from course.notebooks import calls, code_cells, maker_of, select
from utils.profiles import Profile


GUARD = "course.guard"
CHECKOUT = Path(__file__).resolve().parent.parent


@dataclass
class Result:
    """What became of one notebook."""

    name: str
    status: str = "interrupted"
    seconds: float = 0.0
    peak_bytes: int = 0
    cell: int = 0
    cells: int = 0
    error: str = ""
    fingerprint: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    artifacts: dict[str, str] = field(default_factory=dict)
    reused: bool = False


def run_folder(profile: Profile) -> Path:
    """Where the executed notebooks of a profile and the state of its run are kept."""
    return build_folder() / "run" / profile.name


def results_of(profile: Profile) -> dict[str, dict[str, Any]]:
    """The last result of each notebook that is still there, in reading order."""
    held = artifacts.read_json(run_folder(profile) / "state.json") or {}
    return {p.stem: held[p.stem] for p in select() if p.stem in held}


def refuse_parameters(path: Path, parameters: dict[str, Any]) -> None:
    """Papermill only logs a parameter it does not know; a run with a misspelt one is worth nothing."""
    notebook = nbformat.read(path, as_version=4)
    if not any("parameters" in c.metadata.get("tags", []) for c in notebook.cells):
        raise CourseError("no cell is tagged `parameters`", path, "tag the cell with PROFILE and SEED")
    known = set(papermill.inspect_notebook(str(path)))
    unknown = sorted(set(parameters) - known)
    if unknown:
        raise CourseError(f"unknown parameter {unknown[0]}", path, f"it knows {', '.join(sorted(known))}")


def fingerprint(path: Path, parameters: dict[str, Any]) -> str:
    """What a notebook's result depends on: its code, the code it imports, its parameters."""
    code = [artifacts.hash_file(p) for folder in ("utils", "stages", "launch") for p in sorted((CHECKOUT / folder).rglob("*.*")) if p.is_file() and "__pycache__" not in p.parts]
    installed = sorted({f"{d.name} {d.version}" for d in metadata.distributions()})
    assets = [artifacts.hash_file(p) for p in (CHECKOUT / "assets.txt",)]
    place = os.environ.get("COURSE_ASSETS", "packaged")
    return artifacts.hash_json([code_cells(path), code, installed, assets, place, parameters])


class OwnKernels(KernelSpecManager):
    """Only one kernel: this very interpreter, whatever kernels the user has registered."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name="Python 3", language="python")


class OwnKernelManager(AsyncKernelManager):
    """A kernel on local sockets where the system has them, so that no two runs share a port."""

    def __init__(self, **given: Any) -> None:
        super().__init__(kernel_spec_manager=OwnKernels(), **given)
        if os.name == "posix":
            self.transport, self.ip = "ipc", os.path.join(os.environ["JUPYTER_RUNTIME_DIR"], "kernel")


class CourseEngine(Engine):
    """Papermill's way of running a notebook, with our kernel and a watch on it."""

    @classmethod
    def execute_managed_notebook(cls, nb_man: Any, kernel_name: str, *, watch: Watch,
                                 cell_seconds: int, **unused: Any) -> None:
        """Run every cell, telling the watch of each."""
        watch.result.cells = sum(c.cell_type == "code" for c in nb_man.nb.cells)
        client = PapermillNotebookClient(
            nb_man, kernel_manager_class=OwnKernelManager, kernel_name=kernel_name,
            timeout=cell_seconds, startup_timeout=120, log=logging.getLogger("papermill"),
            on_cell_execute=lambda **_: watch.next_cell())
        with tempfile.TemporaryDirectory(prefix="k") as runtime, open(watch.log, "wb") as log:
            os.environ["JUPYTER_RUNTIME_DIR"] = runtime
            quiet = {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", TOKEN: watch.token}
            with saved_rarely(nb_man):
                client.execute(env={**os.environ, **quiet}, stdout=log, stderr=log)


@contextlib.contextmanager
def saved_rarely(nb_man: Any, seconds: float = 2.0) -> Iterator[None]:
    """Papermill writes the whole notebook twice a cell: every two seconds is enough."""
    write, last = nb_man.save, 0.0

    def save(**given: Any) -> None:
        nonlocal last
        if time.monotonic() - last >= seconds:
            write(**given)
            last = time.monotonic()

    nb_man.save = save
    try:
        yield
    finally:
        nb_man.save = write  # what ends the run, well or not, is always written


papermill_engines.register("course", CourseEngine)


@dataclass
class Watch:
    """Shows one live line, samples memory, and ends a notebook that runs too long."""

    result: Result
    limit: int
    log: Path
    token: str
    too_long: bool = False

    def __enter__(self) -> Watch:
        self.start, self.done = time.perf_counter(), threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.thread.join()
        self.result.seconds = round(time.perf_counter() - self.start, 2)

    def next_cell(self) -> None:
        self.result.cell += 1

    def _watch(self) -> None:
        pause = 0.25
        while not self.done.wait(pause):
            self.result.seconds = began = time.perf_counter() - self.start
            self.result.peak_bytes = max(self.result.peak_bytes, memory_of_children())
            if self.result.seconds > self.limit and not self.too_long:
                self.too_long = True
                end_all(self.token)
            if sys.stdout.isatty():
                print(f"\r\x1b[2K  {describe(self.result)}", end="", flush=True)
            took = time.perf_counter() - self.start - began  # the system walks every page held
            pause = min(2.0, max(0.25, 20 * took))  # a twentieth of a core at most


def memory_of_children() -> int:
    """Bytes held by the kernel and all it started; shared pages counted once where Linux can say."""
    total = 0
    for child in children():
        with contextlib.suppress(psutil.Error, OSError):
            full = child.memory_full_info()
            total += getattr(full, "pss", full.rss)
    return total


def children() -> list[psutil.Process]:
    """What this process started, and what that started; not the guard."""
    found = psutil.Process().children(recursive=True)
    return [child for child in found if GUARD not in commandline(child)]


def commandline(process: psutil.Process) -> list[str]:
    """The words a process was started with, or none where they cannot be read."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def adopt_orphans() -> None:
    """On Linux, processes whose parent dies become our children, and so can be found and ended."""
    if sys.platform == "linux":
        PR_SET_CHILD_SUBREAPER = 36
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_children() -> int:
    """Kill whatever is still below us, also what shed the token with its environment."""
    left = [c for c in children() if c.is_running() and c.status() != psutil.STATUS_ZOMBIE]
    for child in left:
        with contextlib.suppress(psutil.Error):
            child.kill()
    psutil.wait_procs(left, timeout=3)
    return len(left)


def describe(result: Result) -> str:
    """One line: name, cell k of n, seconds, peak memory."""
    return (f"{result.name:40} cell {result.cell:3} of {result.cells:<3} {result.seconds:6.1f} s "
            f"{result.peak_bytes / 1e6:7,.0f} MB")


def execute(path: Path, output: Path, parameters: dict[str, Any], profile: Profile,
            token: str) -> Result:
    """Run one notebook; whatever happens, no process of it is left."""
    result = Result(path.stem)
    with Watch(result, profile.notebook_seconds, output.with_suffix(".log"), token) as watch:
        try:
            logging.getLogger("papermill").setLevel(logging.ERROR)
            papermill.execute_notebook(
                path, output, parameters, engine_name="course", kernel_name="python3",
                language="python", progress_bar=False, cwd=path.parent, watch=watch,
                cell_seconds=profile.cell_seconds, autosave_cell_every=0)
            result.status = "passed"
        except PapermillExecutionError as error:
            result.status, result.error = "failed", f"{error.ename}: {error.evalue}"
        except (CellTimeoutError, RuntimeError) as error:  # a dead kernel is a RuntimeError
            result.status, result.error = "failed", explain_death(watch, error, profile)
        finally:
            left = end_all(token) + end_children()
    if left and result.status == "passed":
        result.status, result.error = "failed", f"{left} processes outlived the kernel and were ended"
    return result


def explain_death(watch: Watch, error: Exception, profile: Profile) -> str:
    """Why a kernel stopped, in words."""
    if watch.too_long:
        return f"the notebook ran past the {profile.notebook_seconds} s of profile {profile.name}"
    if isinstance(error, CellTimeoutError):
        return f"the cell ran past the {profile.cell_seconds} s of profile {profile.name}"
    last = watch.log.read_text(errors="replace").strip().splitlines()[-1:] or ["no last words"]
    return f"the kernel died (out of memory?): {last[0]}"


@contextlib.contextmanager
def guarded() -> Iterator[str]:
    """A token for the run's kernels, and a guard outside that ends them if we are killed."""
    token = uuid.uuid4().hex
    adopt_orphans()
    guard = subprocess.Popen([sys.executable, "-m", GUARD, token],
                             stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield token
    finally:
        guard.stdin.close()
        guard.wait(timeout=10)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """One run of a profile at a time: two would write the same artifacts."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".lock", timeout=0):
            yield
    except Timeout:
        raise CourseError("another run of this profile is going on", folder,
                          "wait for it, or stop it") from None


def run_course(paths: list[Path], profile: Profile, seed: int, extra: dict[str, Any],
               fresh: bool = False) -> list[Result]:
    """Run the notebooks that are not yet done; every result is saved as soon as it is known."""
    folder, parameters = run_folder(profile), {"PROFILE": profile.name, "SEED": seed, **extra}
    for path in paths:
        refuse_parameters(path, parameters)
    results: list[Result] = []
    with artifacts.plain_disk_errors(folder), alone(folder), guarded() as token:
        held = artifacts.read_json(folder / "state.json") or {}
        for path in paths:
            mark, old = fingerprint(path, parameters), {} if fresh else held.get(path.stem, {})
            result = reuse(path, old, mark, profile) or blocked(path, results)
            if result is None:
                held[path.stem] = asdict(Result(path.stem))  # "interrupted", until we know better
                artifacts.write_json(folder / "state.json", held)
                result = execute(path, folder / path.name, parameters, profile, token)
                result.artifacts = artifacts_of(path, profile)
            result.fingerprint, result.parameters = mark, parameters
            announce(result, folder / path.name)
            results.append(result)
            held[path.stem] = asdict(result)
            artifacts.write_json(folder / "state.json", held)
    return results


def artifacts_of(path: Path, profile: Profile) -> dict[str, str]:
    """Content hash of each artifact that a notebook takes or makes; empty where one is not whole."""
    names = calls(path, "need") + calls(path, "publish")
    found = {name: build_folder() / "artifacts" / profile.name / name for name in names}
    manifests = {name: artifacts.read_manifest(folder) for name, folder in found.items()}
    return {name: "" if not made or artifacts.damage(found[name], made) else made["hash"]
            for name, made in manifests.items()}


def reuse(path: Path, old: dict[str, Any], mark: str, profile: Profile) -> Result | None:
    """The earlier result of a notebook, if nothing that it depends on or made has changed since."""
    if (old.get("fingerprint"), old.get("status")) != (mark, "passed"):
        return None
    artifacts = artifacts_of(path, profile)
    if artifacts != old["artifacts"] or not (run_folder(profile) / path.name).exists():
        return None
    return Result(**{**old, "reused": True})


def blocked(path: Path, results: list[Result]) -> Result | None:
    """A result for a notebook that needs an artifact which failed to be made in this run."""
    lost = {r.name[:2] for r in results if r.status != "passed"}
    for name in calls(path, "need"):
        if maker_of(name) in lost:
            return Result(path.stem, "blocked", error=f"needs {name!r} from {maker_of(name)}")
    return None


def announce(result: Result, output: Path) -> None:
    """The line that stays: a mark, the figures, and for a failure the cell and the file to open."""
    mark = {"passed": "✔", "failed": "✘", "blocked": "–"}[result.status]
    live = "\r\x1b[2K" if sys.stdout.isatty() else ""
    note = "done before" if result.reused else result.error * (result.status == "blocked")
    print(f"{live}{mark} {describe(result)}  {note}".rstrip(), flush=True)
    if result.status == "failed":
        lines = [f"cell [{result.cell}]: {result.error}", f"open {output}"]
        print("\n".join(f"    {line}" for text in lines for line in text.splitlines()), flush=True)
