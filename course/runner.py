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
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from course import notebooks, report, results
from course.execute import Task, adopt_orphans, below, end_everything_below, kill, last_words
from course.results import Result, run_folder
from course.verdicts import refusals
from utils.artifacts import plain_disk_errors
from utils.errors import CourseError
from utils.profiles import Profile
from utils.show import format_bytes

# What a lesson costs before anybody has recorded it.
UNKNOWN_BYTES = 2_000_000_000
UNKNOWN_SECONDS = 60
MARKS = {"passed": "✔", "failed": "✘", "blocked": "–"}


@dataclass
class Plan:
    """The lessons of a run, what each waits for, and how urgent it is."""

    paths: dict[str, Path]
    makers: dict[str, set[str]]
    urgency: dict[str, float]


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


# the plan -------------------------------------------------------------------------------------------


def check_parameters(path: Path, parameters: dict[str, Any]) -> None:
    """A run with a misspelt parameter is worth nothing. A notebook that cannot be read fails later."""
    try:
        cells = notebooks.cells(notebooks.read(path), "code")
    except CourseError:
        return
    tagged = [notebooks.source(cell) for cell in cells if "parameters" in notebooks.tags(cell)]
    if not tagged:
        raise CourseError(
            "no cell is tagged `parameters`", path, "tag the cell with PROFILE and SEED"
        )
    known = {line.split("=")[0].strip() for line in tagged[0].splitlines() if "=" in line}
    unknown = sorted(set(parameters) - known)
    if unknown:
        raise CourseError(
            f"unknown parameter {unknown[0]}", path, f"it knows {', '.join(sorted(known))}"
        )


def add_makers(paths: list[Path], profile: Profile) -> list[Path]:
    """The chosen lessons, and before them those that make what is missing."""
    makers = notebooks.makers()
    chosen = list(paths)
    for path in chosen:
        for name in needs_of(path):
            maker = makers.get(name)
            if maker and maker not in chosen and not results.hash_of(name, profile):
                print(
                    f"{path.stem} needs {name!r}, which is not there: {maker.stem} runs first",
                    flush=True,
                )
                chosen.append(maker)
    return sorted(chosen)


def needs_of(path: Path) -> list[str]:
    """The artifacts that a lesson takes; none where it cannot be read."""
    try:
        return notebooks.calls(path, "need")
    except CourseError:
        return []


def make_plan(paths: list[Path], profile: Profile) -> Plan:
    """What waits for what. The most urgent lesson is the one with the most work behind it."""
    makers = notebooks.makers()
    chosen = {path.stem: path for path in paths}
    waits: dict[str, set[str]] = {}
    for path in paths:
        sources = {makers[name].stem for name in needs_of(path) if name in makers}
        waits[path.stem] = sources & set(chosen) - {path.stem}
    try:
        order = list(TopologicalSorter(waits).static_order())
    except CycleError as error:
        circle = " → ".join(error.args[1])
        raise CourseError(
            f"lessons wait for each other: {circle}", "lesson.need", "break the circle"
        ) from None
    costs = results.recorded(profile.name)
    urgency = {name: costs.get(name[:2], {}).get("seconds", UNKNOWN_SECONDS) for name in order}
    behind = dict.fromkeys(order, 0.0)
    for name in reversed(order):
        urgency[name] += behind[name]
        for source in waits[name]:
            behind[source] = max(behind[source], urgency[name])
    return Plan(chosen, waits, urgency)


