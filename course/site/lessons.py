"""A lesson as a page: the executed notebook, without what a page has no use for."""

from __future__ import annotations

import base64
import functools
import html
import json
import re
from pathlib import Path
from typing import Any

from course.checkout import date_of, git
from course.generate import Facts, facts_of, places
from course.notebooks import Cell, Notebook, cells, read, source, tags, write
from course.publish import BRANCH
from course.results import recorded
from course.site import languages
from course.site.links import (
    cell_label,
    cited_cells,
    in_repository,
    relead,
    written_in,
)
from utils.errors import ROOT

RECORD = "application/vnd.course.record+json"
SMALL = re.compile(r'<small style="[^"]*">')
FIGURE = re.compile(
    r'<img alt="([^"]*)" src="data:image/(png|webp);base64,([^"]+)"[^>]*>'
)
BADGES = re.compile(r"(?m)^\[!\[Open in Colab\].*$")
TURN = re.compile(r"(?m)^---\n(before|\[all|next)[^\n]*\Z")


def run_this(facts: Facts, language: str) -> str:
    """Where a lesson can be run, and what to do about a mistake in it."""
    here = facts["repository"].split("github.com/")[-1]
    name = facts["file"]
    copy = f"{here}/blob/{BRANCH}/notebooks/{name}"
    raw = f"https://github.com/{here}/raw/{BRANCH}/notebooks/{name}"
    issue = f"{facts['repository']}/issues/new?template=lesson.yml"
    # Not Binder: mybinder.org gives one to two GB of memory, and some lessons take more.
    links = {
        "Colab": f"https://colab.research.google.com/github/{copy}",
        "Kaggle": f"https://kaggle.com/kernels/welcome?src={raw}",
        "Codespaces": f"https://codespaces.new/{here}",
        "your machine": "../README.md#begin",
    }
    doors = []
    for where, link in links.items():
        doors.append(f"[{where}]({link})")
    run = " · ".join(doors)
    folder = language or "notebooks"
    page = Path(name).stem
    place = written_in(f"{folder}/{page}")
    edit = in_repository(place, "edit")
    title = f"{issue}&title=Lesson+{facts['number']}:+"
    tell = f"[edit it]({edit}) · [report a mistake]({title})"
    return f"{{.run-this}}\n**Run this lesson** on {run}. **Mend it:** {tell}.\n"


@functools.cache
def has_changed(path: Path, name: str) -> bool:
    """Whether the code of a lesson is another than at a commit; False where git does not know it."""
    if not date_of(name, ROOT):
        return False
    place = f"{name}:./notebooks/{path.name}"
    before = git("show", place, root=ROOT)
    if not before:
        return True
    codes = []
    for notebook in (json.loads(before), read(path)):
        code = [source(cell) for cell in cells(notebook, "code")]
        codes.append(code)
    old, new = codes
    return old != new


def when(path: Path, record: Facts) -> str:
    """The day and the commit of a recorded run, and whether the lesson has changed since."""
    name = record["commit"]
    day = record.get("date") or date_of(name, ROOT)
    older = ", before its last change" if has_changed(path, name) else ""
    return f"{day} ({name}{older})".strip()


def last_run(path: Path) -> str:
    """When a lesson was last seen to run, and which commit made the outputs of the page."""
    number = path.name[:2]
    said = []
    kept = recorded("smoke").get(number)
    if kept:
        said.append(f"green on {kept['machine']}, {when(path, kept)}")
    for row in places():
        lesson = row["lessons"].get(number)
        if lesson:
            green = "red" if lesson["problems"] else "green"
            said.append(f"{green} in `{row['name']}`, {when(path, lesson)}")
    text = "; ".join(said) or "not recorded yet"
    outputs = recorded("laptop").get(number)
    if outputs:
        made = when(path, outputs)
        text += f". The outputs below are of {made}, "
        text += f"recorded on {outputs['machine']}"
    return f"{{.last-run}}\nLast runs at `smoke`: {text}.\n"


def header(text: str, facts: Facts, language: str) -> str:
    """The header of a lesson, with more places to run it than a notebook needs."""
    told = run_this(facts, language)
    told += "\n"
    told += last_run(ROOT / "notebooks" / facts["file"])
    told = languages.say(told, language)
    return BADGES.sub(lambda _: told, text, count=1)


