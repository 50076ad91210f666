"""Runs lessons in child processes, several at once, and answers for every process they start."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from course import execute, fetch, notebooks, report, results
from course.results import Result, run_folder
from utils.artifacts import plain_disk_errors, read_manifest
from utils.errors import CourseError
from utils.machine import count_cores
from utils.profiles import Profile, tight_memory
from utils.show import format_memory

# What a lesson costs before anybody has recorded it.
UNKNOWN = {"seconds": 60, "peak_bytes": 2_000_000_000}
# Ctrl-C is for the runner, which then ends its lessons in order.
APART: dict[str, Any] = {"start_new_session": True}
if sys.platform == "win32":
    APART = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
MARKS = {"passed": "✔", "failed": "✘", "blocked": "–"}


@dataclass
class Planned:
    """A lesson of a run: what it waits for, and what it costs."""

    path: Path
    makers: set[str]
    peak: int


def add_makers(paths: list[Path], profile: Profile) -> list[Path]:
    """The chosen lessons, and those that make what they need and is missing."""
    chosen = list(paths)
    for path in chosen:
        for name, maker in notebooks.inputs(path).items():
            if maker not in chosen and not results.hash_of(name, profile):
                why = f"{path.stem} needs {name!r}, which is missing"
                print(f"{why}: {maker.stem} runs first", flush=True)
                chosen.append(maker)
    return sorted(chosen)


def fetch_missing(paths: list[Path]) -> None:
    """Fetch what lessons take and is not here; a lesson that does not get it says so itself."""
    items = fetch.taken_by(*paths)
    lacking = [item for item in items if read_manifest(item.folder) is None]
    fetch.fetch_all(lacking)


def make_plan(paths: list[Path], profile: Profile) -> dict[str, Planned]:
    """What waits for what, and what it costs; first those that others wait for, then the longest."""
    costs = results.recorded(profile.name)

    def turn(path: Path) -> tuple[bool, float]:
        cost = costs.get(path.name[:2], UNKNOWN)
        made = notebooks.calls(path, "publish")
        return (False, 0) if made else (True, -cost["seconds"])

    plan = {}
    for path in sorted(paths, key=turn):
        needed = notebooks.inputs(path).values()
        makers = {maker.stem for maker in needed if maker in paths}
        cost = costs.get(path.name[:2], UNKNOWN)
        plan[path.stem] = Planned(path, makers, cost["peak_bytes"])
    return plan


def count_jobs(profile: Profile) -> int:
    """How many lessons may run at once: `JOBS`, else by the cores; on a GPU one."""
    text = os.environ.get("JOBS")
    if text and not (text.isdigit() and int(text)):
        what = f"JOBS={text} is not a number of lessons"
        raise CourseError(what, fix="write it as JOBS=2")
    if text:
        return int(text)
    if profile.name in ("gpu", "cluster"):
        return 1
    return count_cores() if profile.threads else count_cores() // 2


def kernel_environment(profile: Profile, jobs: int) -> dict[str, str]:
    """What a kernel of ours knows: no progress bars, its threads, and that a run has started it."""
    env = {**os.environ, "COURSE_RUN": "1", "TQDM_DISABLE": "1"}
    env["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    others = env.get("PYTHONPATH", "")
    env["PYTHONPATH"] = f"{results.CHECKOUT}{os.pathsep}{others}"
    if profile.threads:
        env["OMP_NUM_THREADS"] = str(profile.threads)
    elif jobs > 1:
        env.setdefault("OMP_NUM_THREADS", str(max(1, count_cores() // jobs)))
    return env


class Run:
    """Lessons on their way: those planned, those that run, those that have ended."""

    def __init__(
        self, plan: dict[str, Planned], profile: Profile, dials: dict[str, Any]
    ) -> None:
        self.plan = plan
        self.profile = profile
        self.dials = {"PROFILE": profile.name}
        self.dials |= dials
        self.jobs = count_jobs(profile)
        memory = psutil.virtual_memory()
        # What is free now is what there is to share.
        self.memory = memory.available
        self.shown = 0.0
        self.running: dict[str, subprocess.Popen] = {}
        self.ended: dict[str, Result] = {}

    def go(self, fresh: bool) -> list[Result]:
        """Run all, and leave no process however it ends; results in reading order."""
        try:
            while len(self.ended) < len(self.plan):
                self.look(fresh)
                self.show_cells()
                time.sleep(0.05)
        finally:
            execute.end_processes()
        return [self.ended[name] for name in sorted(self.ended)]

    def look(self, fresh: bool) -> None:
        """Start what can start, note what has ended."""
        before = len(self.ended)
        for name in self.plan:
            if name in self.running:
                if self.running[name].poll() is not None:
                    self.finish(name)
            elif name not in self.ended:
                self.consider(name, fresh)
        if len(self.ended) > before:
            report.write_index(self.profile)

    def show_cells(self) -> None:
        """On a terminal, one line that moves: the cell at which each lesson is."""
        if not sys.stdout.isatty() or time.monotonic() < self.shown + 1:
            return
        self.shown = time.monotonic()
        found = [results.read_result(name, self.profile) for name in self.running]
        places = [f"{r.name[:2]}: cell {r.cell} of {r.cells}" for r in found if r]
        print(f"\r\033[K  {', '.join(places)}", end="\r", flush=True)

    def consider(self, name: str, fresh: bool) -> None:
        """Start a lesson if it can start now, or end it if it need not or cannot run."""
        makers = self.plan[name].makers
        made = makers & self.ended.keys()
        lost = [maker for maker in made if self.ended[maker].status != "passed"]
        if lost:
            error = f"it needs what {min(lost)} makes"
            self.end(Result(name, "blocked", error=error))
        elif made == makers and self.has_room(name):
            try:
                self.reuse_or_start(name, fresh)
            except CourseError as error:
                self.end(Result(name, "failed", error=str(error)))

    def reuse_or_start(self, name: str, fresh: bool) -> None:
        """Take up the earlier result of a lesson if it holds; else start the lesson."""
        path = self.plan[name].path
        known = notebooks.parameters(path)
        given = {key: dial for key, dial in self.dials.items() if key in known}
        mark = results.fingerprint(path, given)
        old = results.read_result(name, self.profile)
        holds = old and results.still_holds(old, mark, path, self.profile)
        if old and holds and not fresh:
            old.reused = True
            self.end(old)
        else:
            self.start(Result(name, fingerprint=mark, parameters=given))

    def has_room(self, name: str) -> bool:
        """Whether a core is free, and memory for all that the lessons may take at once."""
        needed = self.plan[name].peak
        for other in self.running:
            needed += self.plan[other].peak
        free = len(self.running) < self.jobs and needed < self.memory
        return free or not self.running

    def start(self, result: Result) -> None:
        """Start the process of a lesson, which is "interrupted" until that says otherwise."""
        results.write_result(result, self.profile)
        path = self.plan[result.name].path
        output = run_folder(self.profile) / path.name
        output.unlink(missing_ok=True)
        with open(output.with_suffix(".log"), "wb") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", "course.execute"],
                env=kernel_environment(self.profile, self.jobs),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                **APART,
            )
        self.running[result.name] = child
        warning = tight_memory(result.name[:2], self.profile)
        print(f"· {result.name} begins {warning}".rstrip(), flush=True)
        task = {"path": str(path), "profile": asdict(self.profile)}
        task["result"] = asdict(result)
        # Its standard input stays open: when it closes, the child knows that we are gone.
        with contextlib.suppress(BrokenPipeError):
            assert child.stdin is not None
            child.stdin.write(json.dumps(task).encode() + b"\n")
            child.stdin.flush()

    def finish(self, name: str) -> None:
        """Note what became of a lesson whose process has ended, and end what it left."""
        child = self.running.pop(name)
        execute.end_processes({other.pid for other in self.running.values()})
        child.communicate()
        result = results.read_result(name, self.profile) or Result(name)
        if result.status == "interrupted":
            result.status = "failed"
            words = execute.last_words(run_folder(self.profile) / f"{name}.log")
            ended = f"the lesson's process ended with status {child.returncode}"
            result.error = f"{ended}: {words}"
        self.end(result)

    def end(self, result: Result) -> None:
        """Keep a result and print its line; behind a failure cell, error and the file to open."""
        self.ended[result.name] = result
        if not result.reused:
            results.write_result(result, self.profile)
        cells = f"cell {result.cell:3} of {result.cells:<3}"
        memory = format_memory(result.peak_bytes)
        cost = f"{result.seconds:6.1f} s {memory:>8}"
        note = result.error if result.status == "blocked" else ""
        note = "done before" if result.reused else note
        line = f"{MARKS[result.status]} {result.name:40} {cells} {cost}  {note}"
        print(line.rstrip(), flush=True)
        if result.status == "failed":
            file = run_folder(self.profile) / f"{result.name}.ipynb"
            text = f"cell [{result.cell}]: {result.error}\nopen {file}"
            print("    " + text.replace("\n", "\n    "), flush=True)


def run_course(
    paths: list[Path], profile: Profile, dials: dict[str, Any], fresh: bool = False
) -> list[Result]:
    """Run the lessons that are not yet done; every result is kept as soon as it is known."""
    folder = run_folder(profile)
    execute.adopt_orphans()
    signal.signal(signal.SIGTERM, stop)
    try:
        with plain_disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(folder / ".lock", timeout=0):
                chosen = add_makers(paths, profile)
                fetch_missing(chosen)
                plan = make_plan(chosen, profile)
                return Run(plan, profile, dials).go(fresh)
    except Timeout:
        what = "another run of this profile is going on"
        raise CourseError(what, folder, "wait until it has ended") from None


def stop(number: int, _: object) -> None:
    """End this process in order, with the status that a signal gives."""
    sys.exit(128 + number)
