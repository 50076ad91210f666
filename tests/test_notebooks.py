"""The notebooks as files: which are lessons, what they call, where their prose points."""

import nbformat
import prose
import pytest

from conftest import PARAMETERS
from course import notebooks
from utils.errors import CourseError

LINKED = "[lesson 03](03_corpus.ipynb)"


@pytest.fixture
def here(course, monkeypatch):
    monkeypatch.setattr(notebooks, "ROOT", course.root)
    course.add("03_corpus.ipynb", PARAMETERS, 'lesson.publish("corpus")')
    course.add("05_tokens.ipynb", PARAMETERS, 'lesson.need("corpus")')
    return course


@pytest.mark.parametrize(
    "name", ["05_tokens-Copy1.ipynb", "05_Tokens.ipynb", "5_x.ipynb", "x.ipynb"]
)
def test_only_names_of_lessons_are_lessons(here, name):
    here.add(name, PARAMETERS)
    assert [path.name for path in notebooks.select()] == [
        "03_corpus.ipynb",
        "05_tokens.ipynb",
    ]


@pytest.mark.parametrize(
    "only, count", [("3", 1), ("03-05", 2), ("00-04", 1), ("3,5", 2), (" 05 ", 1)]
)
def test_selection(here, only, count):
    assert len(notebooks.select(only)) == count


def test_a_half_written_notebook_is_named_and_disturbs_nobody(here):
    half = here.root / "notebooks/04_half.ipynb"
    half.write_text('{"cells": [')
    with pytest.raises(CourseError, match="04_half"):
        notebooks.read(half)
    reader = here.root / "notebooks/05_tokens.ipynb"
    assert notebooks.inputs(reader)["corpus"].name == "03_corpus.ipynb"
    done = here.run("check")
    assert (
        done.returncode == 1
        and "✘ 04_half: this notebook is not whole" in done.stderr
    )
    assert (
        "✘ 05_tokens: no finished run" in done.stderr
        and "Traceback" not in done.all
    )


def problems(course, text):
    path = course.root / "notebooks/05_tokens.ipynb"
    notebook = nbformat.read(path, 4)
    notebook.cells.append(nbformat.v4.new_markdown_cell(text))
    nbformat.write(notebook, path)
    return [problem for _, problem in prose.problems()]


@pytest.mark.parametrize(
    "text",
    [
        f"See {LINKED}.",
        "See lessons [03](03_corpus.ipynb) and [05](05_tokens.ipynb#end).",
        "This is lesson 05, and lesson 18 will come, like lessons 19-21.",
        "```\nlesson 03\n```\n`lesson 03` and https://a.b/lesson",
        "![a picture](../README.md) and [a page](https://example.org) and [here](#top)",
        "a lesson of 03 parts",
    ],
)
def test_good_prose(here, text):
    assert problems(here, text) == []


@pytest.mark.parametrize(
    "text, problem",
    [
        ("See lesson 03.", '"lesson 03" is not a link to lesson 03'),
        ("See\nlesson\n03.", "is not a link to lesson 03"),
        ("Lessons 03 and 05", "is not a link to lesson 03"),
        ("lessons [05](05_tokens.ipynb), 03", "is not a link to lesson 03"),
        ("[lesson 03](05_tokens.ipynb)", "is not lesson 03"),
        ("[lesson 03](03_old.ipynb)", "leads nowhere"),
        ("lessons [05](03_corpus.ipynb) and more", "is not lesson 05"),
        ("lesson 77", "there is no lesson 77"),
        ("![x](images/none.svg)", "leads nowhere"),
        ("[a page](../docs/none.md#part)", "leads nowhere"),
    ],
)
def test_bad_prose(here, text, problem):
    found = problems(here, text)
    assert len(found) == 1 and problem in found[0], found


def test_pages_beside_the_notebooks_are_read_too(here):
    (here.root / "docs").mkdir()
    (here.root / "docs/a.md").write_text("see lesson 05")
    (here.root / "README.md").write_text(
        "[lesson 05](notebooks/05_tokens.ipynb) and lesson 03"
    )
    texts = [(path.name, text) for path, text in prose.problems()]
    assert [name for name, _ in texts] == ["README.md", "a.md"]


@pytest.mark.parametrize(
    "text, words",
    [
        ("A GPU is dear and it runs\nfor ever.", ["dear", "for ever"]),
        (
            "In this manner it learned rows by heart",
            ["learned rows by heart", "manner"],
        ),
        (
            "A row stands in the exam, the others of one sign.",
            ["exam", "of one sign", "row stands in the"],
        ),
        (
            "Runs of signs that follow, one sign or two",
            ["of signs that ", "one sign or "],
        ),
        ("The sign that it overfits; a sign and an exponent, of the sign or", []),
        ("The learning rate of `dear` and a manners-book are fine", []),
    ],
)
def test_house_words_are_found(here, text, words):
    problems(here, text)
    found = [problem.split('"')[1] for _, problem in prose.house_words()]
    assert sorted(found) == sorted(words)


@pytest.mark.parametrize(
    "text, lengths",
    [
        ("One two. Three four five: six!", [2, 3, 1]),
        ("# A heading\n\nA [link of four words](a.md) and `code or more`.", [7]),
        ("| a | table |\n\n![a picture](b.svg)\n\n```\ncode\n```\nIt *ends*.", [2]),
    ],
)
def test_sentences_are_measured(here, text, lengths):
    problems(here, text)
    path = here.root / "notebooks/05_tokens.ipynb"
    assert prose.sentence_lengths(path) == lengths


@pytest.mark.release
@pytest.mark.parametrize(
    "path", prose.notebooks.select(), ids=lambda path: path.stem
)
def test_sentences_are_neither_choppy_nor_endless(path):
    lengths = prose.sentence_lengths(path)
    assert 14 <= sum(lengths) / len(lengths) <= 18
    assert sum(length <= 6 for length in lengths) / len(lengths) <= 0.15


@pytest.mark.release
def test_the_lessons_speak_the_fields_words():
    assert [f"{path.name}: {text}" for path, text in prose.house_words()] == []


@pytest.mark.release
def test_the_prose_of_the_course_points_where_it_says():
    assert [f"{path.name}: {text}" for path, text in prose.problems()] == []


def test_no_two_lessons_have_one_number():
    numbers = [path.name[:2] for path in notebooks.select()]
    assert len(set(numbers)) == len(numbers)


def test_every_lesson_explains_its_profile_in_the_same_words():
    texts = {
        notebooks.source(cell).splitlines()[0]
        for path in notebooks.select()
        for cell in notebooks.cells(notebooks.read(path), "code")
        if "parameters" in notebooks.tags(cell)
    }
    assert len({" ".join(text.split()) for text in texts}) == 1
