"""A copy of the lessons for a class: nothing of a solution is left in it."""

import json

import pytest

from course import __main__ as command
from course.notebooks import cells, read, select, source, tags
from utils.errors import CourseError


def test_a_class_gets_tasks_and_no_solution(tmp_path, capsys):
    folder = tmp_path / "class"
    assert command.main(["student", str(folder), "--only", "05,09"]) == 0
    assert "2 lessons without solutions" in capsys.readouterr().out
    for path in select("05,09"):
        copy = read(folder / path.name)
        kinds = [tag for cell in cells(copy, "code") for tag in tags(cell)]
        assert kinds.count("exercise") == kinds.count("check") >= 3
        assert "solution" not in kinds
        assert "lesson.solution(" not in json.dumps(copy)
        gone = [
            source(cell)
            for cell in cells(read(path), "code")
            if "solution" in tags(cell)
        ]
        assert len(gone) == kinds.count("exercise")
    assert (folder / "images" / "05_merges.svg").exists()


def test_a_folder_that_holds_something_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("mine", encoding="utf-8")
    from course.publish import student

    with pytest.raises(CourseError, match="holds something"):
        student(tmp_path, select("05"))
    with pytest.raises(SystemExit):
        command.parse(["student"])
