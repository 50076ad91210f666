"""Programming problems in one form: our ladder, HumanEval and MBPP; and where a completion ends."""

from __future__ import annotations

import ast
import re
import textwrap
import tomllib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages import code_problems

LADDER = Path(__file__).parent / "problems.toml"
# A line at the margin ends a function, unless it only closes a bracket.
MARGIN = re.compile(r"\n(?=[^\s)\]}])")
# The same, but a program may have several functions and what they need.
PART = r"def |import |from |class |@|\w+ ?="
NO_PROGRAM = re.compile(rf"\n(?=[^\s)\]}}])(?!{PART})")
# While the model still writes, the first word of a line may become such a part.
NO_PROGRAM_YET = re.compile(rf"\n(?=[^\s)\]}}])(?!{PART}|\w+ ?\Z)")


@dataclass(frozen=True)
class Problem:
    """What a model is given, and how its answer is judged."""

    name: str
    rung: int  # how hard it is; 0 where nobody has graded it
    prompt: str  # it ends where the model goes on
    solution: str  # a completion that is right
    tests: str  # lines of Python, run after the program
    wrong: tuple[str, ...] = ()  # completions that the tests refuse
    ends: re.Pattern[str] = MARGIN  # what ends a completion
    stops: re.Pattern[str] = MARGIN  # what stops the model that writes it

    def program(self, completion: str) -> str:
        """The program that a completion makes: the prompt, and the completion up to its end."""
        block = first_block(completion, self.ends)
        return self.prompt + block

    @property
    def calls(self) -> list[str]:
        """The calls that the tests make, without the values that they should return."""
        calls = []
        tree = ast.parse(self.tests)
        for line in tree.body:
            compared = isinstance(line, ast.Assert) and line.test
            if isinstance(compared, ast.Compare):
                call = ast.unparse(compared.left)
                calls.append(call)
        return calls


def first_block(
    completion: str,
    ends: re.Pattern[str] = MARGIN,
) -> str:
    """A completion up to the first line at the margin, which is no part of the function.

    >>> first_block("\\n    return a + b\\n\\nprint(add(1, 2))")
    '\\n    return a + b'
    """
    block = ends.split(completion, maxsplit=1)[0]
    return block.rstrip()


def ladder() -> list[Problem]:
    """The problems of our own, from the easiest to the hardest.

    >>> [one.name for one in ladder()[:3]], len(ladder())
    (['same', 'is_none', 'add'], 36)
    """
    text = LADDER.read_text(encoding="utf-8")
    content = tomllib.loads(text)
    entries = content["problem"]
    return list(map(from_entry, entries))


def from_entry(entry: dict[str, Any]) -> Problem:
    """A problem of our own file."""
    prompt = f'{entry["head"]}\n    """{entry["says"]}"""'
    tests = [f"assert {test}" for test in entry["tests"]]
    return Problem(
        name=entry["head"].removeprefix("def ").partition("(")[0],
        rung=entry["rung"],
        prompt=prompt,
        solution=as_body(entry["solution"]),
        tests="\n".join(tests),
        wrong=tuple(map(as_body, entry["wrong"])),
    )


def as_body(code: str) -> str:
    """Lines of code as the completion of a header."""
    return "\n" + textwrap.indent(code, "    ")


def quietly(
    read: Callable[[], list[code_problems.Problem]],
) -> list[code_problems.Problem]:
    """The problems of a benchmark, without the warnings that newer Pythons have for their escapes."""
    with warnings.catch_warnings(action="ignore"):
        return read()


def human_eval() -> list[Problem]:
    """The 164 problems of HumanEval, whose prompts are a header with a docstring."""
    problems = []
    for one in quietly(code_problems.human_eval):
        # A model writes the line break itself, as one token with the indentation behind it.
        prompt = one.prompt.rstrip()
        solution = "\n" + one.solution.rstrip()
        problem = Problem(one.name, 0, prompt, solution, one.tests)
        problems.append(problem)
    return problems


def mbpp() -> list[Problem]:
    """The 500 test problems of MBPP; a prompt is the sentence with the first of its tests.

    The model writes a whole program, so that only a line that begins no part of one ends it.
    """
    problems = []
    for one in quietly(code_problems.mbpp):
        example = next(
            line for line in one.tests.splitlines() if line.startswith("assert")
        )
        told = one.prompt.strip()
        told = told.strip('"')
        prompt = f'"""\n{told}\n{example}\n"""'
        solution = "\n" + one.solution.rstrip()
        problem = Problem(
            one.name,
            0,
            prompt,
            solution,
            one.tests,
            ends=NO_PROGRAM,
            stops=NO_PROGRAM_YET,
        )
        problems.append(problem)
    return problems