def keep_picture(data: str, alt: str, path: Path) -> str:
    """Write a plot as a file, and give the Markdown that shows it with its text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(base64.b64decode(data))
    alt = re.sub(r"([\[\]\\*_`<$])", r"\\\1", " ".join(alt.split()))
    return f"![{alt}]({path.parent.name}/{path.name})"


def plain(output: Any, path: Path) -> Any:
    """An output that says the same to everybody: a plot has its text, and a small line its class."""
    data = output.get("data")
    if not data:
        return output
    data.pop(RECORD, None)
    picture = data.pop("image/png", None)
    if picture:
        alt = output["metadata"].get("image/png", {}).get("alt", "")
        shown = keep_picture("".join(picture), alt, path)
        return {**output, "data": {"text/markdown": shown}, "metadata": {}}
    page = "".join(data.get("text/html", ""))
    figure = FIGURE.fullmatch(page)
    if figure:
        path = path.with_suffix(f".{figure[2]}")
        shown = keep_picture(figure[3], html.unescape(figure[1]), path)
        return {**output, "data": {"text/markdown": shown}, "metadata": {}}
    if page:
        data["text/html"] = SMALL.sub('<small class="record">', page)
    return output


def join_streams(outputs: list[Any]) -> list[Any]:
    """Outputs in which what was printed in one go is one output; a table between two keeps them apart."""
    joined: list[Any] = []
    for output in outputs:
        last = joined[-1] if joined else {}
        if output["output_type"] == "stream" and last.get("name") == output["name"]:
            text = "".join(last["text"]) + "".join(output["text"])
            joined[-1] = {**last, "text": text}
        else:
            joined.append(output)
    return joined


def fold(cell: Cell, words: str, what: str = "hide-cell") -> None:
    """Show a cell only to those who ask: with its outputs, or its code alone ("hide-input")."""
    cell["metadata"]["tags"] = [*tags(cell), what]
    cell["metadata"]["mystnb"] = {
        "code_prompt_show": words,
        "code_prompt_hide": words,
    }


def title_of(cell: Cell) -> str:
    """What stands behind `@title` in a cell's first line."""
    return re.sub(r"#\s*@title\s*", "", source(cell).splitlines()[0])


def prepare(cell: Cell, name: str, facts: Facts, language: str) -> None:
    """Make one cell fit for a page."""
    text = source(cell)
    if cell["cell_type"] == "markdown":
        if "header" in tags(cell):
            text = header(text, facts, language)
        if "footer" in tags(cell):
            text = TURN.sub("", text.rstrip())
        cell["source"] = relead(text, "notebooks")
        return
    if "solution" in tags(cell):
        fold(cell, languages.say(title_of(cell), language))
    elif "bootstrap" in tags(cell):
        fold(cell, languages.say("Set-up", language))
    elif cell["metadata"].get("jupyter", {}).get("source_hidden"):
        fold(cell, title_of(cell), "hide-input")
    cell["outputs"] = join_streams(cell["outputs"])
    folder = Path(name)
    for number, output in enumerate(cell["outputs"]):
        path = folder / f"{cell['id']}-{number}.png"
        cell["outputs"][number] = plain(output, path)


def translate(notebook: Notebook, page: str, language: str) -> None:
    """Put the prose of a lesson into another language; code and outputs stay."""
    known = languages.catalogue(language, page)
    words = languages.note(page, language, known)
    for cell in cells(notebook, "markdown"):
        text = languages.translate(source(cell), known)
        if "header" in tags(cell):
            text = languages.noted(text, words)
        cell["source"] = text


def with_labels(notebook: Notebook, lesson: str) -> list[Cell]:
    """The cells of a lesson, with a label before each to which a page leads."""
    labelled = []
    for cell in notebook["cells"]:
        label = cell_label(lesson, cell["id"])
        if label in cited_cells():
            place = {
                "cell_type": "markdown",
                "metadata": {},
                "id": f"to-{cell['id']}",
            }
            labelled.append({**place, "source": f"({label})="})
        labelled.append(cell)
    return labelled


def page_of(path: Path, target: Path, language: str = "") -> Notebook:
    """Write the page's notebook of a lesson into a folder, its pictures beside it."""
    notebook = read(path)
    facts = facts_of(path)
    number = path.name[:2]
    pictures = target / f"plots-{number}"
    if language:
        translate(notebook, path.stem, language)
    for cell in notebook["cells"]:
        prepare(cell, str(pictures), facts, language)
    if language:
        for cell in cells(notebook, "markdown"):
            cell["source"] = languages.settle(cell["source"], path.stem, language)
    notebook["metadata"].pop("course", None)
    shown = notebook["cells"] if language else with_labels(notebook, path.name)
    write(target / path.name, {**notebook, "cells": shown})
    return notebook
