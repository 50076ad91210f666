"""A copy of the lessons for a class: nothing of a solution is left in it."""

import json
import re

import pytest

from course import __main__ as command
from course.notebooks import cells, read, select, source, tags
from course.publish import project, student
from utils.errors import ROOT, CourseError


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


def test_every_link_of_a_copy_lands(tmp_path):
    folder = tmp_path / "class"
    student(folder, select("05,06"))
    inside, outside = set(), set()
    for path in select("05,06"):
        prose = cells(read(folder / path.name), "markdown")
        text = "\n".join(source(cell) for cell in prose)
        for target in re.findall(r'(?:\]\(|src="|href=")([^)"\s]+)', text):
            (outside if target.startswith("http") else inside).add(target)
    assert {path.name for path in select("05,06")} <= inside
    assert "images/05_merges.svg" in inside
    for target in inside:
        name = target.partition("#")[0]
        assert not name or (folder / name).is_file(), target
    ours = [link for link in outside if link.startswith(project()["repository"])]
    assert any(link.endswith("/docs/sources.md") for link in ours)
    assert any("/notebooks/07_" in link for link in ours)
    for link in ours:
        place = re.sub(r".*?/(?:blob|raw)/[^/]+/", "", link)
        assert (ROOT / place.partition("#")[0]).exists(), link


def test_a_folder_that_holds_something_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(CourseError, match="holds something"):
        student(tmp_path, select("05"))
    with pytest.raises(SystemExit):
        command.parse(["student"])
