"""Code that a model wrote is hostile until it is shown to be harmless; here it runs in a cage.

    with Sandbox(workers=2) as sandbox:
        verdicts = sandbox.judge([("def add(a, b): return a + b", "assert add(1, 2) == 3")])

Each program gets a process in namespaces of its own (users, processes, mounts, network, host name,
shared memory, control groups), which sees the interpreter's library and an empty folder in memory,
may make no system call but those of a list, and is ended after its time with all that it started.
The tests run in a second such process: see `cage/examiner.py` for why no verdict can be forged.
What the layers are is in `cage/`; this file starts them, keeps the time, and gives verdicts.
"""

from __future__ import annotations

import contextlib
import functools
import json
import queue
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from stages.cage.limits import Limits, Verdict
from utils.errors import CourseError

if sys.platform == "linux":
    from stages.cage import judge
else:
    judge: Any = None

__all__ = ["Limits", "Sandbox", "Verdict", "run_program"]

# What the second process does ("tests", "calls", or no such process: "script"), program, tests.
Work = tuple[str, str, str]
HINT = " (a container, or a system's policy, may keep namespaces from its users)"


@functools.cache
def probe() -> tuple[bool, str]:
    """Build the cage once and judge a program in it."""
    if sys.platform != "linux":
        return (
            False,
            f"the cage is made of Linux's namespaces, which {sys.platform} lacks",
        )
    try:
        worker = judge.Worker()
    except (CourseError, OSError) as error:
        return False, f"{error}{HINT}"
    try:
        limits = Limits(seconds=judge.PATIENCE)
        verdict = judge.run_tests(worker, "tests", "x = 1", "assert x == 1", limits)
    except (CourseError, OSError) as error:
        return False, f"{error}{HINT}"
    finally:
        worker.close()
    return verdict.passed, "" if verdict.passed else verdict.message


class Sandbox:
    """Warm workers that run programs in cages, several at once.

    Each worker is a process that has the standard library's common modules imported, so that a
    program costs a fork and its namespaces, not the start of an interpreter.
    """

    def __init__(self, workers: int = 2, limits: Limits | None = None) -> None:
        if not 1 <= workers <= 64:
            raise CourseError(f"{workers} workers", "Sandbox", "choose 1 to 64")
        self.count = workers
        self.limits = limits or Limits()
        self.workers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.open = False

    @staticmethod
    def available() -> tuple[bool, str]:
        """Whether this machine gives every layer of the cage, and if not, why."""
        return probe()

    def __enter__(self) -> Sandbox:
        there, reason = self.available()
        if not there:
            what = (
                f"code of a model does not run where it cannot be caged: {reason}"
            )
            raise CourseError(what, fix="use a Linux that gives user namespaces")
        try:
            for _ in range(self.count):
                self.workers.put(judge.Worker())
        except BaseException:
            self.__exit__()
            raise
        self.open = True
        return self

    def __exit__(self, *error: object) -> None:
        self.open = False
        while not self.workers.empty():
            self.workers.get().close()

    def judge(
        self, jobs: Sequence[tuple[str, str]], limits: Limits | None = None
    ) -> list[Verdict]:
        """The verdicts on programs by their tests, in order.

        The tests call the program's functions by their names; they are run in another process.
        """
        works = [("tests", program, tests) for program, tests in jobs]
        return self.each(works, limits or self.limits)

    def run(
        self,
        jobs: Sequence[tuple[str, Sequence[str] | None]],
        limits: Limits | None = None,
    ) -> list[Verdict]:
        """Programs with calls to evaluate (such as "add(1, 2)"), or None to run them as scripts."""
        works = []
        for program, calls in jobs:
            role = "script" if calls is None else "calls"
            words = list(calls or ())
            works.append((role, program, json.dumps(words)))
        return self.each(works, limits or self.limits)

    def each(self, works: list[Work], limits: Limits) -> list[Verdict]:
        """One verdict for each work, as many at once as there are workers."""
        if not self.open:
            fix = "run programs inside `with Sandbox() as sandbox:`"
            raise CourseError("the sandbox is closed", "Sandbox", fix)
        threads = ThreadPoolExecutor(self.count)
        try:
            return list(threads.map(lambda work: self.one(work, limits), works))
        finally:
            threads.shutdown(cancel_futures=True)

    def one(self, work: Work, limits: Limits) -> Verdict:
        """A verdict from the next free worker."""
        role, program, tests = work
        with self.borrow() as worker:
            if role == "script":
                return judge.run_script(worker, program, limits)
            return judge.run_tests(worker, role, program, tests, limits)

    @contextlib.contextmanager
    def borrow(self) -> Iterator[Any]:
        """A worker for one program; one that failed is replaced."""
        worker = self.workers.get()
        try:
            yield worker
        except BaseException:
            worker.close()
            worker = judge.Worker()
            raise
        finally:
            self.workers.put(worker)


def run_program(
    program: str, calls: Sequence[str] | None = None, limits: Limits | None = None
) -> Verdict:
    """One program in a sandbox of its own; for many, a `Sandbox` is faster.

    run_program("def add(a, b): return a + b", ["add(1, 2)"]).results == ("3",)
    """
    with Sandbox(1, limits) as sandbox:
        verdicts = sandbox.run([(program, calls)])
    return verdicts[0]
