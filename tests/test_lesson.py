"""`Lesson`: artifacts, figures, exercises; and each thing that can be wrong with them."""

import ast
import inspect
import json
import re
import sys

import pytest

from course.notebooks import calls, code_cells, select
from utils import lesson as module
from utils.errors import ROOT, CourseError
from utils.lesson import PUBLISHED_BY, RECORD_TYPE, STARTS_PROCESSES, Lesson


@pytest.fixture
def shown(monkeypatch):
    records = []
    monkeypatch.setattr(module, "display", lambda data, raw: records.append(data))
    return records


@pytest.fixture
def lesson(tmp_path, monkeypatch, shown):
    monkeypatch.setenv("COURSE_BUILD", str(tmp_path))
    monkeypatch.setenv("COURSE_RUN", "1")
    return Lesson("07", "smoke", 1)


def publish(lesson, name="thing", text="a", **settings):
    with lesson.publish(name, **settings) as folder:
        (folder / "a.txt").write_text(text)


def test_what_is_published_can_be_needed(lesson):
    publish(lesson, size=3)
    assert (lesson.need("thing") / "a.txt").read_text() == "a"


def test_a_missing_artifact_names_the_command(lesson):
    with pytest.raises(
        CourseError, match="is not there(.|\n)*make run ONLY=.* PROFILE=smoke"
    ):
        lesson.need("thing")


def test_a_flipped_byte_is_refused(lesson):
    publish(lesson)
    (lesson.folder("thing") / "a.txt").write_text("b")
    with pytest.raises(CourseError, match="a.txt has changed"):
        lesson.need("thing")


def test_another_seed_is_refused(lesson):
    publish(lesson)
    with pytest.raises(CourseError, match="was made with seed=1, not 2"):
        Lesson("08", "smoke", 2).need("thing")


def test_a_changed_input_makes_an_artifact_stale(lesson):
    publish(lesson, "corpus")
    later = Lesson("08", "smoke", 1)
    later.need("corpus")
    publish(later, "tokenizer")
    later.need("tokenizer")
    publish(lesson, "corpus", text="other")
    with pytest.raises(CourseError, match="was made from another 'corpus'"):
        Lesson("09", "smoke", 1).need("tokenizer")


def test_two_generations_of_staleness_are_seen(lesson):
    publish(lesson, "corpus")
    second = Lesson("08", "smoke", 1)
    second.need("corpus")
    publish(second, "tokens")
    third = Lesson("09", "smoke", 1)
    third.need("tokens")
    publish(third, "pretrained")
    publish(lesson, "corpus", text="other")
    with pytest.raises(
        CourseError,
        match="was made from 'tokens', which was made from another 'corpus'",
    ):
        Lesson("20", "smoke", 1).need("pretrained")


def test_a_missing_artifact_is_made_by_running_its_lesson(
    lesson, monkeypatch, capsys
):
    program = (
        "import os, sys; sys.path.insert(0, os.getcwd())\n"
        "from utils.lesson import Lesson\n"
        "print(sys.argv[1:], 'GPUs', os.environ['CUDA_VISIBLE_DEVICES'])\n"
        "with Lesson('03', 'smoke', 1).publish('corpus') as folder:\n"
        "    (folder / 'a.txt').write_text('made')\n"
    )
    real = module.subprocess.Popen

    def run_instead(command, **options):
        assert command[:4] == [sys.executable, "-m", "course", "run"]
        return real([sys.executable, "-c", program, *command[4:]], **options)

    monkeypatch.delenv("COURSE_RUN", raising=False)
    # As if this lesson had hidden a GPU.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(module.machine, "BEFORE", {"CUDA_VISIBLE_DEVICES": "0,1"})
    monkeypatch.setattr(module.subprocess, "Popen", run_instead)
    assert (lesson.need("corpus") / "a.txt").read_text() == "made"
    text = capsys.readouterr().out
    assert "running lesson 03 at profile smoke" in text
    assert "['--only', '03', '--profile', 'smoke', '--seed', '1'] GPUs 0,1" in text


