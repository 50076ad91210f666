"""What a class hands in is read with care, judged in a cage, and told in a table."""

from __future__ import annotations

import csv
import json
import os
import socket
from pathlib import Path

import pytest

from course import __main__ as command
from course import grade
from course.notebooks import calls, cells, read, select, source, tags, write
from course.publish import student
from stages.sandbox import Sandbox
from utils.errors import CourseError

THERE, REASON = Sandbox.available()
caged = pytest.mark.skipif(not THERE, reason=f"no cage here: {REASON}")
LESSON = """
from utils.lesson import Lesson
lesson = Lesson("00", "smoke", 42)
"""
CHECK = """
@lesson.exercise("00.1")
def check():
    assert double(4) == 8, "twice four is eight"
"""
STARTER = 'def double(x):\n    raise NotImplementedError("your turn")'
RIGHT = "def double(x):\n    return 2 * x"
TOLD = "def double(x):\n    assert False, repr({})"


# reading ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    folder = tmp_path_factory.mktemp("class") / "copies"
    student(folder, select("05"))
    return folder


@pytest.fixture
def handed(tmp_path, copies):
    """A folder with one submission, untouched."""
    folder = tmp_path / "handed"
    (folder / "kim").mkdir(parents=True)
    text = (copies / "05_tokenizers_up_close.ipynb").read_bytes()
    (folder / "kim" / "05_tokenizers_up_close.ipynb").write_bytes(text)
    return folder


def test_answers_are_what_stands_between_task_and_check(handed):
    path = next(handed.rglob("*.ipynb"))
    notebook = read(path)
    starters = [
        source(cell) for cell in cells(notebook, "code") if "exercise" in tags(cell)
    ]
    place = next(
        place
        for place, cell in enumerate(notebook["cells"])
        if "exercise" in tags(cell)
    )
    helper = {**notebook["cells"][place], "id": "mine", "metadata": {}}
    helper["source"] = "def helper():\n    return 1"
    notebook["cells"].insert(place + 1, helper)
    write(path, notebook)
    (one,), unread = grade.collect(handed, None)
    assert unread == [] and one.who == "kim"
    assert list(one.answers) == ["05.1", "05.2", "05.3a", "05.4"]
    first, *rest = one.answers.values()
    assert first == f"{starters[0]}\n\n{helper['source']}"
    assert rest == starters[1:]


@pytest.mark.parametrize(
    "name, who",
    [
        ("05_tokenizers_up_close.ipynb", "."),
        ("kim-05_tokenizers_up_close.ipynb", "kim"),
        ("group 2/lee/05_tokenizers_up_close (1).ipynb", "group 2/lee/(1)"),
    ],
)
def test_who_handed_in_is_told_by_the_path(name, who, tmp_path):
    lesson = grade.lesson_of(tmp_path / name, select())
    assert grade.name_of(tmp_path / name, tmp_path, lesson) == who


@pytest.mark.parametrize(
    "name, text, hint",
    [
        ("05_tokenizers_up_close.ipynb", "{", "not whole"),
        ("05_tokenizers_up_close.ipynb", "[]", "not whole"),
        ("05_tokenizers_up_close.ipynb", '{"cells": [3]}', "not whole"),
        ("05_tokenizers_up_close.ipynb", '{"cells": []}', "no exercise is in it"),
        ("05_tokenizers_up_close.ipynb", "[" * 100_000, "not whole"),
        ("homework.ipynb", '{"cells": []}', "its name is no lesson's"),
    ],
)
def test_a_file_that_cannot_be_read_is_a_row_and_stops_nobody(
    handed, name, text, hint
):
    (handed / "lee").mkdir()
    (handed / "lee" / name).write_text(text, encoding="utf-8")
    found, unread = grade.collect(handed, None)
    assert [one.who for one in found] == ["kim"]
    (line,) = unread
    assert line["who"] == f"lee/{name}" and line["verdict"] == "not read"
    assert hint in line["hint"]


