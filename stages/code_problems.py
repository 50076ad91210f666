"""HumanEval and MBPP: the prompt of each problem, its own solution, and tests to run beside it."""

from __future__ import annotations

import ast
import builtins
import gzip
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from utils.assets import asset


@dataclass(frozen=True)
class Problem:
    """One problem; `prompt + solution` is a program that passes `tests`."""

    name: str
    prompt: str
    solution: str
    tests: str


@cache
def both_sets() -> Path:
    """The folder of both sets; who made them is printed once."""
    return Path(asset("code-problems"))


def read_records(kind: str) -> list[dict[str, Any]]:
    """The records of one of the two sets, "humaneval" or "mbpp"."""
    folder = both_sets() / f"codex_{kind}" / "gold_bpb_0shot"
    with gzip.open(folder / "requests.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line)["doc"] for line in lines]


def human_eval() -> list[Problem]:
    """The 164 problems of HumanEval: a signature with its docstring, to be gone on with.

    A helper that stands in the prompt is part of the tests, since a program that changed it would
    otherwise judge itself.
    """
    problems = []
    for record in read_records("humaneval"):
        prompt, name = record["prompt"], record["entry_point"]
        parts = [helpers(prompt, name), record["test"], f"check({name})\n"]
        tests = "\n".join(parts)
        body = record["canonical_solution"]
        problem = Problem(record["task_id"], prompt, body, tests)
        problems.append(problem)
    return problems


def helpers(prompt: str, name: str) -> str:
    """The prompt's imports and functions, without the one that is asked for.

    >>> print(helpers("import re\\ndef one(): return 1\\ndef two():\\n    'to do'", "two"))
    import re
    def one():
        return 1
    """
    tree = ast.parse(prompt)
    kept = [part for part in tree.body if getattr(part, "name", "") != name]
    return "\n".join(ast.unparse(part) for part in kept)


def mbpp() -> list[Problem]:
    """The 500 test problems of MBPP: a sentence that asks for a function, and three asserts."""
    problems = []
    for record in read_records("mbpp"):
        prompt = f'"""{record["text"]}"""\n'
        checks = [record["test_setup_code"], *record["test_list"]]
        tests = "\n".join(checks).replace("\r\n", "\n")
        code = record["code"].replace("\r\n", "\n")
        tests = taken_by_force(code) + tests
        name = f"MBPP/{record['task_id']}"
        problems.append(Problem(name, prompt, code, tests))
    return problems


def taken_by_force(code: str) -> str:
    """An import of a function that has a built-in's name, which the tests would call otherwise.

    >>> taken_by_force("def sum(a, b): return a + b")
    'from program import sum\\n'
    """
    functions = [
        part for part in ast.parse(code).body if isinstance(part, ast.FunctionDef)
    ]
    names = [part.name for part in functions if hasattr(builtins, part.name)]
    return "".join(f"from program import {name}\n" for name in names)
