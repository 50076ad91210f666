"""The course in other environments: their lists, their Pythons, a lesson from its badge."""

import datetime
import os
import platform
import subprocess
import sys
import threading
from importlib import metadata
from pathlib import Path

import nbformat
import psutil
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from course import elsewhere, generate
from course.elsewhere import cell_seconds, execute, notebook_behind, wanted_in
from utils.errors import ROOT, CourseError

BADGE = (
    "https://colab.research.google.com/github/me/it/blob/colab/notebooks/05_a.ipynb"
)


@pytest.mark.parametrize("place", ["oldest", "locked", "colab"])
def test_each_list_is_one_that_pip_reads(place):
    lines = elsewhere.list_of(place).read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert len(pins) > 100
    assert [pin for pin in pins if "==" not in pin or "@" in pin] == []


def test_the_oldest_place_has_the_floor_of_every_requirement():
    lines = elsewhere.list_of("oldest").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    for text in wanted_in("oldest"):
        need = Requirement(text)
        assert need.specifier.contains(pins[canonicalize_name(need.name)]), text


def test_colab_starts_with_what_the_image_has_and_no_more():
    wanted = wanted_in("colab")
    assert {"torch", "transformers", "ipykernel", "torchao"} <= set(wanted)
    assert not {"trl", "polib", "papermill", "pytest"} & set(wanted)


def test_the_newest_place_has_no_upper_ends():
    assert [text for text in wanted_in("newest") if "<" in text] == []


def test_a_badge_opens_the_notebook_of_its_branch(tmp_path):
    git = [
        "git",
        "-C",
        str(tmp_path),
        "-c",
        "user.name=a",
        "-c",
        "user.email=a@b.c",
    ]
    subprocess.run([*git, "init", "-q", "-b", "colab"], check=True)
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks/05_a.ipynb").write_text("the copy")
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-qm", "all"], check=True)
    assert notebook_behind(BADGE, tmp_path.as_uri()) == "the copy"
    with pytest.raises(CourseError, match="opens no notebook"):
        notebook_behind("https://colab.research.google.com/", tmp_path.as_uri())
    with pytest.raises(subprocess.CalledProcessError):
        notebook_behind(BADGE.replace("/colab/", "/main/"), tmp_path.as_uri())


@pytest.mark.slow
def test_a_lesson_runs_with_the_python_of_an_image(tmp_path):
    content = tmp_path / "content"
    content.mkdir()
    code = "import os, sys\n"
    code += "print(sys.prefix, os.getcwd(), os.environ['MARK'], os.getpid())"
    cell = nbformat.v4.new_code_cell(code, metadata={"tags": ["bootstrap"]})
    broken = nbformat.v4.new_code_cell("1 / 0")
    notebook = nbformat.v4.new_notebook(cells=[cell, broken])
    environment = {**os.environ, "MARK": "seen"}
    error = execute(notebook, content, Path(sys.prefix), environment)
    assert error.startswith("ZeroDivisionError")
    *seen, kernel = notebook.cells[0].outputs[0].text.split()
    assert seen == [sys.prefix, str(content), "seen"]
    assert not psutil.pid_exists(int(kernel))
    assert cell_seconds(notebook) >= 0


def test_two_lessons_run_at_once_each_in_its_own_place(
    monkeypatch, tmp_path, capsys
):
    both = threading.Barrier(2, timeout=30)

    def meet(path, image, address):
        both.wait()
        return {"seconds": 1.0, "set_up": 0.5, "problems": [], "of": path.name}

    monkeypatch.setenv("JOBS", "2")
    monkeypatch.setattr(elsewhere, "build", lambda place: Path("/image/bin/python"))
    monkeypatch.setattr(elsewhere, "publish_here", lambda folder: "file:///here")
    monkeypatch.setattr(elsewhere, "run_from_badge", meet)
    tests = {"tests": "1 failed", "red": True}
    monkeypatch.setattr(elsewhere, "run_image_tests", lambda image: tests)
    facts = elsewhere.run_colab("00-01")
    assert facts["tests"] == "1 failed" and facts["red"]
    lessons = facts["lessons"]
    assert [facts["of"][:2] for facts in lessons.values()] == list(lessons)
    assert capsys.readouterr().out.count("✔") == 2


