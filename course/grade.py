"""Judges what a class has handed in: `python -m course grade FOLDER`.

A submission is a notebook that came from `course student`, wherever below the folder it lies. Of it
only the answers are read; they are tried in the course's own lesson, against the course's own checks,
in the cage of `stages/grading.py`. That runs as a process of its own, since this package imports no stage.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from course import setup
from course.notebooks import called, cells, read, select, source, tags
from utils import artifacts
from utils.errors import CourseError, build_folder, short_path

Facts = dict[str, Any]
COLUMNS = ["who", "exercise", "verdict", "hint"]
MOST_BYTES = 20_000_000
# For one answer and its check; the longest check of the course takes a few seconds.
SECONDS = 120.0
# Nobody who hands in has this name.
CONTROL = ""
SOLUTION = re.compile(r"(?m)^lesson\.solution\(.*\n?")
BROKEN = (LookupError, TypeError, AttributeError, ValueError)
PARAMETERS = 'PROFILE = "smoke"'
# What a process that runs other people's programs may know of its surroundings.
PASSED_ON = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "COURSE_HOME")
NOT_HERE = (
    "answers of others run only in a cage, which is made of Linux's namespaces"
)


@dataclass
class Submission:
    """One notebook that was handed in, with its answers by the number of the exercise."""

    who: str
    path: Path
    lesson: Path
    answers: dict[str, str] = field(default_factory=dict)


# what was handed in -----------------------------------------------------------------------------


def lesson_of(path: Path, lessons: list[Path]) -> Path | None:
    """The lesson whose name is in the name of a file, such as `kim-05_tokenizers_up_close.ipynb`."""
    for lesson in lessons:
        if lesson.stem in path.stem:
            return lesson
    return None


def name_of(path: Path, folder: Path, lesson: Path) -> str:
    """Who handed in: the path below the folder, without the name of the lesson."""
    below = path.relative_to(folder)
    rest = path.stem.replace(lesson.stem, "").strip(" -_.")
    parts = [*below.parent.parts, rest]
    return "/".join(part for part in parts if part) or "."


def numbers_in(code: str) -> list[str]:
    """The exercises that a cell checks; most check one.

    >>> numbers_in('@lesson.exercise("05.1")\\ndef check(): pass')
    ['05.1']
    """
    numbers = [name for call, name in called(code) if call == "exercise"]
    return sorted(numbers)


def exercises(notebook: Facts) -> Iterator[tuple[str, str]]:
    """The first number that each check looks at, and what stands between the task and the check."""
    written: list[str] = []
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        text = source(cell)
        numbers = numbers_in(text)
        if numbers:
            yield numbers[0], "\n\n".join(written)
            written = []
        elif "exercise" in tags(cell):
            written = [text]
        elif written and "solution" not in tags(cell):
            written.append(text)


def read_submission(path: Path, folder: Path, lessons: list[Path]) -> Submission:
    """A submission with its answers; an error says what is wrong with the file."""
    lesson = lesson_of(path, lessons)
    if lesson is None:
        way = "name it as the lesson is, such as 05_tokenizers_up_close.ipynb"
        raise CourseError("its name is no lesson's", path, way)
    if path.is_symlink() or not path.is_file():
        raise CourseError("this is no plain file", path, "hand in a copy")
    if path.stat().st_size > MOST_BYTES:
        raise CourseError("more than 20 MB", path, "hand it in without outputs")
    who = name_of(path, folder, lesson)
    try:
        answers = dict(exercises(read(path)))
    except CourseError:
        raise
    except (*BROKEN, MemoryError, RecursionError):
        what = "this notebook is not whole: a cell lacks its parts"
        raise CourseError(what, path, "save or restore it") from None
    if not answers:
        what = "no exercise is in it"
        raise CourseError(what, path, "hand in the copy that has the checks")
    return Submission(who, path, lesson, answers)


def collect(folder: Path, only: str | None) -> tuple[list[Submission], list[Facts]]:
    """The submissions below a folder, and a row for each file that is none."""
    if not folder.is_dir():
        raise CourseError(
            "there is no such folder", folder, "name one that is there"
        )
    chosen = select(only)
    found = []
    unread = []
    for path in sorted(folder.rglob("*.ipynb")):
        if ".ipynb_checkpoints" in path.parts:
            continue
        try:
            one = read_submission(path, folder, select())
        except CourseError as error:
            hint, *_ = str(error).splitlines()
            who = path.relative_to(folder).as_posix()
            unread.append(row(who, "", "not read", hint))
            continue
        if one.lesson in chosen:
            found.append(one)
    if not found and not unread:
        way = "put the notebooks into it, in a folder for each student"
        raise CourseError("no notebook of a lesson is below it", folder, way)
    return found, unread


def row(who: str, exercise: str, verdict: str, hint: str) -> Facts:
    """One line of the table."""
    values = (who, exercise, verdict, hint)
    shown = [printable(value) for value in values]
    return dict(zip(COLUMNS, shown))


def printable(text: str) -> str:
    """A text of others that no terminal takes for a command.

    >>> printable("kim\\x1b[2J")
    'kim?[2J'
    """
    signs = [sign if sign.isprintable() else "?" for sign in text]
    return "".join(signs)


# the judge --------------------------------------------------------------------------------------


def lesson_cells(lesson: Path) -> list[Facts]:
    """The course's own cells, without solutions, each check with the number of its exercise."""
    parts = []
    for cell in cells(read(lesson), "code"):
        kinds = tags(cell)
        if "solution" in kinds:
            continue
        text = source(cell)
        parts.append({"source": text, "exercises": numbers_in(text)})
        if "parameters" in kinds:
            parts.append({"source": PARAMETERS, "exercises": []})
    last = max(place for place, part in enumerate(parts) if part["exercises"])
    return parts[: last + 1]


