"""What is generated: complete, stable, and found stale when it is not."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter

import nbformat
import pytest

from conftest import PARAMETERS
from course import __main__ as command
from course import checkout, generate, notebooks, results, sources
from utils import artifacts
from utils.errors import ROOT, CourseError

KEPT_IN_A_FORK = (
    ".py",
    ".j2",
    ".toml",
    ".txt",
    ".yml",
    ".cff",
    ".md",
    ".json",
    ".ipynb",
)


@pytest.fixture
def two(course, monkeypatch):
    """Two lessons with generated cells; the first makes what the second takes."""
    for name, code in (
        ("00_first.ipynb", 'lesson.publish("thing")'),
        (
            "01_second.ipynb",
            'lesson.need("thing"); asset("minilm"); asset("unknown")',
        ),
    ):
        path = course.add(name, ("", "bootstrap"), PARAMETERS, code)
        notebook = nbformat.read(path, 4)
        for tag, place in (("header", 0), ("footer", 99)):
            cell = nbformat.v4.new_markdown_cell("", metadata={"tags": [tag]})
            notebook.cells.insert(place, cell)
        notebook.metadata["course"] = {
            "title": name[3:8],
            "summary": "It does.",
            "needs": "[lesson 00](00_first.ipynb) and time",
            "hours": 0.25,
            "goals": ["see", "do", "tell"],
        }
        nbformat.write(notebook, path)
    for module in (generate, results, notebooks, sources):
        monkeypatch.setattr(module, "ROOT", course.root)
    return course


def header(course, name):
    return nbformat.read(course.root / "notebooks" / name, 4).cells[0].source


def test_sync_once_is_enough_and_stale_is_found(two):
    assert len(generate.sync(write_it=False)) == 3
    assert len(generate.sync()) == 3
    assert generate.sync() == []
    path = two.root / "notebooks/00_first.ipynb"
    path.write_text(
        path.read_text().replace('"summary": "It does."', '"summary": "It did."')
    )
    assert path in generate.sync(write_it=False)
    assert generate.sync() != [] and generate.sync() == []


def test_a_stale_drawing_of_what_comes_first_is_found(two):
    page = two.root / "docs/teaching.md"
    drawing = page.with_name("prerequisites.svg")
    page.parent.mkdir()
    page.write_text("<!-- prerequisites:begin --><!-- prerequisites:end -->")
    first = two.root / "notebooks/00_first.ipynb"
    text = first.read_text(encoding="utf-8")
    text = text.replace("[lesson 00](00_first.ipynb) and time", "time")
    first.write_text(text, encoding="utf-8")
    assert {page, drawing} <= set(generate.sync())
    text = drawing.read_text(encoding="utf-8")
    assert 'id="arrow-00-01"' in text
    drawing.write_text(text.replace("arrow-00-01", "arrow-01-00"))
    assert generate.sync(write_it=False) == [drawing]
    assert generate.sync() == [drawing] and generate.sync() == []
    assert drawing.read_text(encoding="utf-8") == text


def test_sync_does_not_promise_to_write_less_than_all(capsys):
    with pytest.raises(SystemExit):
        command.parse(["sync", "--only", "00"])
    assert "leave --only out" in capsys.readouterr().err


def test_a_notebook_saved_by_another_program_is_not_stale(two):
    generate.sync()
    path = two.root / "notebooks/00_first.ipynb"
    path.write_text(json.dumps(json.loads(path.read_text()), sort_keys=True))
    assert generate.sync(write_it=False) == []


def test_a_half_written_notebook_does_not_stop_the_others(two):
    (two.root / "notebooks/02_half.ipynb").write_text("{")
    assert len(generate.sync()) == 3
    assert "next: [01" in header(two, "00_first.ipynb")


def test_the_set_up_cell_is_quiet_on_a_checkout(two, capsys):
    generate.sync()
    cell = nbformat.read(two.root / "notebooks/00_first.ipynb", 4).cells[1]
    assert cell.source.startswith("# @title Set-up\n")
    exec(cell.source, {})
    assert capsys.readouterr() == ("", "")


def test_a_header_says_what_is_taken_made_and_near(two):
    generate.sync()
    first, second = header(two, "00_first.ipynb"), header(two, "01_second.ipynb")
    assert "next: [01 · secon](01_second.ipynb)" in first and "before" not in first
    assert "**It makes** the artifact `thing`" in first
    assert "the artifact `thing` of [lesson 00](00_first.ipynb)" in second
    assert "84 MB to fetch" in second and "unknown" not in second
    assert "**Study time** about 0.25 hours" in first
    assert "**It needs** [lesson 00](00_first.ipynb) and time" in second


def test_tables_and_lists_begin_a_paragraph(two):
    generate.sync()
    for name in ("00_first.ipynb", "01_second.ipynb"):
        assert re.search(r"\n\n\| profile \|", header(two, name))
        assert re.search(r"\n\n- see\n- do", header(two, name))


def test_a_large_profile_is_shown_only_with_a_size_or_a_record(two):
    sizes = "a = lesson.pick(smoke=1, laptop=2, gpu=3)\nb = other(cluster=1)"
    path = two.add("02_third.ipynb", ("", "header"), PARAMETERS, sizes)
    assert generate.profiles_of(path) == ["smoke", "laptop", "gpu"]
    first = two.root / "notebooks/00_first.ipynb"
    assert generate.profiles_of(first) == ["smoke", "laptop"]
    generate.sync()
    assert "| gpu |" not in header(two, "00_first.ipynb")
    (two.root / "results").mkdir()
    cost = {"seconds": 9, "peak_bytes": 1, "disk_bytes": 0, "machine": "8 GPUs"}
    record = {"notebooks": {"00": cost}}
    artifacts.write_json(two.root / "results/cluster.json", record)
    assert generate.profiles_of(first) == ["smoke", "laptop", "cluster"]
    generate.sync()
    assert "| cluster | 10 s |" in header(two, "00_first.ipynb")


def test_code_that_does_not_parse_picks_nothing(two):
    path = two.add("02_third.ipynb", "lesson.pick(smoke=1, gpu=2", PARAMETERS)
    assert generate.profiles_of(path) == ["smoke", "laptop"]


def test_recorded_runs_become_the_cost_card(two):
    (two.root / "results").mkdir()
    cost = {
        "seconds": 61,
        "peak_bytes": 1_234_000_000,
        "disk_bytes": 0,
        "machine": "2 cores",
    }
    artifacts.write_json(
        two.root / "results/smoke.json", {"notebooks": {"00": cost}}
    )
    generate.sync()
    assert "| smoke | 70 s | 1.3 GB | nothing | 2 cores |" in header(
        two, "00_first.ipynb"
    )
    assert "| 00 · first" not in header(two, "00_first.ipynb")
    assert "70 s" in (two.root / "README.md").read_text()


def test_a_fork_changes_one_line(tmp_path):
    listing = checkout.git("ls-files", "-co", "--exclude-standard", "-z")
    for name in listing.strip("\0").split("\0"):
        if name.endswith(KEPT_IN_A_FORK):
            target = tmp_path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target)
    old = "transformers-end-to-end/course"
    old_pages = "transformers-end-to-end.github.io"
    place = tmp_path / "pyproject.toml"
    text = place.read_text(encoding="utf-8")
    assert text.count(old) == 1
    place.write_text(text.replace(old, "somebody/her-course"), encoding="utf-8")
    env = {**os.environ, "COURSE_ROOT": str(tmp_path)}
    env["PYTHONPATH"] = str(tmp_path)
    command = [sys.executable, "-m", "course", "sync"]
    for _ in range(2):
        done = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, encoding="utf-8"
        )
        assert done.returncode == 0, done.stderr
    assert "nothing, all is up to date" in done.stdout
    texts = {}
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.suffix != ".pyc":
            texts[path.relative_to(tmp_path).as_posix()] = path.read_text("utf-8")
    left = [
        name for name, text in texts.items() if old in text or old_pages in text
    ]
    # A record tells what was typed where it was made.
    left = [name for name in left if not name.startswith("results/")]
    # This file names the old address, to look for it.
    assert left == ["tests/test_generate.py"]
    ours = [name for name, text in texts.items() if "somebody/her-course" in text]
    lessons = [name for name in ours if name.startswith("notebooks/")]
    assert len(lessons) == len(generate.select())
    assert {"README.md", "CITATION.cff"} <= set(ours)


def test_a_longer_name_is_another_address(monkeypatch):
    today = {"repository": "https://github.com/me/mine"}
    monkeypatch.setattr(generate, "project", lambda: today)
    text = (
        "github.com/a/course, github.com/a/course-notes, github.com/a/course/issues"
    )
    assert generate.replace_address(text, "https://github.com/a/course") == (
        "github.com/me/mine, github.com/a/course-notes, github.com/me/mine/issues"
    )


@pytest.mark.parametrize(
    "seconds, text", [(0.4, "10 s"), (90, "90 s"), (91, "2 min")]
)
def test_costs_are_rounded_up(seconds, text):
    assert generate.round_seconds(seconds) == text


def test_outputs_survive_sync(two):
    path = two.root / "notebooks/00_first.ipynb"
    notebook = nbformat.read(path, 4)
    notebook.cells[3].outputs = [nbformat.v4.new_output("stream", text="kept")]
    nbformat.write(notebook, path)
    generate.sync()
    assert nbformat.read(path, 4).cells[3].outputs[0].text == "kept"


# questions --------------------------------------------------------------------------------------

CHOICES = """
[[questions]]
ask = "Which?"
[[questions.choices]]
text = "the `<s>`"
right = true
why = "It is."
[[questions.choices]]
text = "the other"
why = "It is not."
"""


def test_questions_stand_in_the_last_cell(two, monkeypatch, tmp_path):
    (tmp_path / "00.toml").write_text(CHOICES, encoding="utf-8")
    monkeypatch.setattr(generate.questions_of, "__defaults__", (tmp_path,))
    generate.sync()
    footer = (
        nbformat.read(two.root / "notebooks/00_first.ipynb", 4).cells[-1].source
    )
    assert "**1. Which?**" in footer
    assert re.search(
        r"<details><summary>[ab]\) the <code>&lt;s&gt;</code></summary>", footer
    )
    assert "✓ Yes. It is." in footer and "✗ No. It is not." in footer
    assert (
        "Check yourself" not in (two.root / "notebooks/01_second.ipynb").read_text()
    )


@pytest.mark.parametrize(
    "fault",
    [
        lambda text: text.replace("right = true\n", ""),
        lambda text: text.replace('text = "the other"', 'text = "x"\nright = true'),
        lambda text: text.replace('why = "It is not."', ""),
    ],
)
def test_a_question_without_one_right_choice_or_a_reason_is_refused(
    tmp_path, fault
):
    (tmp_path / "00.toml").write_text(fault(CHOICES), encoding="utf-8")
    with pytest.raises(CourseError, match="wants one right choice"):
        generate.questions_of("00", tmp_path)


def test_the_right_choice_is_not_always_in_one_place():
    places = Counter()
    for path in (ROOT / "notebooks" / "questions").glob("*.toml"):
        for question in generate.questions_of(path.stem):
            right = [bool(choice.get("right")) for choice in question["choices"]]
            places[right.index(True)] += 1
    assert len(places) >= 3
    assert max(places.values()) < 0.5 * sum(places.values()), places


def test_the_right_choice_does_not_show_by_its_length():
    """Drawn at random, it would be the longest of three in a third of the questions."""
    longest = []
    for path in (ROOT / "notebooks" / "questions").glob("*.toml"):
        for question in generate.questions_of(path.stem):
            lengths = [len(choice["text"]) for choice in question["choices"]]
            right = [bool(choice.get("right")) for choice in question["choices"]]
            longest.append(lengths[right.index(True)] == max(lengths))
    assert 0.2 < sum(longest) / len(longest) < 0.45


def test_every_lesson_has_three_questions():
    written = (ROOT / "notebooks" / "questions").glob("*.toml")
    numbers = [path.name[:2] for path in generate.select()]
    assert sorted(path.stem for path in written) == numbers
    for number in numbers:
        questions = generate.questions_of(number)
        assert len(questions) == 3
        assert all(len(question["choices"]) >= 3 for question in questions)
