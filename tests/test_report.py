"""What a run leaves: pages without programs, outputs kept whole, costs with their machine."""

import json
import re

import nbformat
import pytest
from matplotlib import pyplot as plt

from conftest import PARAMETERS, lesson_cell, publish_cell
from course import report
from utils import show


def page_of(tmp_path, *cells):
    source, page = tmp_path / "a.ipynb", tmp_path / "pages/a.html"
    nbformat.write(nbformat.v4.new_notebook(cells=list(cells)), source)
    report.export(source, page)
    return page.read_text()


def output(**data):
    outputs = [
        nbformat.v4.new_output(
            "display_data", {k.replace("_", "/"): v for k, v in data.items()}
        )
    ]
    return nbformat.v4.new_code_cell("x", outputs=outputs)


def test_no_text_of_a_corpus_becomes_a_program(tmp_path):
    bad = "<script>alert(1)</script><img src=x onerror=alert(2)><a href='javascript:alert(3)'>x</a>"
    page = page_of(
        tmp_path,
        nbformat.v4.new_markdown_cell(bad),
        output(text_html=bad),
        output(text_markdown=bad),
        output(application_javascript="alert(4)"),
        output(**{"image_svg+xml": f"<svg>{bad}</svg>"}),
    )
    body = page[page.index("<body") :]
    assert "<script" not in page and "javascript:" not in body
    assert (
        "onerror=alert" not in body.replace("&lt;img", "") or "<img src" not in body
    )
    assert "alert(4)" not in body


def test_a_page_keeps_what_a_lesson_shows(tmp_path):
    prose = "# Title\n\na *word* with $x_1 < 2$\n\n| a | b |\n|:--|--:|\n| 1 | 2 |\n\n- one"
    table = '<table><tr><td style="text-align:right">1</td></tr></table>'
    page = page_of(
        tmp_path, nbformat.v4.new_markdown_cell(prose), output(text_html=table)
    )
    assert (
        "<em>word</em>" in page
        and "$x_1 &lt; 2$" in page
        and "<li>one</li>" in page
    )
    assert "<thead>" in page and 'style="text-align:right"' in page
    assert '<script src=""' not in page and "mathjax" not in page.lower()


def test_a_page_holds_its_drawings_and_no_page_inside_a_link(tmp_path):
    prose = (
        """![a badge](images/colab.svg) <a href="data:text/html,<b>x</b>">x</a>"""
    )
    page = page_of(tmp_path, nbformat.v4.new_markdown_cell(prose))
    assert 'alt="a badge" src="data:image/svg+xml;base64,' in page
    assert "data:text/html" not in page[page.index("<body") :]


def test_a_page_holds_a_plot_with_its_text(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(
        "IPython.display.display", lambda data, raw: shown.append(data)
    )
    show.show_figure(plt.figure(figsize=(1, 1)), alt="A line that rises.")
    plot = nbformat.v4.new_output("display_data", shown[0])
    page = page_of(tmp_path, nbformat.v4.new_code_cell("x", outputs=[plot]))
    assert 'alt="A line that rises." src="data:image/webp;base64,' in page


def test_a_stream_cut_in_pieces_is_one():
    pieces = [
        {"output_type": "stream", "name": "stdout", "text": text}
        for text in ("a", ["b\n", "c"])
    ]
    assert [one["text"] for one in report.join_streams(pieces)] == [["ab\n", "c"]]


@pytest.mark.slow
def test_keep_takes_costs_and_outputs_and_leaves_the_run_s_own_cells(
    course, monkeypatch
):
    prints = "print('a')\nprint('b', flush=True)\nprint('c')"
    solution = (
        'answer = 1\nlesson._checks["00.1"] = lambda: None\nlesson.solution("00.1")',
        "solution",
    )
    path = course.add(
        "00_a.ipynb",
        PARAMETERS,
        lesson_cell("00"),
        publish_cell("thing", "a" * 1000),
        prints,
        solution,
        "1 + 1",
    )
    (course.root / "expected/refused/00.py").write_text(
        "# %% 00.1\nprint('wrong')\n"
    )
    assert course.run("keep").returncode == 2  # nothing ran yet
    course.run("run")
    (course.root / ".gitignore").write_text("build/\n", encoding="utf-8")
    course.git("init", "-q")
    course.git("add", "-A")
    course.git("commit", "-qm", "a")
    readme = course.root / "README.md"
    text = readme.read_text(encoding="utf-8")
    readme.write_text("changed", encoding="utf-8")
    done = course.run("keep")
    assert done.returncode == 2 and "README.md" in done.stderr, done.all
    assert "commit or undo the changes first" in done.stderr
    assert not (course.root / "results").exists()
    readme.write_text(text, encoding="utf-8")
    made = course.build / "artifacts/smoke/thing"
    made.rename(made.with_name("elsewhere"))
    done = course.run("keep")
    assert done.returncode == 2 and "whole here: thing" in done.stderr, done.all
    made.with_name("elsewhere").rename(made)
    manifest = made / "manifest.json"
    whole = manifest.read_text(encoding="utf-8")
    manifest.write_text("{", encoding="utf-8")
    done = course.run("keep")
    assert done.returncode == 2 and "whole here: thing" in done.stderr, done.all
    assert not (course.root / "results").exists()
    manifest.write_text(whole, encoding="utf-8")
    done = course.run("keep")
    assert done.returncode == 0, done.all
    cost = json.loads((course.root / "results/smoke.json").read_text())[
        "notebooks"
    ]["00"]
    assert (
        cost["disk_bytes"] == 1000
        and cost["seconds"] > 0
        and cost["peak_bytes"] > 1e6
    )
    assert cost["command"] == "make run PROFILE=smoke ONLY=00"
    assert re.fullmatch("[0-9a-f]{10}", cost["commit"])
    assert {"processor", "torch", "python"} <= set(cost["facts"])
    report.keep_outputs(course.build / "run/smoke/00_a.ipynb", path)
    kept = nbformat.read(path, 4)
    assert [cell.execution_count for cell in kept.cells] == [1, 2, 3, 4, 5, 6]
    assert [one.text for one in kept.cells[3].outputs] == ["a\nb\nc\n"]
    assert kept.cells[5].outputs[0]["execution_count"] == 6
    assert (
        "wrong" not in path.read_text()
        and 'PROFILE = \\"auto\\"' in path.read_text()
    )


@pytest.mark.slow
def test_a_reader_s_own_changes_turn_no_check_red(course):
    path = course.add(
        "00_a.ipynb", PARAMETERS, lesson_cell("00"), 'lesson.record("a", 7)'
    )
    course.expect("[00.check]\na = { value = 7 }\n")
    course.git("init", "-q")
    course.git("add", "-A", "notebooks")
    course.git("commit", "-qm", "a")
    course.run("sync")
    assert course.run("run").returncode == 0
    assert course.run("check").returncode == 0
    path.write_text(path.read_text().replace(", 7)", ", 8)"))
    edited = course.run("check")
    assert (
        edited.returncode == 0 and "00_a, which you have changed" in edited.stdout
    )
    assert course.run("run").returncode == 1
    assert course.run("check").returncode == 0
    strict = course.run("check", "--strict")
    assert strict.returncode == 1 and "figure a: 8 is outside 7" in strict.stderr