@pytest.mark.parametrize("inside_a_run, make", [(True, True), (False, False)])
def test_nothing_is_made_when_told_not_to_or_inside_a_run(
    lesson, monkeypatch, inside_a_run, make
):
    monkeypatch.delenv("COURSE_RUN", raising=False)
    if inside_a_run:
        monkeypatch.setenv("COURSE_RUN", "1")
    monkeypatch.setattr(
        module.subprocess, "Popen", lambda *_, **__: pytest.fail("a lesson was run")
    )
    with pytest.raises(CourseError, match="is not there"):
        lesson.need("corpus", make=make)


def test_the_lessons_publish_what_the_table_says():
    makers = {}
    for path in select():
        for name in calls(path, "publish"):
            makers[name] = path.name[:2]
    assert makers == PUBLISHED_BY


def test_the_lessons_that_start_processes_are_those_of_the_table():
    starters = set()
    for path in select():
        code = "\n".join(code_cells(path))
        if re.search(r"\b(launch|launch_in_notebook|train_apart)\(", code):
            starters.add(path.name[:2])
    assert starters == STARTS_PROCESSES


def test_a_misspelt_name_among_wrong_answers_says_so(lesson, shown):
    ask(lesson, CHECK.format(2), lambda x: 2 * x)
    with pytest.raises(CourseError, match="has no 'anwser' to replace"):
        lesson.refuse("07.1", anwser=[None])


def test_an_unknown_profile_is_a_course_error():
    with pytest.raises(CourseError, match="unknown profile 'smok'"):
        Lesson("07", "smok")


def test_a_figure_is_shown_and_stored(lesson, shown):
    lesson.record("ratio", 3.71, "x", source=3.62)
    assert shown[-1]["text/plain"] == "ratio: 3.71 x   (the classic text: 3.62)"
    assert "<small" in shown[-1]["text/html"], "a figure interrupts nobody"
    assert shown[-1][RECORD_TYPE]["value"] == 3.71
    json.dumps(shown[-1])


def ask(lesson, check, answer):
    """Judge a check whose notebook holds one answer; the verdict."""
    space = {"lesson": lesson, "answer": answer}
    exec(check, space)
    return space


CHECK = "@lesson.exercise('07.1')\ndef check():\n    assert answer({0}) == 4, 'twice two is four'"


@pytest.mark.parametrize(
    "answer, verdict",
    [
        (lambda x: 2 * x, "pass"),
        (lambda x: x, "fail"),
        (..., "not attempted"),
        (lambda x: 1 / 0, "fail"),
        (lambda x: exec("raise NotImplementedError"), "not attempted"),
    ],
)
def test_verdicts(lesson, shown, answer, verdict):
    ask(lesson, CHECK.format(2), answer)
    assert shown[-1][RECORD_TYPE]["verdict"] == verdict


def test_wrong_answers_are_judged_and_the_solution_put_back(lesson, shown):
    space = ask(lesson, CHECK.format(2), ...)
    space["answer"] = double = lambda x: 2 * x
    lesson.solution("07.1")
    lesson.refuse("07.1", answer=[lambda x: x, lambda x: x + 3])
    assert [s[RECORD_TYPE]["verdict"] for s in shown] == [
        "not attempted",
        "pass",
        "fail",
        "fail",
    ]
    assert space["answer"] is double


def test_a_solution_without_a_check_says_so(lesson):
    with pytest.raises(CourseError, match="has no check yet"):
        lesson.solution("07.9")


def test_the_calls_that_the_contributing_page_shows_can_be_made():
    page = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
    block = page.partition("## Calls a lesson uses\n```python\n")[2].partition(
        "```"
    )[0]
    tree, names = ast.parse(block), {"lesson": Lesson}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            exec(ast.unparse(node), names)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert len(calls) >= 7
    for call in calls:
        known = eval(ast.unparse(call.func), names)
        given = (
            [None, *call.args]
            if isinstance(call.func, ast.Attribute)
            else call.args
        )
        inspect.signature(known).bind(
            *given, **{one.arg: 0 for one in call.keywords}
        )