def count_jobs(profile: Profile) -> int:
    """How many lessons may run at once: `JOBS`, else by cores; on a GPU one, because they would share it."""
    text = os.environ.get("JOBS", "")
    if text:
        if not text.isdigit() or int(text) < 1:
            raise CourseError(f"JOBS={text} is not a number of lessons", fix="write it as JOBS=2")
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
    env["PYTHONPATH"] = os.pathsep.join(
        [str(results.CHECKOUT), *filter(None, [env.get("PYTHONPATH")])]
    )
    if profile.threads:
        env["OMP_NUM_THREADS"] = str(profile.threads)
    elif jobs > 1:
        env.setdefault("OMP_NUM_THREADS", str(max(1, count_cores() // jobs)))
    return env


# the run --------------------------------------------------------------------------------------------


class Run:
    """Lessons on their way: those that wait, those that run, those that have ended."""

    def __init__(
        self, plan: Plan, profile: Profile, parameters: dict[str, Any], fresh: bool
    ) -> None:
        self.plan = plan
        self.profile = profile
        self.parameters = parameters
        self.fresh = fresh
        self.jobs = count_jobs(profile)
        self.env = kernel_environment(profile, self.jobs)
        self.folder = run_folder(profile)
        self.costs = results.recorded(profile.name)
        self.waiting = sorted(plan.paths, key=lambda name: -plan.urgency[name])
        self.running: dict[str, Running] = {}
        self.ended: dict[str, Result] = {}
        self.locked_elsewhere: set[str] = set()
        self.changed: set[str] = set()
        self.events: queue.Queue[str] = queue.Queue()
        self.screen = Screen()

    def go(self) -> list[Result]:
        """Run all; results in reading order."""
        pause = 0.25
        reported = 0
        while True:
            for name in list(self.waiting):
                self.consider(name)
            if len(self.ended) > reported:
                reported = len(self.ended)
                report.write_index(self.profile)
            if not self.waiting and not self.running:
                return [self.ended[name] for name in sorted(self.ended)]
            self.screen.show([running.result for running in self.running.values()])
            with contextlib.suppress(queue.Empty):
                self.finish(self.events.get(timeout=pause))
            took = self.watch()
            # The system walks every page held: a twentieth of a core at most.
            pause = min(2.0, max(0.25, 20 * took))

    def consider(self, name: str) -> None:
        """Start a lesson if it can start now, or end it if it need not or cannot run."""
        makers = self.plan.makers[name]
        lost = [
            maker
            for maker in sorted(makers)
            if maker in self.ended and self.ended[maker].status != "passed"
        ]
        if lost:
            self.end(Result(name, "blocked", error=f"it needs what {lost[0]} makes"))
        elif makers <= set(self.ended):
            self.begin(name)

    def begin(self, name: str) -> None:
        """Take up the earlier result of a lesson, or start it if there is room."""
        if name in self.changed and not self.has_room(name):
            return
        lock = FileLock(self.folder / f".{name}.lock", blocking=False)
        try:
            lock.acquire()
        except Timeout:
            if name not in self.locked_elsewhere:
                self.locked_elsewhere.add(name)
                self.screen.print(f"  {name} is being run elsewhere: waiting for it")
            return
        try:
            result = self.reuse_or_start(name, lock)
        except CourseError as error:
            result = Result(name, "failed", error=str(error))
        if result:
            self.end(result)
        if name not in self.running:
            lock.release()

    def reuse_or_start(self, name: str, lock: FileLock) -> Result | None:
        """The earlier result of a lesson if it still holds; else start it, if there is room."""
        path = self.plan.paths[name]
        mark = results.fingerprint(path, self.parameters)
        old = results.read_result(name, self.profile)
        if old and not self.fresh and results.still_holds(old, mark, path, self.profile):
            old.reused = True
            return old
        self.changed.add(name)
        if self.has_room(name):
            self.start(name, mark, lock)
        return None

    def has_room(self, name: str) -> bool:
        """Whether a core is free, and memory beside what the running lessons will still take."""
        if not self.running:
            return True
        still = sum(max(0, running.peak - running.memory) for running in self.running.values())
        free = psutil.virtual_memory().available - still
        return len(self.running) < self.jobs and free > self.expected_bytes(name)

    def expected_bytes(self, name: str) -> int:
        """What a lesson took at most where it was recorded."""
        return self.costs.get(name[:2], {}).get("peak_bytes", UNKNOWN_BYTES)

    def start(self, name: str, mark: str, lock: FileLock) -> None:
        """Start the process of a lesson."""
        path, output = self.plan.paths[name], self.folder / f"{name}.ipynb"
        page = results.page_of(name, self.profile)
        page.parent.mkdir(parents=True, exist_ok=True)
        task = Task(str(path), str(output), str(page), self.parameters, self.profile.cell_seconds)
        task.refusals = refusals(path.name[:2])
        result = Result(name, fingerprint=mark, parameters=self.parameters)
        results.write_result(result, self.profile)
        output.unlink(missing_ok=True)
        with open(output.with_suffix(".log"), "wb") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", "course.execute"],
                env=self.env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self.waiting.remove(name)
        self.running[name] = Running(result, path, child, lock, self.expected_bytes(name))
        # Its standard input stays open: when it closes, the child knows that we are gone.
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(json.dumps(asdict(task)).encode() + b"\n")
            child.stdin.flush()
        threading.Thread(target=self.listen, args=(name,), daemon=True).start()

    def listen(self, name: str) -> None:
        """In a thread: take what a lesson says until it ends."""
        result = self.running[name].result
        with self.running[name].child as child:
            for line in child.stdout:
                with contextlib.suppress(ValueError):
                    vars(result).update(json.loads(line))
        self.events.put(name)

    def watch(self) -> float:
        """Take the memory of each lesson and the time; the seconds that this took."""
        start = time.monotonic()
        for running in self.running.values():
            running.memory = memory_of(below(running.child.pid))
            running.result.peak_bytes = max(running.result.peak_bytes, running.memory)
            if running.result.status == "interrupted":
                running.result.seconds = start - running.start
            if start - running.start > self.profile.notebook_seconds and not running.too_long:
                running.too_long = True
                end_everything_below(running.child.pid)
                running.child.kill()
        return time.monotonic() - start

    def finish(self, name: str) -> None:
        """Note what became of a lesson whose process has ended, and end what it left."""
        running = self.running.pop(name)
        self.end_strays()
        result = running.result
        if running.too_long:
            limit = f"{self.profile.notebook_seconds} s of profile {self.profile.name}"
            result.status, result.error = "failed", f"the notebook ran past the {limit}"
        elif result.status == "interrupted":
            words = last_words(self.folder / f"{name}.log")
            result.status = "failed"
            result.error = (
                f"the lesson's process ended with status {running.child.returncode}: {words}"
            )
        result.artifacts = results.artifacts_of(running.path, self.profile)
        self.end(result)
        running.lock.release()

    def end_strays(self) -> None:
        """Kill what came to us from a lesson whose own process could not end it."""
        ours = {running.child.pid for running in self.running.values()}
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process().children():
                if process.pid not in ours:
                    kill([*below(process.pid), process])

    def end(self, result: Result) -> None:
        """Keep a result, and say it."""
        if result.name in self.waiting:
            self.waiting.remove(result.name)
        self.ended[result.name] = result
        if not result.reused:
            results.write_result(result, self.profile)
        self.screen.print(describe_end(result, self.folder / f"{result.name}.ipynb"))


def memory_of(processes: list[psutil.Process]) -> int:
    """Bytes held by processes; shared pages count once where Linux can say."""
    total = 0
    for process in processes:
        try:
            full = process.memory_full_info()
            total += getattr(full, "pss", full.rss)
        except (psutil.Error, OSError):
            # macOS tells this of its own processes only.
            with contextlib.suppress(psutil.Error, OSError):
                total += process.memory_info().rss
    return total


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """However the block ends, by a signal too, no process that it started is left."""
    adopt_orphans()
    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    old = {name: signal.signal(getattr(signal, name), stop) for name in names}
    try:
        yield
    finally:
        end_everything_below(os.getpid())
        for name, handler in old.items():
            signal.signal(getattr(signal, name), handler)


def stop(number: int, _: object) -> None:
    """End this process in order, with the status that a signal gives."""
    sys.exit(128 + number)


def run_course(
    paths: list[Path], profile: Profile, seed: int, extra: dict[str, Any], fresh: bool = False
) -> list[Result]:
    """Run the lessons that are not yet done; every result is kept as soon as it is known."""
    folder = run_folder(profile)
    parameters = {"PROFILE": profile.name, "SEED": seed, **extra}
    with plain_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        plan = make_plan(add_makers(paths, profile), profile)
        for path in plan.paths.values():
            check_parameters(path, parameters)
        with nothing_left():
            return Run(plan, profile, parameters, fresh).go()


# the screen -----------------------------------------------------------------------------------------


def describe(result: Result) -> str:
    """One line: name, cell k of n, seconds, peak memory."""
    cells = f"cell {result.cell:3} of {result.cells:<3}"
    return f"{result.name:40} {cells} {result.seconds:6.1f} s {format_bytes(result.peak_bytes):>8}"


def describe_end(result: Result, output: Path) -> str:
    """The line that stays; behind a failure the cell, the error and the file to open."""
    note = "done before" if result.reused else ""
    if result.status == "blocked":
        note = result.error
    lines = [f"{MARKS[result.status]} {describe(result)}  {note}".rstrip()]
    if result.status == "failed":
        what = f"cell [{result.cell}]: {result.error}\nopen {output}"
        lines += [f"    {line}" for line in what.splitlines()]
    return "\n".join(lines)


class Screen:
    """Lines that stay, and on a terminal below them one live line for each lesson that runs."""

    def __init__(self) -> None:
        self.live = 0

    def clear(self) -> None:
        """Take the live lines away."""
        if self.live:
            print(f"\x1b[{self.live}F\x1b[J", end="")
        self.live = 0

    def print(self, text: str) -> None:
        """Print what stays."""
        self.clear()
        print(text, flush=True)

    def show(self, running: list[Result]) -> None:
        """Show what runs now."""
        if not sys.stdout.isatty():
            return
        self.clear()
        width = shutil.get_terminal_size().columns - 1
        for result in running:
            print(f"  {describe(result)}"[:width])
        self.live = len(running)
        sys.stdout.flush()