def test_the_set_up_is_timed_by_the_kernels_own_clock():
    begin = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    times = {"iopub.execute_input": begin.isoformat()}
    end = begin + datetime.timedelta(seconds=41.5)
    times["shell.execute_reply"] = end.isoformat()
    cell = nbformat.v4.new_code_cell("", metadata={"tags": ["bootstrap"]})
    cell.metadata["execution"] = times
    assert cell_seconds(nbformat.v4.new_notebook(cells=[cell])) == 41.5


def test_what_this_checkout_put_into_the_environment_stays_here(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("COURSE_BUILD", "/somewhere")
    monkeypatch.setenv("COURSE_HOME", "/assets")
    environment = elsewhere.clean_environment(COURSE_PROFILE="smoke")
    assert "PYTHONPATH" not in environment and "COURSE_BUILD" not in environment
    assert environment["COURSE_HOME"] == "/assets"
    assert environment["COURSE_PROFILE"] == "smoke"


def test_an_environment_that_has_the_list_is_the_place(monkeypatch, tmp_path):
    class Package:
        def __init__(self, name, version):
            self.name, self.version = name, version

    (tmp_path / "locked.txt").write_text("# a list\nA_b==1.0\ntorch==2.0 ; x\n")
    monkeypatch.setattr(elsewhere, "list_of", lambda place: tmp_path / "locked.txt")
    exact = [
        Package("a-b", "1.0"),
        Package("torch", "2.0+cpu"),
        Package("pip", "9"),
    ]
    installed = [*exact]
    monkeypatch.setattr(elsewhere.metadata, "distributions", lambda: installed)
    assert elsewhere.is_here("locked")
    for stranger in (Package("torch", "2.1"), Package("c", "1.0")):
        installed[:] = [*exact, stranger]
        assert not elsewhere.is_here("locked")


def test_what_has_run_here_is_taken_up(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setenv("COURSE_BUILD", str(tmp_path))
    monkeypatch.setattr(elsewhere, "is_here", lambda place: place == "locked")
    monkeypatch.setattr(elsewhere, "build", lambda place: Path("/image/python"))
    monkeypatch.setattr(elsewhere, "select", lambda only: [])

    def run(words, env, **options):
        asked.append((words[0], env["COURSE_BUILD"]))
        return subprocess.CompletedProcess(words, 0, stdout="9 passed\n")

    monkeypatch.setattr(elsewhere.subprocess, "run", run)
    for place in ("locked", "oldest"):
        elsewhere.run_checkout(place, None)
    there = str(tmp_path / "elsewhere" / "oldest" / "build")
    assert asked[::2] == [(sys.executable, str(tmp_path)), ("/image/python", there)]


def test_the_tests_of_an_image_have_every_requirement_and_leave_it_as_it_is(
    monkeypatch, tmp_path
):
    image = tmp_path / "image"
    (image / "bin").mkdir(parents=True)
    (image / "bin" / "python").write_text("an interpreter")
    asked = []
    monkeypatch.setenv("COURSE_BUILD", str(tmp_path))

    def run(words, env, **options):
        asked.append([*words, env["COURSE_BUILD"]])
        return subprocess.CompletedProcess(words, 1, stdout="1 failed, 9 passed\n")

    monkeypatch.setattr(elsewhere, "call", lambda *words, **how: run(words, **how))
    monkeypatch.setattr(elsewhere.subprocess, "run", run)
    facts = elsewhere.run_image_tests(image)
    assert facts == {"tests": "1 failed, 9 passed", "red": True}
    install, tests = asked
    for text in wanted_in("locked"):
        assert repr(text) in install[2]
    assert install[0] == tests[0] != str(image / "bin" / "python")
    assert "pytest" in tests and str(tmp_path / "build") != tests[-1]


def test_an_unknown_place_is_refused_with_the_names():
    with pytest.raises(CourseError, match="choose one of oldest, locked"):
        elsewhere.run(["kolab"], None, False)


def test_nothing_is_recorded_of_a_changed_checkout(monkeypatch, tmp_path, capsys):
    def refuse():
        raise CourseError("files have changed", fix="commit first")

    monkeypatch.setattr(elsewhere, "clean_commit", refuse)
    monkeypatch.setattr(elsewhere, "RECORD", tmp_path / "places.json")
    elsewhere.record("oldest", {"python": sys.executable, "lessons": {}})
    assert not (tmp_path / "places.json").exists()
    assert "commit first" in capsys.readouterr().out


def test_a_record_becomes_a_row_of_the_table(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(elsewhere, "clean_commit", lambda: "abc123")
    monkeypatch.setattr(elsewhere, "RECORD", tmp_path / "results" / "places.json")
    monkeypatch.setattr(elsewhere, "select", lambda: [Path("00_a"), Path("01_b")])
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    course = [Path("00_a"), Path("01_b"), Path("18_c"), Path("A1_d")]
    monkeypatch.setattr(generate, "select", lambda: course)
    (tmp_path / "results").mkdir()
    lessons = {"00": {"problems": []}, "01": {"problems": ["red"]}}
    facts = {"python": sys.executable, "lessons": lessons, "tests": "9 passed"}
    elsewhere.record("oldest", facts)
    marks = "<!-- places:begin -->\n<!-- places:end -->"
    table = generate.between_marks(marks, "places", places=generate.places())
    row = table.splitlines()[3]
    assert row.startswith(
        f"| `oldest` | {platform.python_version()} | {metadata.version('torch')} |"
    )
    assert "| 1 of 2 | 18, A1 | 9 passed |" in row and row.endswith("| `abc123` |")
    monkeypatch.setattr(elsewhere, "clean_commit", lambda: "def456")
    facts["lessons"] = {"01": {"problems": []}}
    elsewhere.record("oldest", facts)
    [row] = generate.places()
    assert (row["green"], list(row["commits"])) == (2, ["abc123", "def456"])
    versions = elsewhere.versions_of(sys.executable)
    other = {**versions, "packages": "with another release of one of them"}
    monkeypatch.setattr(elsewhere, "versions_of", lambda python: other)
    elsewhere.record("oldest", facts)
    assert "oldest has never run 00" in capsys.readouterr().out


def test_a_lesson_alone_makes_no_row(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(elsewhere, "clean_commit", lambda: "abc123")
    monkeypatch.setattr(elsewhere, "RECORD", tmp_path / "places.json")
    monkeypatch.setattr(elsewhere, "select", lambda: [Path("00_a"), Path("01_b")])
    facts = {"python": sys.executable, "lessons": {"01": {"problems": []}}}
    elsewhere.record("oldest", facts)
    assert not (tmp_path / "places.json").exists()
    assert "oldest has never run 00" in capsys.readouterr().out


def test_a_failed_unit_test_is_a_problem_of_its_place(monkeypatch):
    lessons = {"00": {"problems": []}}
    facts = {"lessons": lessons, "tests": "1 failed, 9 passed", "red": True}
    monkeypatch.setattr(elsewhere, "run_checkout", lambda place, only: facts)
    monkeypatch.setattr(elsewhere, "record", lambda place, facts: None)
    problems = elsewhere.run(["oldest"], "00", False)
    assert [text for _, text in problems] == ["oldest: 1 failed, 9 passed"]
    facts["red"] = False
    assert elsewhere.run(["oldest"], "00", False) == []
