"""Runs lessons in child processes, several at once, and answers for every process they start."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from course import execute, notebooks, report, results
from course.results import Result, run_folder
from course.verdicts import refusals
from utils.artifacts import plain_disk_errors
from utils.errors import CourseError
from utils.profiles import Profile
from utils.show import format_bytes

# What a lesson costs before anybody has recorded it.
UNKNOWN = {"seconds": 60, "peak_bytes": 2_000_000_000}
MARKS = {"passed": "✔", "failed": "✘", "blocked": "–"}


@dataclass
class Waiting:
    """A lesson that has not begun: what it waits for, what it costs, how much work is behind it."""

    path: Path
    makers: set[str]
    peak: int
    urgency: float
    changed: bool = False


@dataclass
class Running:
    """A lesson that runs: its process, its lock, what is known of it so far."""

    result: Result
    path: Path
    child: subprocess.Popen
    lock: FileLock
    peak: int
    start: float = field(default_factory=time.monotonic)
    memory: int = 0
    too_long: bool = False


# the plan -----------------------------------------------------------------------------------------


def check_parameters(path: Path, parameters: dict[str, Any]) -> None:
    """A run with a misspelt parameter is worth nothing."""
    cells = notebooks.cells(notebooks.read(path), "code")
    tagged = [
        notebooks.source(cell)
        for cell in cells
        if "parameters" in notebooks.tags(cell)
    ]
    if not tagged:
        raise CourseError(
            "no cell is tagged `parameters`",
            path,
            "tag the cell with PROFILE and SEED",
        )
    known = {
        line.split("=")[0].strip() for line in tagged[0].splitlines() if "=" in line
    }
    for name in sorted(parameters):
        if name not in known:
            raise CourseError(
                f"unknown parameter {name}",
                path,
                f"it knows {', '.join(sorted(known))}",
            )


def add_makers(paths: list[Path], profile: Profile) -> list[Path]:
    """The chosen lessons, and those that make what they need and is missing."""
    chosen = list(paths)
    for path in chosen:
        for name, maker in notebooks.inputs(path).items():
            if maker not in chosen and not results.hash_of(name, profile):
                print(
                    f"{path.stem} needs {name!r}, which is missing: {maker.stem} runs first",
                    flush=True,
                )
                chosen.append(maker)
    return sorted(chosen)


def make_plan(paths: list[Path], profile: Profile) -> dict[str, Waiting]:
    """What waits for what, the most urgent first: that with the most work behind it."""
    costs = results.recorded(profile.name)
    plan: dict[str, Waiting] = {}
    # A lesson takes from earlier ones only, so from the end on all that waits for it is known.
    for path in sorted(paths, reverse=True):
        makers = {
            maker.stem
            for maker in notebooks.inputs(path).values()
            if maker in paths
        }
        cost = costs.get(path.name[:2], UNKNOWN)
        behind = [
            later.urgency for later in plan.values() if path.stem in later.makers
        ]
        urgency = cost["seconds"] + max(behind, default=0)
        plan[path.stem] = Waiting(path, makers, cost["peak_bytes"], urgency)
    return dict(sorted(plan.items(), key=lambda item: (-item[1].urgency, item[0])))


def count_jobs(profile: Profile) -> int:
    """How many lessons may run at once: `JOBS`, else by the cores; on a GPU one."""
    text = os.environ.get("JOBS", "")
    if text:
        if not text.isdigit() or int(text) < 1:
            raise CourseError(
                f"JOBS={text} is not a number of lessons", fix="write it as JOBS=2"
            )
        return int(text)
    if profile.name in ("gpu", "cluster"):
        return 1
    return count_cores() if profile.threads else max(1, count_cores() // 2)


def count_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def kernel_environment(profile: Profile, jobs: int) -> dict[str, str]:
    """What a kernel of ours knows: no progress bars, its threads, and that a run has started it."""
    env = {
        **os.environ,
        "TQDM_DISABLE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "COURSE_RUN": "1",
    }
    paths = [str(results.CHECKOUT), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if profile.threads:
        env["OMP_NUM_THREADS"] = str(profile.threads)
    elif jobs > 1:
        env.setdefault("OMP_NUM_THREADS", str(max(1, count_cores() // jobs)))
    return env


# the run ------------------------------------------------------------------------------------------


class Run:
    """Lessons on their way: those that wait, those that run, those that have ended."""

    def __init__(
        self,
        plan: dict[str, Waiting],
        profile: Profile,
        parameters: dict[str, Any],
        fresh: bool,
    ) -> None:
        self.waiting = plan
        self.profile = profile
        self.parameters = parameters
        self.fresh = fresh
        self.jobs = count_jobs(profile)
        self.env = kernel_environment(profile, self.jobs)
        self.folder = run_folder(profile)
        self.running: dict[str, Running] = {}
        self.ended: dict[str, Result] = {}
        self.elsewhere: set[str] = set()
        self.events: queue.Queue[str] = queue.Queue()
        self.screen = Screen()

    def go(self) -> list[Result]:
        """Run all; results in reading order."""
        reported = 0
        took = 0.0
        while True:
            for name in list(self.waiting):
                self.consider(name)
            if len(self.ended) > reported:
                report.write_index(self.profile)
                reported = len(self.ended)
            if not self.waiting and not self.running:
                return [self.ended[name] for name in sorted(self.ended)]
            self.screen.show([running.result for running in self.running.values()])
            # To measure memory the system walks every page held: a twentieth of a core at most.
            pause = min(2.0, max(0.25, 20 * took))
            with contextlib.suppress(queue.Empty):
                self.finish(self.events.get(timeout=pause))
            took = self.watch()

    def consider(self, name: str) -> None:
        """Start a lesson if it can start now, or end it if it need not or cannot run."""
        lesson = self.waiting[name]
        makers = [self.ended.get(maker) for maker in sorted(lesson.makers)]
        lost = [
            maker.name for maker in makers if maker and maker.status != "passed"
        ]
        if lost:
            self.end(
                Result(name, "blocked", error=f"it needs what {lost[0]} makes")
            )
        elif all(makers) and not (lesson.changed and not self.has_room(lesson)):
            lock = FileLock(self.folder / f".{name}.lock", timeout=0)
            try:
                lock.acquire()
            except Timeout:
                if name not in self.elsewhere:
                    self.screen.print(
                        f"  {name} is being run elsewhere: waiting for it"
                    )
                self.elsewhere.add(name)
                return
            self.reuse_or_start(name, lock)
            if name not in self.running:
                lock.release()

    def reuse_or_start(self, name: str, lock: FileLock) -> None:
        """Take up the earlier result of a lesson if it holds; else start it, if there is room."""
        lesson = self.waiting[name]
        try:
            mark = results.fingerprint(lesson.path, self.parameters)
            old = results.read_result(name, self.profile)
            holds = not self.fresh and results.still_holds(
                old, mark, lesson.path, self.profile
            )
        except CourseError as error:
            self.end(Result(name, "failed", error=str(error)))
            return
        if old and holds:
            old.reused = True
            self.end(old)
            return
        lesson.changed = True
        if self.has_room(lesson):
            self.start(
                Result(name, fingerprint=mark, parameters=self.parameters), lock
            )

    def has_room(self, lesson: Waiting) -> bool:
        """Whether a core is free, and memory beside what the running lessons will still take."""
        if not self.running:
            return True
        still = sum(
            max(0, running.peak - running.memory)
            for running in self.running.values()
        )
        free = psutil.virtual_memory().available - still
        return len(self.running) < self.jobs and free > lesson.peak

    def start(self, result: Result, lock: FileLock) -> None:
        """Start the process of a lesson."""
        lesson = self.waiting.pop(result.name)
        output = self.folder / lesson.path.name
        page = results.page_of(result.name, self.profile)
        task = execute.Task(
            str(lesson.path), str(output), str(page), self.parameters
        )
        task.cell_seconds = self.profile.cell_seconds
        task.refusals = refusals(lesson.path.name[:2])
        results.write_result(result, self.profile)
        with open(output.with_suffix(".log"), "wb") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", "course.execute"],
                env=self.env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self.running[result.name] = Running(
            result, lesson.path, child, lock, lesson.peak
        )
        # Its standard input stays open: when it closes, the child knows that we are gone.
        with contextlib.suppress(BrokenPipeError):
            assert child.stdin is not None
            child.stdin.write(json.dumps(asdict(task)).encode() + b"\n")
            child.stdin.flush()
        threading.Thread(
            target=self.listen, args=(result.name,), daemon=True
        ).start()

    def listen(self, name: str) -> None:
        """In a thread: take what a lesson says until it ends."""
        result = self.running[name].result
        with self.running[name].child as child:
            for line in child.stdout or ():
                with contextlib.suppress(ValueError):
                    vars(result).update(json.loads(line))
        self.events.put(name)

    def watch(self) -> float:
        """Take the memory and the time of each lesson; the seconds that this took."""
        now = time.monotonic()
        for running in self.running.values():
            result = running.result
            running.memory = execute.memory_of(execute.below(running.child.pid))
            result.peak_bytes = max(result.peak_bytes, running.memory)
            if result.status == "interrupted":
                result.seconds = now - running.start
            if now - running.start > self.profile.notebook_seconds:
                running.too_long = True
                execute.end_everything_below(running.child.pid)
                running.child.kill()
        return time.monotonic() - now

    def finish(self, name: str) -> None:
        """Note what became of a lesson whose process has ended, and end what it left."""
        running = self.running.pop(name)
        result = running.result
        execute.end_children_but(
            {other.child.pid for other in self.running.values()}
        )
        if running.too_long or result.status == "interrupted":
            result.status = "failed"
            words = execute.last_words(self.folder / f"{name}.log")
            result.error = f"the lesson's process ended with status {running.child.returncode}: {words}"
        if running.too_long:
            limit = self.profile.notebook_seconds
            result.error = f"the notebook ran past the {limit} s of profile {self.profile.name}"
        result.artifacts = results.artifacts_of(running.path, self.profile)
        self.end(result)
        running.lock.release()

    def end(self, result: Result) -> None:
        """Keep a result and print its line; behind a failure cell, error and the file to open."""
        self.waiting.pop(result.name, None)
        self.ended[result.name] = result
        if not result.reused:
            results.write_result(result, self.profile)
        note = result.error if result.status == "blocked" else ""
        note = "done before" if result.reused else note
        self.screen.print(
            f"{MARKS[result.status]} {describe(result)}  {note}".rstrip()
        )
        if result.status == "failed":
            file = self.folder / f"{result.name}.ipynb"
            text = f"cell [{result.cell}]: {result.error}\nopen {file}"
            self.screen.print("    " + text.replace("\n", "\n    "))


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """However the block ends, by a signal too, no process that it started is left."""
    execute.adopt_orphans()
    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    old = {name: signal.signal(getattr(signal, name), stop) for name in names}
    try:
        yield
    finally:
        execute.end_everything_below(os.getpid())
        for name, handler in old.items():
            signal.signal(getattr(signal, name), handler)


def stop(number: int, _: object) -> None:
    """End this process in order, with the status that a signal gives."""
    sys.exit(128 + number)


def run_course(
    paths: list[Path],
    profile: Profile,
    seed: int,
    extra: dict[str, Any],
    fresh: bool = False,
) -> list[Result]:
    """Run the lessons that are not yet done; every result is kept as soon as it is known."""
    parameters = {"PROFILE": profile.name, "SEED": seed, **extra}
    with plain_disk_errors(run_folder(profile)):
        run_folder(profile).mkdir(parents=True, exist_ok=True)
        paths = add_makers(paths, profile)
        # One that cannot be read fails alone, when its turn comes.
        for path in notebooks.readable(paths):
            check_parameters(path, parameters)
        with nothing_left():
            return Run(make_plan(paths, profile), profile, parameters, fresh).go()


# the screen ---------------------------------------------------------------------------------------


def describe(result: Result) -> str:
    """One line: name, cell k of n, seconds, peak memory."""
    cells = f"cell {result.cell:3} of {result.cells:<3}"
    return f"{result.name:40} {cells} {result.seconds:6.1f} s {format_bytes(result.peak_bytes):>8}"


class Screen:
    """Lines that stay, and on a terminal below them one live line for each lesson that runs."""

    def __init__(self) -> None:
        self.live = 0

    def print(self, text: str) -> None:
        """Take the live lines away, and print what stays."""
        clear = f"\x1b[{self.live}F\x1b[J" if self.live else ""
        self.live = 0
        print(clear + text, flush=True)

    def show(self, running: list[Result]) -> None:
        """Show what runs now."""
        if sys.stdout.isatty() and running:
            width = shutil.get_terminal_size().columns - 1
            self.print(
                "\n".join(f"  {describe(result)}"[:width] for result in running)
            )
            self.live = len(running)
