"""A program in another environment, and its record where that environment is not there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from course import elsewhere
from stages import wrapped
from utils import artifacts
from utils.errors import CourseError

PROGRAM = """
import json, os, pathlib
task = json.load(open("task.json", encoding="utf-8"))
seen = sorted(path.name for path in pathlib.Path("start").iterdir())
names = [name for name in os.environ if name.startswith(("PYTHON", "COURSE_"))]
answer = {"twice": 2 * task["number"], "seen": seen, "names": names, "versions": {"a": "1"}}
json.dump(answer, open("answer.json", "w", encoding="utf-8"))
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A build folder and a record of its own, without the environment."""
    monkeypatch.setattr(wrapped, "build_folder", lambda: tmp_path / "build")
    monkeypatch.setattr(wrapped, "ROOT", tmp_path)
    (tmp_path / "results").mkdir()
    return tmp_path


def pretend(away: Path) -> Path:
    """An environment that is this one."""
    image = away / "build/elsewhere/simpletransformers/image"
    python = image / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    return image


def keep(away: Path, task: dict[str, Any], **more: Any) -> None:
    asked = artifacts.hash_json([PROGRAM, task])
    about = {"asked": asked, "date": "2026-11-28", "machine": {"cores": "2"}}
    record = {"about": about, "versions": {"a": "1"}, **more}
    artifacts.write_json(away / "results/A1_smoke.json", record)


def test_a_program_reads_its_task_and_leaves_an_answer(model, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "somewhere")
    monkeypatch.setenv("COURSE_RUN", "1")
    answer = wrapped.run_there(Path(sys.executable), PROGRAM, {"number": 4}, model)
    assert answer["twice"] == 8 and answer["seen"] == ["config.json"]
    assert answer["names"] == []


@pytest.mark.parametrize("program", ["raise ValueError('too old')", "pass"])
def test_a_program_that_fails_is_named(model, program) -> None:
    with pytest.raises(CourseError, match="too old|no answer"):
        wrapped.run_there(Path(sys.executable), program, {}, model)


def test_an_environment_that_is_half_installed_is_none(away) -> None:
    assert wrapped.interpreter() is None
    image = pretend(away)
    assert wrapped.interpreter() is None
    (image / "installed").touch()
    if sys.platform != "win32":
        assert wrapped.interpreter() == image / "bin/python"


def test_the_record_is_shown_and_said_to_be_one(away, model, capsys) -> None:
    keep(away, {"number": 4}, twice=8)
    answer = wrapped.ask(PROGRAM, {"number": 4}, model, "smoke")
    assert answer["twice"] == 8
    said = capsys.readouterr().out
    assert "NOT run now" in said and "On record, 2026-11-28" in said


def test_a_record_of_another_task_is_not_shown(away, model) -> None:
    keep(away, {"number": 4})
    with pytest.raises(CourseError, match="has not been recorded with this task"):
        wrapped.ask(PROGRAM, {"number": 5}, model, "smoke")
    with pytest.raises(CourseError, match="has not been recorded"):
        wrapped.ask(PROGRAM, {"number": 4}, model, "laptop")


def test_what_is_run_is_kept_for_the_record(
    away, model, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(wrapped, "interpreter", lambda: Path(sys.executable))
    keep(away, {"number": 4}, twice=0)
    assert wrapped.ask(PROGRAM, {"number": 4}, model, "smoke")["twice"] == 8
    assert "run now" in capsys.readouterr().out
    kept = artifacts.read_json(away / "build/wrapped/A1_smoke.json")
    assert kept is not None and kept["about"]["machine"]["python"]


def test_a_guest_has_a_list_with_what_is_asked_for() -> None:
    for place, wanted in elsewhere.GUESTS.items():
        assert elsewhere.wanted_in(place) == wanted
        pins = elsewhere.list_of(place).read_text(encoding="utf-8").splitlines()
        names = {pin.partition("==")[0] for pin in pins if "==" in pin}
        assert set(wanted) <= names


def test_a_guest_is_only_built(monkeypatch, tmp_path) -> None:
    built = []
    monkeypatch.setattr(
        elsewhere, "build", lambda place: built.append(place) or tmp_path
    )
    monkeypatch.setattr(
        elsewhere, "run_checkout", lambda *given: pytest.fail("ran")
    )
    assert elsewhere.run(["simpletransformers"], None, False) == []
    assert built == ["simpletransformers"]
    with pytest.raises(CourseError, match="simpletransformers"):
        elsewhere.run(["simple"], None, False)
