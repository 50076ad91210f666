"""One token of a right solution changed so that a test fails: the sandbox must refuse it.

    python -m tests.mutants [COUNT]

For each problem of HumanEval and MBPP, tokens are changed one at a time until the tests fail in a
plain interpreter; that mutant must be refused, and the solution itself must pass. A run of all
problems is written to `results/mutants.json`.
"""

from __future__ import annotations

import io
import random
import subprocess
import sys
import time
import tokenize
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

from course.checkout import clean_commit
from stages.code_problems import Problem, human_eval, mbpp
from stages.sandbox import Limits, Sandbox
from stages.weak_cages import LIMITS
from utils.artifacts import write_json
from utils.errors import ROOT
from utils.machine import machine_facts

OTHERS = {
    "+": "-", "-": "+", "*": "+", "//": "*", "/": "*", "%": "//", "**": "*",
    "<": ">=", ">": "<=", "<=": ">", ">=": "<", "==": "!=", "!=": "==",
    "and": "or", "or": "and", "False": "True", "min": "max",
    "max": "min", "not": "bool", "append": "remove", "0": "1", "1": "2", "2": "3",
    "in": "is", "len": "sum", "sum": "len", "sorted": "list", "upper": "lower",
    "lower": "upper", "set": "list", "list": "set", "tuple": "list", "if": "while",
    "range": "list", "3": "4", "True": "None", "zip": "map", "map": "zip",
}  # fmt: skip
# What nearly always fails comes last.
LAST = {"return": "yield"}
WORKERS = 2
TRIES = 40
# A mutant that never ends would be refused for its time.
SECONDS = 5


def mutants(problem: Problem) -> Iterator[str]:
    """Programs with one other token in the solution, in an order drawn by the problem's name."""
    text = problem.prompt + problem.solution
    first = problem.prompt.count("\n") + 1
    lines = text.splitlines(keepends=True)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    below = [token for token in tokens if token.start[0] >= first]
    places = [token for token in below if token.string in OTHERS]
    random.Random(problem.name).shuffle(places)
    places += [token for token in below if token.string in LAST]
    for token in places:
        number, start = token.start
        line = lines[number - 1]
        other = {**OTHERS, **LAST}[token.string]
        changed = line[:start] + other + line[token.end[1] :]
        yield "".join([*lines[: number - 1], changed, *lines[number:]])


def fails_plainly(program: str, problem: Problem) -> bool:
    """Whether the tests fail with it in a plain interpreter, which these harmless texts may have."""
    tests = "\n".join(
        line
        for line in problem.tests.splitlines()
        if not line.startswith("from program import")
    )
    words = [sys.executable, "-I", "-c", f"{LIMITS}\n{program}\n{tests}"]
    try:
        done = subprocess.run(words, capture_output=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 1


def failing_mutant(problem: Problem) -> str | None:
    """The first mutant that fails plainly."""
    for number, program in enumerate(mutants(problem)):
        if number >= TRIES:
            return None
        if fails_plainly(program, problem):
            return program
    return None


def judge_all(problems: list[Problem]) -> dict[str, list[str]]:
    """What went wrong: solutions that do not pass, mutants that pass, problems without a mutant."""
    with ThreadPoolExecutor(WORKERS) as threads:
        programs = list(threads.map(failing_mutant, problems))
    right = [
        (problem.prompt + problem.solution, problem.tests) for problem in problems
    ]
    wrong = [
        (program, problem.tests)
        for program, problem in zip(programs, problems)
        if program is not None
    ]
    with Sandbox(WORKERS, Limits(seconds=120)) as sandbox:
        passed = sandbox.judge(right)
        refused = sandbox.judge(wrong)
    names = [problem.name for problem in problems]
    mutated = [
        name for name, program in zip(names, programs) if program is not None
    ]
    print(Counter(verdict.outcome for verdict in refused))
    return {
        "refused though right": [
            f"{name}: {verdict.outcome}, {verdict.message}"
            for name, verdict in zip(names, passed)
            if not verdict.passed
        ],
        "passed though wrong": [
            name for name, verdict in zip(mutated, refused) if verdict.passed
        ],
        "without a mutant": sorted(set(names) - set(mutated)),
    }


def main(arguments: list[str]) -> int:
    """Judge some problems, or all and write it down; 1 if a mutant passed or a solution did not."""
    problems = human_eval() + mbpp()
    made_from = ""
    if arguments:
        problems = random.Random(0).sample(problems, int(arguments[0]))
    else:
        made_from = clean_commit()
    start = time.perf_counter()
    results = judge_all(problems)
    seconds = round(time.perf_counter() - start)
    print(f"{len(problems)} problems, {seconds} s")
    for what, names in results.items():
        print(f"{what}: {len(names)}")
        for name in names:
            print(f"  {name}")
    if made_from:
        record = {
            "commit": made_from,
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "command": "python -m tests.mutants",
            "machine": machine_facts(),
            "seconds": seconds,
            "solutions": len(problems),
            "mutants": len(problems) - len(results["without a mutant"]),
            **results,
        }
        write_json(ROOT / "results" / "mutants.json", record)
    return int(
        bool(results["refused though right"] or results["passed though wrong"])
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
