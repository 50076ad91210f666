"""HumanEval and MBPP: their own solutions pass in the sandbox, and mutants of them do not."""

from __future__ import annotations

import random

import pytest

from stages.code_problems import human_eval, mbpp
from stages.sandbox import Sandbox
from tests.mutants import judge_all, mutants

THERE, REASON = Sandbox.available()


def test_the_two_sets_are_whole():
    problems = human_eval() + mbpp()
    assert len(human_eval()) == 164 and len(mbpp()) == 500
    assert len({problem.name for problem in problems}) == 664
    for problem in problems:
        compile(problem.prompt + problem.solution, problem.name, "exec")
        compile(problem.tests, problem.name, "exec")


def test_helpers_of_a_prompt_belong_to_the_tests():
    problems = {problem.name: problem for problem in human_eval()}
    assert "def poly(" in problems["HumanEval/32"].tests
    assert "def find_zero(" not in problems["HumanEval/32"].tests


def test_a_mutant_differs_by_one_token_of_the_solution():
    problem = human_eval()[0]
    text = problem.prompt + problem.solution
    for program in mutants(problem):
        before, after = text.splitlines(), program.splitlines()
        different = [k for k, (a, b) in enumerate(zip(before, after)) if a != b]
        assert len(different) == 1 and different[0] >= problem.prompt.count("\n")


@pytest.mark.slow
@pytest.mark.skipif(not THERE, reason=f"no cage here: {REASON}")
def test_solutions_pass_and_mutants_do_not():
    problems = random.Random(1).sample(human_eval() + mbpp(), 24)
    results = judge_all(problems)
    assert results["refused though right"] == results["passed though wrong"] == []
    assert len(results["without a mutant"]) <= 4
