"""Figures against `expected/`, exercises both ways: whatever is off is named."""
import math

import nbformat
import pytest

from course import verdicts
from utils.lesson import RECORD_TYPE


def notebook(path, *records):
    cells = [nbformat.v4.new_code_cell("", outputs=[nbformat.v4.new_output(
        "display_data", {"text/plain": "", RECORD_TYPE: record})]) for record in records]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


def figure(name, value):
    return {"kind": "figure", "name": name, "value": value, "unit": "", "source": None, "source_name": ""}


def exercise(which, verdict):
    return {"kind": "exercise", "name": "05.1", "which": which, "verdict": verdict, "hint": ""}


@pytest.fixture
def expect(tmp_path, monkeypatch):
    monkeypatch.setattr(verdicts, "ROOT", tmp_path)
    (tmp_path / "expected").mkdir()
    return lambda text: (tmp_path / "expected/smoke.toml").write_text(text)


@pytest.mark.parametrize("rule, value, good", [
    ("{ value = 4, tolerance = 0.5 }", 4.5, True), ("{ value = 4, tolerance = 0.5 }", 4.51, False),
    ("{ value = 4 }", 4, True), ("{ value = 4 }", 5, False), ("{ min = 2 }", 1.9, False),
    ("{ max = 2 }", 2.0, True), ("{ min = 1, max = 2 }", 3, False), ("{ min = 0 }", math.nan, False)])
def test_ranges(tmp_path, expect, rule, value, good):
    expect(f'["05"]\na = {rule}\n')
    assert (not verdicts.problems_of(notebook(tmp_path / "05_x.ipynb", figure("a", value)), "smoke")) == good


def test_recorded_and_not_expected_and_the_other_way_round(tmp_path, expect):
    expect('["05"]\nb = { value = 1 }\n["06"]\nc = { value = 1 }\n')
    problems = verdicts.problems_of(notebook(tmp_path / "05_x.ipynb", figure("a", 2)), "smoke")
    assert len(problems) == 2
    assert "a: recorded, not expected" in problems[0] and "b: expected, not recorded" in problems[1]


def test_broken_toml_is_named(tmp_path, expect):
    expect("[05\n")
    with pytest.raises(verdicts.CourseError, match="this is not TOML"):
        verdicts.problems_of(notebook(tmp_path / "05_x.ipynb"), "smoke")


GOOD = [exercise("answer", "not attempted"), exercise("solution", "pass"), exercise("wrong answer", "fail")]


@pytest.mark.parametrize("records, strict, good", [
    (GOOD, True, True), ([exercise("answer", "pass"), *GOOD[1:]], True, False),
    ([exercise("answer", "pass"), *GOOD[1:]], False, True),
    ([GOOD[0], exercise("solution", "fail")], False, False),
    ([GOOD[0], exercise("solution", "not attempted")], False, False),
    ([*GOOD[:2], exercise("wrong answer", "pass")], False, False),
    ([*GOOD[:2], exercise("wrong answer", "not attempted")], False, False),
    (GOOD[:1], False, False), (GOOD[1:], False, False)])
def test_exercises_are_proven_both_ways(tmp_path, expect, records, strict, good):
    expect("")
    problems = verdicts.problems_of(notebook(tmp_path / "05_x.ipynb", *records), "smoke", strict)
    assert (not problems) == good
