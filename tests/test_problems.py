"""The ladder: right solutions pass, wrong ones do not; a completion is cut where its function ends."""

import re
from collections import Counter

import pytest

from stages import problems
from stages.passing import judge_all, may_vote, results_of
from stages.problems import MARGIN, NO_PROGRAM, Problem, first_block, ladder
from stages.sandbox import Sandbox

LADDER = ladder()
needs_cage = pytest.mark.skipif(
    not Sandbox.available()[0], reason=f"no cage here: {Sandbox.available()[1]}"
)


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(workers=2) as cage:
        yield cage


@needs_cage
def test_each_solution_passes(sandbox):
    jobs = [(one.program(one.solution), one.tests) for one in LADDER]
    failed = {
        one.name: verdict.message
        for one, verdict in zip(LADDER, sandbox.judge(jobs))
        if not verdict.passed
    }
    assert failed == {}


@needs_cage
def test_five_wrong_solutions_of_each_problem_are_refused(sandbox):
    pairs = [(one, body) for one in LADDER for body in one.wrong]
    assert {len(set(one.wrong)) for one in LADDER} == {5}
    verdicts = sandbox.judge(
        [(one.program(body), one.tests) for one, body in pairs]
    )
    passed = [pair for pair, verdict in zip(pairs, verdicts) if verdict.passed]
    assert passed == []


def test_a_wrong_solution_is_a_program_and_no_slip_of_the_pen():
    for one in LADDER:
        for body in one.wrong:
            compile(one.program(body), one.name, "exec")


def test_the_ladder_has_six_rungs_of_six():
    assert Counter(one.rung for one in LADDER) == dict.fromkeys(range(1, 7), 6)
    assert [one.rung for one in LADDER] == sorted(one.rung for one in LADDER)
    assert len({one.name for one in LADDER}) == len(LADDER) >= 30


def test_a_prompt_shows_neither_a_test_nor_the_solution():
    for one in LADDER:
        assert one.prompt.endswith('"""') and f"def {one.name}(" in one.prompt
        # `fibonacci(0) is 0` is a definition
        assert one.name == "fibonacci" or not any(
            c in one.prompt for c in one.calls
        )
        assert one.solution.strip() not in one.prompt


def test_the_calls_are_those_of_the_tests_without_their_values():
    for one in LADDER:
        assert len(one.calls) == len(one.tests.splitlines()) >= 3
        assert all(call.startswith(f"{one.name}(") for call in one.calls)
    none = next(one for one in LADDER if one.name == "is_none")
    assert none.calls == [
        "is_none(None)",
        "is_none(0)",
        "is_none('')",
        "is_none('None')",
    ]


@pytest.mark.parametrize(
    "completion, block",
    [
        ("\n    return 1\n\n\ndef next():", "\n    return 1"),
        ("\n    return 1\nx = add(1, 2)\n", "\n    return 1"),
        ("\n    return 1\nfor x in y:\n    pass", "\n    return 1"),
        ("\n    return 1\n# more\n    return 2", "\n    return 1"),
        (
            "\n    return [\n        1,\n]\nprint(1)",
            "\n    return [\n        1,\n]",
        ),
        ("\n    a = 1\n\n    return a\n```\nSo", "\n    a = 1\n\n    return a"),
        ("\n    if a:\n        return 1\n    return 2", None),
        ("\n\tif a:\n\t\treturn 1\nif", "\n\tif a:\n\t\treturn 1"),
        ("", ""),
    ],
)
def test_a_completion_ends_at_the_margin(completion, block):
    assert first_block(completion) == (completion if block is None else block)


def test_a_program_may_have_several_functions():
    text = (
        "\nimport re\nMOST = 3\ndef one():\n    return 1\ndef two():\n    return 2"
    )
    assert first_block(text + "\nprint(two())", NO_PROGRAM) == text
    assert first_block(text, MARGIN) == ""


@pytest.fixture(scope="module", params=["human_eval", "mbpp"])
def benchmark(request):
    return getattr(problems, request.param)()


def test_the_cut_leaves_what_is_right_as_it_is(benchmark):
    more = (
        "\n\nprint('more')\n"
        if benchmark[0].ends is MARGIN
        else "\n\nassert True\n"
    )
    changed = [
        one.name
        for one in benchmark
        if first_block(one.solution + more, one.ends) != one.solution.rstrip()
    ]
    assert set(changed) <= {"MBPP/64"}  # its own solution has a body at the margin


def test_a_right_solution_is_stopped_in_none_of_its_signs(benchmark):
    """A model writes `def` before the blank behind it."""
    stopped = set()
    for one in benchmark:
        solution = one.solution.rstrip()
        parts = (solution[:size] for size in range(len(solution) + 1))
        if any(map(one.stops.search, parts)):
            stopped.add(one.name)
        assert one.stops.search(solution + "\n\nassert True\n")
    assert stopped <= {"MBPP/64"}


def test_a_prompt_of_a_benchmark_ends_where_the_model_goes_on(benchmark):
    assert len(benchmark) in (164, 500)
    for one in benchmark:
        assert one.prompt == one.prompt.rstrip()
        assert one.solution.startswith("\n")
        assert "assert" in one.tests


def test_mbpp_shows_one_of_its_tests():
    for one in problems.mbpp():
        shown = re.findall(r"(?m)^assert .*", one.prompt)
        assert len(shown) >= 1 and shown[0] in one.tests


def test_a_program_is_the_prompt_with_the_cut_completion():
    one = Problem("f", 1, "def f():", "\n    return 1", "assert f() == 1")
    assert one.program("\n    return 2\nprint(f())") == "def f():\n    return 2"


@needs_cage
def test_verdicts_come_in_the_order_of_the_completions():
    # The right one now before the wrong ones in the alphabet, now behind them.
    some = LADDER[:16]
    texts = [
        [one.wrong[0], one.solution, one.solution, one.wrong[1]] for one in some
    ]
    verdicts = judge_all(some, texts)
    marks = [[verdict.passed for verdict in row] for row in verdicts]
    assert marks == [[False, True, True, False]] * len(some)


@needs_cage
def test_results_are_what_each_completion_returns_for_the_calls():
    square = next(one for one in LADDER if one.name == "square")
    texts = [
        square.solution,
        "\n    return None",
        "\n    return 1 / 0",
        "\n    return (",
        "",
    ]
    (results,) = results_of([square], [texts])
    assert results[0] == ("9", "16", "0.25", "1")
    assert results[1] == ("None",) * 4
    assert all(text.startswith("raised ZeroDivisionError") for text in results[2])
    assert not may_vote(results[3])
    assert results[4] == ("None",) * 4