def solution_of(lesson: Path) -> Submission:
    """The course's own answers, which show whether a check can be passed in the cage at all.

    A solution stands below its check and may use what that has defined, so the check comes with it.
    """
    control = Submission(CONTROL, lesson, lesson)
    numbers = [""]
    check = ""
    for cell in cells(read(lesson), "code"):
        text = source(cell)
        if numbers_in(text):
            numbers = numbers_in(text)
            check = text
        if "solution" in tags(cell):
            solution = SOLUTION.sub("", text)
            control.answers[numbers[0]] = f"{check}\n\n{solution}"
    return control


def by_hand(rows: list[Facts], solved: set[str]) -> list[Facts]:
    """The rows without those of the control; where that has failed, no verdict counts."""
    control = {line["exercise"]: line for line in rows if line["who"] == CONTROL}
    told = []
    for line in rows:
        number = line["exercise"]
        own = control.get(number, {})
        if own and number in solved and own["verdict"] != "pass":
            hint = f"the solution itself gets {own['verdict']} in the cage: {own['hint']}"
            line = row(line["who"], number, "by hand", hint)
        if line["who"] != CONTROL:
            told.append(line)
    return told


def environment(folder: Path) -> dict[str, str]:
    """The little that the judge's process is told; computing goes on one core, without a GPU."""
    known = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    known |= {
        "COURSE_BUILD": str(folder),
        "COURSE_DEVICE": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "IPYTHONDIR": str(folder / "ipython"),
        "MPLBACKEND": "agg",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(setup.CHECKOUT),
        "RAYON_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return known


def hand_over(submissions: list[Submission], folder: Path) -> list[Facts]:
    """Write each submission's answers into a file of its own, which only its judge opens."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    handed = []
    for number, one in enumerate(submissions):
        name = f"{number}.json"
        path = folder / name
        text = json.dumps(one.answers)
        path.write_text(text, encoding="utf-8")
        facts = {"who": one.who, "file": str(path)}
        handed.append(facts)
    return handed


def forget_stale(shelf: Path) -> None:
    """Remove what was made from another artifact than today's: it is the judge's own, and made again."""
    for folder in sorted(shelf.glob("*")):
        manifest = artifacts.read_manifest(folder)
        if manifest and artifacts.staleness(manifest, shelf.joinpath):
            shutil.rmtree(folder)


def judge(lesson: Path, submissions: list[Submission]) -> list[Facts]:
    """A verdict for each exercise of each submission of one lesson."""
    folder = build_folder() / "grading"
    forget_stale(folder / "artifacts" / "smoke")
    control = solution_of(lesson)
    handed = hand_over([control, *submissions], folder / "answers")
    # What the lesson writes for a moment; its checks may read it in the cage.
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    task = {
        "lesson": lesson.stem,
        "cells": lesson_cells(lesson),
        "submissions": handed,
        "scratch": str(scratch),
        "seconds": SECONDS,
    }
    log = folder / f"{lesson.stem}.log"
    rows = []
    with log.open("w", encoding="utf-8") as file:
        child = subprocess.Popen(
            [sys.executable, "-m", "stages.grading"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            cwd=lesson.parent,
            env=environment(folder),
            encoding="utf-8",
        )
        assert child.stdin and child.stdout
        with child:
            child.stdin.write(json.dumps(task) + "\n")
            child.stdin.close()
            for line in child.stdout:
                rows.append(read_line(json.loads(line), lesson))
    shutil.rmtree(folder / "answers")
    shutil.rmtree(scratch, ignore_errors=True)
    if child.returncode:
        what = f"lesson {lesson.name[:2]} could not be judged"
        raise CourseError(what, log, "read the end of that file")
    return by_hand(rows, set(control.answers))


def read_line(facts: Facts, lesson: Path) -> Facts:
    """What the judge says: a verdict, or why there is none."""
    if "refused" in facts:
        way = "use a Linux that gives user namespaces"
        raise CourseError(f"{NOT_HERE}: {facts['refused']}", fix=way)
    if "stopped" in facts:
        raise CourseError(facts["stopped"], lesson)
    values = [facts[name] for name in COLUMNS]
    return row(*values)


# the table --------------------------------------------------------------------------------------


def table(rows: list[Facts]) -> str:
    """The verdicts in columns, a line for each exercise.

    >>> print(table([row("kim", "05.1", "pass", ""), row("lee", "05.1", "fail", "too few")]))
    who  exercise  verdict  hint
    kim  05.1      pass
    lee  05.1      fail     too few
    """
    widths = {}
    for name in COLUMNS:
        longest = [len(str(line[name])) for line in rows]
        widths[name] = max([len(name), *longest])
    lines = []
    for line in [dict(zip(COLUMNS, COLUMNS)), *rows]:
        parts = [str(line[name]).ljust(widths[name]) for name in COLUMNS]
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)


def write_csv(rows: list[Facts]) -> Path:
    """The same for a spreadsheet, in which no cell is taken for a formula."""
    folder = build_folder() / "grading"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "verdicts.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for line in rows:
            values = map(harmless, line.values())
            writer.writerow(values)
    return path


def harmless(value: str) -> str:
    """A text that a spreadsheet shows and does not compute.

    >>> harmless("=1+1"), harmless("pass")
    ("'=1+1", 'pass')
    """
    if value.startswith(("=", "+", "-", "@", "\t")):
        return f"'{value}"
    return value


def run(folder: Path, only: str | None) -> int:
    """Judge a folder, print the table, keep it as CSV."""
    submissions, rows = collect(folder, only)
    if sys.platform != "linux":
        way = "grade on Linux, in WSL, or in a Codespace"
        raise CourseError(f"{NOT_HERE}, and this is {sys.platform}", fix=way)
    lessons = {one.lesson for one in submissions}
    for lesson in sorted(lessons):
        handed = [one for one in submissions if one.lesson == lesson]
        print(f"{lesson.stem}: {len(handed)} handed in", flush=True)
        rows = in_order(rows + judge(lesson, handed))
        # Whoever interrupts the next lesson keeps this one.
        write_csv(rows)
    print(table(rows))
    print(f"as a spreadsheet: {short_path(write_csv(rows))}")
    return 0


def in_order(rows: list[Facts]) -> list[Facts]:
    """The rows by lesson, then by who handed in, then by exercise."""
    return sorted(
        rows,
        key=lambda line: (line["exercise"][:2], line["who"], line["exercise"]),
    )
