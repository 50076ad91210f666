"""Figures against `expected/`, exercises both ways, marked outputs: whatever is off is named."""

import math

import nbformat
import pytest

from course import verdicts
from course.notebooks import read
from utils.lesson import RECORD_TYPE

CHECK = "[05.check]\na = {}\n"


def notebook(path, *records):
    """An executed notebook with one record in each cell."""
    cells = []
    for record in records:
        data = {"text/plain": "", RECORD_TYPE: record}
        output = nbformat.v4.new_output("display_data", data)
        cells.append(nbformat.v4.new_code_cell("", outputs=[output]))
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


def figure(name, value):
    return {
        "kind": "figure",
        "name": name,
        "value": value,
        "unit": "",
        "source": None,
        "source_name": "",
    }


def exercise(which, verdict, name="05.1"):
    return {
        "kind": "exercise",
        "name": name,
        "which": which,
        "verdict": verdict,
        "hint": "",
    }


@pytest.fixture
def expect(tmp_path, monkeypatch):
    monkeypatch.setattr(verdicts, "ROOT", tmp_path)
    (tmp_path / "expected/refused").mkdir(parents=True)
    return lambda text: (tmp_path / "expected/smoke.toml").write_text(text)


@pytest.mark.parametrize(
    "rule, value, good",
    [
        ("{ value = 4, tolerance = 0.5 }", 4.5, True),
        ("{ value = 4, tolerance = 0.5 }", 4.51, False),
        ("{ value = 4, tolerance = 0.5 }", 3.49, False),
        ("{ value = 4 }", 4, True),
        ("{ value = 4 }", 5, False),
        ("{ min = 2 }", 1.9, False),
        ("{ max = 2 }", 2.0, True),
        ("{ min = 1, max = 2 }", 3, False),
        ("{ min = 0 }", math.nan, False),
    ],
)
def test_ranges(tmp_path, expect, rule, value, good):
    path = notebook(tmp_path / "05_x.ipynb", figure("a", value))
    expect(CHECK.format(rule))
    assert (not verdicts.problems_of(path, "smoke")) == good
    expect(CHECK.format(rule).replace("check", "typical"))
    assert not verdicts.problems_of(path, "smoke")
    (verdict,) = verdicts.judge_figures(read(path), "smoke", "05")
    assert verdict.unusual == (not good)


def test_recorded_and_not_expected_and_the_other_way_round(tmp_path, expect):
    typical = "[05.typical]\nd = { value = 1 }\n"
    expect(
        f"[05.check]\nb = {{ value = 1 }}\n{typical}[06.check]\nc = {{ value = 1 }}\n"
    )
    path = notebook(tmp_path / "05_x.ipynb", figure("a", 2))
    problems = verdicts.problems_of(path, "smoke")
    assert len(problems) == 2
    assert "a: recorded, not expected" in problems[0]
    assert "b: expected, not recorded" in problems[1]
    strict = verdicts.problems_of(path, "smoke", strict=True)
    assert len(strict) == 3 and any(
        "d: expected, not recorded" in text for text in strict
    )


def test_a_profile_without_expectations_reports_figures_and_fails_nothing(
    tmp_path, expect
):
    path = notebook(tmp_path / "05_x.ipynb", figure("a", 2))
    assert verdicts.problems_of(path, "gpu") == []
    (verdict,) = verdicts.judge_figures(read(path), "gpu", "05")
    assert verdict.value == 2 and not verdict.unusual


def test_a_figure_recorded_twice_is_judged_twice(tmp_path, expect):
    expect(CHECK.format("{ max = 3 }"))
    path = notebook(tmp_path / "05_x.ipynb", figure("a", 9), figure("a", 2))
    assert verdicts.problems_of(path, "smoke") == ["figure a: 9 is outside max 3"]


def test_broken_toml_is_named(tmp_path, expect):
    expect("[05\n")
    with pytest.raises(verdicts.CourseError, match="this is not TOML"):
        verdicts.problems_of(notebook(tmp_path / "05_x.ipynb"), "smoke")


GOOD = [
    exercise("answer", "not attempted"),
    exercise("solution", "pass"),
    exercise("wrong answer", "fail"),
]
SOLVED = exercise("answer", "pass")


@pytest.mark.parametrize(
    "records, strict, good",
    [
        (GOOD, True, True),
        ([SOLVED, *GOOD[1:]], True, False),
        ([SOLVED, *GOOD[1:]], False, True),
        ([GOOD[0], exercise("solution", "fail")], False, False),
        ([GOOD[0], exercise("solution", "not attempted")], False, False),
        ([*GOOD[:2], exercise("wrong answer", "pass")], False, False),
        ([*GOOD[:2], exercise("wrong answer", "not attempted")], False, False),
        (GOOD[:1], False, False),
        (GOOD[1:], False, False),
    ],
)
def test_exercises_are_proven_both_ways(tmp_path, expect, records, strict, good):
    problems = verdicts.problems_of(
        notebook(tmp_path / "05_x.ipynb", *records), "smoke", strict=strict
    )
    assert (not problems) == good


@pytest.mark.parametrize(
    "refused, missing",
    [("05.1", []), ("05.2", ["answer", "solution", "wrong answer"])],
)
def test_each_exercise_with_wrong_answers_must_have_been_tried(
    tmp_path, expect, refused, missing
):
    (tmp_path / "expected/refused/05.py").write_text(
        f"# %% {refused}\nlesson.refuse()\n"
    )
    path = notebook(tmp_path / "05_x.ipynb", *GOOD)
    problems = verdicts.problems_of(path, "smoke", committed=path)
    assert problems == [f"exercise 05.2 has no {part}" for part in missing]


def marked(*outputs):
    cell = {
        "cell_type": "code",
        "id": "a",
        "metadata": {"tags": [verdicts.MARKED]},
        "source": "",
    }
    return {"cells": [{**cell, "outputs": list(outputs)}]}


def stream(text, name="stdout"):
    return {"output_type": "stream", "name": name, "text": text}


def shown(text, **data):
    return {"output_type": "execute_result", "data": {"text/plain": text, **data}}


RECORD = {RECORD_TYPE: figure("a", 1)}


@pytest.mark.parametrize(
    "before, after, problem",
    [
        ([stream("a\nb\n")], [stream("a"), stream("\nb \n")], ""),
        (
            [stream(["a\n", "b\n"])],
            [stream("a\nc\n")],
            "cell [1] shows 'c', not 'b'",
        ),
        ([stream("a\n")], [stream("a\nb\n")], "cell [1] shows 'b', not ''"),
        (
            [stream("a\n"), shown("1")],
            [stream("a\n")],
            "cell [1] shows '', not '1'",
        ),
        ([shown("1")], [shown("2")], "cell [1] shows '2', not '1'"),
        (
            [shown("1"), shown("x", **RECORD)],
            [shown("1"), shown("y", **RECORD)],
            "",
        ),
        ([], [stream("a")], ""),
    ],
)
def test_marked_outputs_are_compared_line_by_line(before, after, problem):
    problems = list(verdicts.judge_outputs(marked(*after), marked(*before)))
    assert problems == ([problem] if problem else [])


def test_an_output_that_is_not_marked_is_not_compared():
    before, after = marked(stream("a")), marked(stream("b"))
    after["cells"][0]["metadata"] = {}
    assert list(verdicts.judge_outputs(after, before)) == []
