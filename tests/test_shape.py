"""Every lesson has the shape of a lesson, and the checker finds each way of not having it."""

import copy

import nbformat
import pytest
import shape

from course.notebooks import select

PROSE = "Some words that say what is to be seen and why it matters to anybody who reads on. "


def cell(source, *tags, outputs=(), kind="code", **metadata):
    make = (
        nbformat.v4.new_code_cell
        if kind == "code"
        else nbformat.v4.new_markdown_cell
    )
    made = make(source, metadata={"tags": list(tags), **metadata})
    if kind == "code":
        made.outputs = list(outputs)
    return made


def stream(text, name="stdout"):
    return nbformat.v4.new_output("stream", text=text, name=name)


def good():
    """A lesson as it should be, in few cells."""

    def text(source, *tags):
        return cell(source, *tags, kind="markdown")

    cells = [
        text("# 05 · A lesson", "header"),
        cell("pass", "bootstrap", jupyter={"source_hidden": True}),
        cell('PROFILE = "auto"\nSEED = 42', "parameters"),
        cell('lesson = Lesson("05", PROFILE, SEED)', outputs=[stream("lesson 07")]),
        text(
            "## 1. A section\n\n![a curve that falls](images/x.svg)\n" + PROSE * 10
        ),
        cell('print("seen")', outputs=[stream("seen")]),
    ]
    for k in (1, 2, 3):
        cells += [
            text(f"### Exercise 05.{k}: do it"),
            cell("answer = ...", "exercise"),
            cell(
                "@lesson.exercise('05.1')\ndef check():\n    assert answer", "check"
            ),
            cell(
                "answer = 1\nlesson.solution('05.1')",
                "solution",
                jupyter={"source_hidden": True},
            ),
        ]
    cells.append(text("the end", "footer"))
    for count, one in enumerate((c for c in cells if c.cell_type == "code"), 1):
        one.execution_count = count
    about = {
        "title": "A lesson",
        "summary": "It does.",
        "needs": "nothing",
        "goals": ["a", "b", "c"],
        "hours": 2,
    }
    return nbformat.v4.new_notebook(cells=cells, metadata={"course": about})


def change(position, **values):
    return lambda n: n.cells[position].update(values)


def retag(position, *new):
    return lambda n: n.cells[position].metadata.update(tags=list(new))


def plot(n):
    n.cells[5].outputs = [
        nbformat.v4.new_output("display_data", {"image/png": "aGk="})
    ]


def error(n):
    n.cells[5].outputs = [
        nbformat.v4.new_output("error", ename="E", evalue="", traceback=[])
    ]


def picture(n):
    made = {"image/png": "aGk="}
    facts = {"image/png": {"alt": "which JupyterLab does not read"}}
    n.cells[5].outputs = [
        nbformat.v4.new_output("display_data", made, metadata=facts)
    ]


BAD = {
    "a heavy notebook": (change(5, source="#" * 400_000), "over 400,000"),
    "a picture by itself": (picture, "a plot without alt text"),
    "no header": (retag(0), "not tagged `header`"),
    "no bootstrap": (retag(1), "not tagged `bootstrap`"),
    "no footer": (retag(-1), "not tagged `footer`"),
    "no parameters": (retag(2), "cell tagged `parameters`"),
    "no seed": (change(2, source="PROFILE = 1"), "cell tagged `parameters`"),
    "no lesson": (change(3, source="1"), "no `lesson = Lesson(…)`"),
    "no title": (lambda n: n.metadata.course.pop("title"), "wants title"),
    "no hours": (lambda n: n.metadata.course.pop("hours"), "wants hours"),
    "open set-up": (lambda n: n.cells[1].metadata.pop("jupyter"), "is not folded"),
    "one goal": (
        lambda n: n.metadata.course.update(goals=["a"]),
        "three to five goals",
    ),
    "long cells": (
        lambda n: [
            c.update(source="x = 1\n" * 9) for c in n.cells if c.cell_type == "code"
        ],
        "in the median",
    ),
    "a lost section": (
        change(4, source="## 2. A section\n\n" + PROSE * 10),
        "sections are numbered [2]",
    ),
    "long line": (change(5, source="x = '" + "a" * 90 + "'"), "columns"),
    "no prose": (change(4, source="## 1."), "words of prose"),
    "too much prose": (change(4, source=PROSE * 60), "words of prose"),
    "image without alt": (
        change(4, source="![](images/x.svg)" + PROSE * 10),
        "without alt text",
    ),
    "tag without alt": (
        change(4, source='<img src="x.svg">' + PROSE * 10),
        "without alt text",
    ),
    "remote image": (
        change(4, source="![x](https://a.b/c.png)" + PROSE * 10),
        "a remote image",
    ),
    "plot without alt": (plot, "a plot without alt text"),
    "not executed": (change(5, execution_count=None), "1..n"),
    "out of order": (change(5, execution_count=99), "1..n"),
    "no output": (change(5, outputs=[]), "no output"),
    "error": (error, "an error in"),
    "stderr": (change(5, outputs=[stream("hm", "stderr")]), "on stderr"),
    "warning": (change(5, outputs=[stream("FutureWarning: soon")]), "a warning"),
    "token": (change(5, outputs=[stream("hf_" + "aB3" * 9)]), "a hub token"),
    "path": (
        change(5, outputs=[stream("saved in /home/me/x")]),
        "an absolute path",
    ),
    "path in code": (
        change(5, source='print("/home/me/x")'),
        "an absolute path in",
    ),
    "from the tests": (change(5, source="from tests import shape"), "from tests"),
    "a benchmark": (change(5, source="import benchmarks.race"), "from benchmarks"),
    "does not parse": (change(5, source="print("), "does not parse"),
    "input": (change(5, source="x = input()"), "waits for input"),
    "remote code": (
        change(5, source="load(trust_remote_code=True)"),
        "trust_remote_code",
    ),
    "two exercises": (
        lambda n: n.cells.__delitem__(slice(6, 10)),
        "fewer than three",
    ),
    "no check": (lambda n: n.cells.__delitem__(8), "starter, check, solution"),
    "no task": (change(6, source="### Exercise 05.9"), "no task headed"),
    "open solution": (
        lambda n: n.cells[9].metadata.pop("jupyter"),
        "is not folded",
    ),
    "unchecked solution": (change(9, source="answer = 1"), "not checked"),
}


def test_a_good_notebook_has_no_problems():
    assert shape.problems(good()) == []


@pytest.mark.parametrize("name", BAD)
def test_each_bad_notebook_is_found(name):
    notebook = copy.deepcopy(good())
    BAD[name][0](notebook)
    found = shape.problems(notebook)
    assert any(BAD[name][1] in problem for problem in found), found


@pytest.mark.release
@pytest.mark.parametrize("path", select(), ids=lambda p: p.stem)
def test_every_lesson_has_the_shape_of_one(path):
    assert shape.problems(nbformat.read(path, as_version=4)) == []