def test_a_huge_file_is_not_read(handed, monkeypatch):
    monkeypatch.setattr(grade, "MOST_BYTES", 10)
    found, (line,) = grade.collect(handed, None)
    assert found == [] and "20 MB" in line["hint"]


def test_what_is_no_plain_file_is_not_opened(handed):
    path = next(handed.rglob("*.ipynb"))
    try:
        (handed / "lee-05_tokenizers_up_close.ipynb").symlink_to(path)
    except OSError:
        pytest.skip("no links here")
    found, (line,) = grade.collect(handed, None)
    assert len(found) == 1 and "no plain file" in line["hint"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with a name here")
def test_a_pipe_does_not_hold_up_the_class(handed):
    os.mkfifo(handed / "lee-05_tokenizers_up_close.ipynb")
    found, (line,) = grade.collect(handed, None)
    assert len(found) == 1 and "no plain file" in line["hint"]


def test_a_name_paints_no_terminal():
    assert grade.row("\x1b[2Jkim", "05.1", "pass", "")["who"] == "?[2Jkim"


def test_a_folder_with_nothing_in_it_is_an_error(tmp_path, capsys):
    assert command.main(["grade", str(tmp_path)]) == 2
    assert "no notebook of a lesson" in capsys.readouterr().err
    assert command.main(["grade", str(tmp_path / "none")]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.parse(["grade"])


def test_solutions_and_the_readers_own_checks_are_not_what_is_run():
    parts = grade.lesson_cells(select("05")[0])
    numbers = [number for part in parts for number in part["exercises"]]
    assert numbers == sorted(calls(select("05")[0], "exercise"))
    assert parts[-1]["exercises"] == numbers[-1:]
    assert not any("lesson.solution(" in part["source"] for part in parts)
    places = [part["source"] for part in parts]
    assert places.index(grade.PARAMETERS) < places.index(parts[-1]["source"])


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_where_there_is_no_cage_nothing_runs(handed, monkeypatch, capsys, system):
    monkeypatch.setattr(grade.sys, "platform", system)
    monkeypatch.setattr(grade, "judge", None)
    assert command.main(["grade", str(handed)]) == 2
    error = capsys.readouterr().err
    assert "only in a cage" in error and system in error and "WSL" in error


def test_a_machine_that_gives_no_namespaces_says_so():
    with pytest.raises(CourseError, match="only in a cage.*refused by policy"):
        facts = {"refused": "refused by policy"}
        grade.read_line(facts, Path("05_x.ipynb"))


def test_the_table_is_also_a_spreadsheet_without_formulas(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_BUILD", str(tmp_path))
    path = grade.write_csv([grade.row("=cmd()", "05.1", "fail", "-1, or more")])
    with path.open(encoding="utf-8", newline="") as file:
        lines = list(csv.reader(file))
    assert lines == [grade.COLUMNS, ["'=cmd()", "05.1", "fail", "'-1, or more"]]


# judging ----------------------------------------------------------------------------------------

HOSTILE = {
    "starter": (STARTER, "not attempted", ""),
    "right": (RIGHT, "pass", ""),
    "wrong": ("double = abs", "fail", "twice four is eight"),
    "does not parse": ("def double(:", "error", "SyntaxError"),
    "raises at once": ("1 / 0", "error", "ZeroDivisionError"),
    "raises in the check": ("double = int.missing", "error", "AttributeError"),
    "ends the process": ("import os\nos._exit(0)", "crashed", "without a verdict"),
    "never ends": ("while True:\n    pass", "timeout", "not done in"),
    "opens a connection": (
        "import socket\nsocket.socket()",
        "error",
        "PermissionError",
    ),
    "reads the machine": ("open('/etc/passwd')", "error", "FileNotFoundError"),
    "reads the checkout": (
        f"open({os.fspath(Path(__file__).resolve())!r})",
        "error",
        "FileNotFoundError",
    ),
    "reads what others wrote": (
        f"import glob\n{TOLD.format('glob.glob(OTHERS)')}",
        "fail",
        "[]",
    ),
    "writes beside itself": (
        "import utils\nopen(utils.__path__[0] + '/x', 'w')",
        "error",
        "Read-only",
    ),
    "writes into its scratch": (
        "import tempfile\nwith tempfile.TemporaryFile() as file:\n"
        f"    file.write(b'x')\n{RIGHT}",
        "pass",
        "",
    ),
    "loads a package later": (
        f"import email.mime.audio, wave, pygments.formatters\n{RIGHT}",
        "pass",
        "",
    ),
    "starts processes without end": (
        "import os\nwhile True:\n    os.fork()",
        "crashed",
        "without a verdict",
    ),
    "asks the environment": (
        f"import os\n{TOLD.format('os.environ.get(SECRET)')}",
        "fail",
        "None",
    ),
    "paints the terminal": (
        "def double(x):\n    assert False, '\\x1b[2J' + 999 * 'x'",
        "fail",
        "?[2J",
    ),
    "takes all memory": ("x = bytearray(1 << 40)", "error", "MemoryError"),
    "not there": (None, "missing", "no such exercise"),
}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    """The verdicts on all of them, by one judge."""
    folder = tmp_path_factory.mktemp("judging")
    patch = pytest.MonkeyPatch()
    patch.setenv("COURSE_BUILD", str(folder))
    patch.setenv("COURSE_TEST_SECRET", "a secret of the teacher")
    patch.setattr(grade, "SECONDS", 6.0)
    lesson = folder / "00_small.ipynb"
    code = [(LESSON, ["lesson"]), (STARTER, ["exercise"]), (CHECK, ["check"])]
    parts = []
    for text, kinds in code:
        cell = {"cell_type": "code", "source": text, "outputs": []}
        parts.append({**cell, "metadata": {"tags": kinds}})
    write(lesson, {"cells": parts})
    names = f"OTHERS = {str(folder / 'grading' / 'answers' / '*')!r}\n"
    names += "SECRET = 'COURSE_TEST_SECRET'\n"
    submissions = []
    for who, (answer, _, _) in HOSTILE.items():
        answers = {} if answer is None else {"00.1": names + answer}
        submissions.append(grade.Submission(who, folder, lesson, answers))
    rows = grade.judge(lesson, submissions)
    patch.undo()
    assert not (folder / "grading" / "answers").exists()
    return {line["who"]: line for line in rows}


@caged
@pytest.mark.parametrize("who", HOSTILE)
def test_an_answer_gets_what_it_has_earned(verdicts, who):
    _, verdict, hint = HOSTILE[who]
    line = verdicts[who]
    assert (line["exercise"], line["verdict"]) == ("00.1", verdict), line
    assert hint in line["hint"] and len(line["hint"]) <= 200
    assert line["hint"].isprintable()


@caged
def test_a_lesson_that_stops_by_itself_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_BUILD", str(tmp_path))
    lesson = tmp_path / "00_small.ipynb"
    cell = {"cell_type": "code", "outputs": [], "metadata": {}}
    broken = {**cell, "source": "1 / 0"}
    write(lesson, {"cells": [broken, {**cell, "source": CHECK}]})
    one = grade.Submission("kim", lesson, lesson, {"00.1": RIGHT})
    with pytest.raises(CourseError, match="the lesson itself stopped"):
        grade.judge(lesson, [one])


@caged
def test_a_process_that_the_kernel_refuses_is_no_verdict_on_the_answer(monkeypatch):
    from stages import grading

    def refuse():
        raise BlockingIOError(11, "Resource temporarily unavailable")

    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr(os, "fork", refuse)
    monkeypatch.setattr(os, "_exit", leave)
    mine, theirs = socket.socketpair()
    with pytest.raises(SystemExit):
        grading.be_caged(None, {"exercises": ["00.1"]}, 0, theirs, None)
    with mine:
        verdict, hint = grading.read_report(mine.recv(1000))["00.1"]
    assert verdict == "no cage"
    assert "Resource temporarily unavailable" in hint


def test_what_was_made_from_another_artifact_is_made_again(tmp_path):
    """A class hands in lesson 09 again, whose model differs; 17 and 19 took the one before."""
    made_from = {
        "tokens": {},
        "pretrained": {"tokens": "t"},
        "adapter": {"pretrained": "old"},
    }
    made_from |= {"a server": {"adapter": "a"}, "corpus": {}}
    for name, inputs in made_from.items():
        facts = {"hash": name[0], "inputs": inputs}
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(json.dumps(facts))
    grade.forget_stale(tmp_path)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == [
        "corpus",
        "pretrained",
        "tokens",
    ]


LEARN = 'count = len(learn_ranks(["the theme"], 258, PATTERNS["code"]))'
COUNT = """
@lesson.exercise("00.1")
def check():
    assert count == 258, "two joins"
"""


@caged
def test_an_answer_may_train_a_tokenizer_after_the_lesson_has(
    tmp_path, monkeypatch
):
    """The trainer's threads stay behind when the process is copied, and it would wait for them."""
    monkeypatch.setenv("COURSE_BUILD", str(tmp_path))
    monkeypatch.setattr(grade, "SECONDS", 20.0)
    lesson = tmp_path / "00_small.ipynb"
    imports = "from stages.tokenizer import PATTERNS, learn_ranks\n"
    cell = {"cell_type": "code", "outputs": [], "metadata": {}}
    code = [LESSON + imports + LEARN, COUNT]
    write(lesson, {"cells": [{**cell, "source": text} for text in code]})
    one = grade.Submission("kim", lesson, lesson, {"00.1": LEARN})
    (line,) = grade.judge(lesson, [one])
    assert line["verdict"] == "pass", line


def write_lesson(path, *code):
    """A lesson of these cells; one that says that it is a solution is tagged so."""
    parts = []
    for text in code:
        kinds = ["solution"] if "lesson.solution" in text else []
        cell = {"cell_type": "code", "source": text, "outputs": []}
        parts.append({**cell, "metadata": {"tags": kinds}})
    write(path, {"cells": parts})
    return path


WRITES = """
import sys
import tempfile
place = tempfile.mkdtemp()
sys.path.append(tempfile.gettempdir())
with open(place + "/four", "w") as file:
    file.write("4")
import pyarrow
from pyarrow import parquet
table = pyarrow.table({"row": [4, 3]})
parquet.write_table(table, place + "/rows")
parquet.read_table(place + "/rows")
"""
NEEDS = {
    "what the lesson has written": "assert open(place + '/four').read() == '4'",
    "to write beside it": "open(place + '/five', 'x').close()",
    "a thread": "import threading; threading.Thread(target=print).start()",
    "a process": "import os; os.fork() or os._exit(0); os.wait()",
    "shared memory": "import multiprocessing; multiprocessing.Lock()",
    "the pool of Arrow": "table.sort_by('row'); parquet.read_table(place + '/rows')",
}


@caged
@pytest.mark.parametrize("need", NEEDS)
def test_a_check_has_what_it_needs(tmp_path, monkeypatch, need):
    monkeypatch.setenv("COURSE_BUILD", str(tmp_path))
    monkeypatch.setattr(grade, "SECONDS", 20.0)
    check = CHECK.replace("    assert", f"    {NEEDS[need]}\n    assert")
    lesson = write_lesson(tmp_path / "00_small.ipynb", LESSON + WRITES, check)
    # The second finds nothing of the first.
    class_of_two = [
        grade.Submission(who, lesson, lesson, {"00.1": RIGHT}) for who in "ab"
    ]
    for line in grade.judge(lesson, class_of_two):
        assert line["verdict"] == "pass", line
    assert not (tmp_path / "grading" / "scratch").exists()


@caged
def test_a_solution_may_use_what_its_check_has_defined(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_BUILD", str(tmp_path))
    solution = "factor = TWO\ndef double(x):\n    return factor * x\nlesson.solution('00.1')\n"
    parts = (LESSON, STARTER, f"TWO = 2\n{CHECK}", solution)
    lesson = write_lesson(tmp_path / "00_small.ipynb", *parts)
    one = grade.Submission("kim", lesson, lesson, {"00.1": RIGHT})
    (line,) = grade.judge(lesson, [one])
    assert line["verdict"] == "pass", line


@caged
def test_what_a_lesson_runs_apart_fails_in_the_lesson(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_BUILD", str(tmp_path))
    lesson = tmp_path / "00_small.ipynb"
    imports = "from stages.tokenizer import PATTERNS, learn_ranks\n"
    few = LEARN.replace("258", "8")
    cell = {"cell_type": "code", "outputs": [], "metadata": {}}
    code = [LESSON + imports + few, COUNT]
    write(lesson, {"cells": [{**cell, "source": text} for text in code]})
    one = grade.Submission("kim", lesson, lesson, {"00.1": LEARN})
    with pytest.raises(CourseError, match="8 tokens cannot spell all bytes"):
        grade.judge(lesson, [one])


def test_where_the_solution_fails_no_verdict_counts():
    rows = [
        grade.row(grade.CONTROL, "05.1", "pass", ""),
        grade.row("kim", "05.1", "fail", "no"),
        grade.row(grade.CONTROL, "05.2", "error", "PermissionError"),
        grade.row("kim", "05.2", "error", "PermissionError"),
        grade.row(grade.CONTROL, "05.3", "missing", ""),
        grade.row("kim", "05.3", "pass", ""),
    ]
    told = grade.by_hand(rows, {"05.1", "05.2"})
    assert [line["who"] for line in told] == ["kim"] * 3
    assert [line["verdict"] for line in told] == ["fail", "by hand", "pass"]
    hint = "the solution itself gets error in the cage: PermissionError"
    assert told[1]["hint"] == hint


def test_the_control_is_the_courses_own_solutions():
    control = grade.solution_of(select("05")[0])
    assert list(control.answers) == ["05.1", "05.2", "05.3a", "05.4"]
    assert not any("lesson.solution" in text for text in control.answers.values())


def test_whoever_interrupts_keeps_the_lessons_that_are_judged(
    handed, monkeypatch, tmp_path
):
    monkeypatch.setenv("COURSE_BUILD", str(tmp_path / "build"))
    monkeypatch.setattr(grade.sys, "platform", "linux")
    path = next(handed.rglob("*.ipynb"))
    (handed / "kim-06_special_tokens_and_templates.ipynb").write_bytes(
        path.read_bytes()
    )

    def judge(lesson, submissions):
        if lesson.stem.startswith("06"):
            raise KeyboardInterrupt
        return [grade.row("kim", "05.1", "pass", "")]

    monkeypatch.setattr(grade, "judge", judge)
    with pytest.raises(KeyboardInterrupt):
        grade.run(handed, None)
    kept = (tmp_path / "build/grading/verdicts.csv").read_text("utf-8")
    assert "kim,05.1,pass" in kept


@caged
@pytest.mark.slow
def test_a_class_is_graded(handed, capsys, monkeypatch, tmp_path):
    """Lesson 05 as it is: a copy with its solutions passes, an untouched one attempts nothing."""
    monkeypatch.setenv("COURSE_BUILD", str(tmp_path / "build"))
    path = next(handed.rglob("*.ipynb"))
    solved = read(path)
    lesson = cells(read(select("05")[0]), "code")
    solutions = iter([cell for cell in lesson if "solution" in tags(cell)])
    for cell in cells(solved, "code"):
        if "exercise" in tags(cell):
            text = source(next(solutions))
            cell["source"] = text.replace("lesson.solution(", "str(")
    (handed / "lee").mkdir()
    write(handed / "lee" / path.name, solved)
    assert command.main(["grade", str(handed)]) == 0
    table = capsys.readouterr().out
    lines = [line.split() for line in table.splitlines()]
    for number in calls(select("05")[0], "exercise"):
        assert ["lee", number, "pass"] in lines
        assert ["kim", number, "not", "attempted"] in lines
