"""What the five sources say, beside ours: the rows of docs/sources.toml, filled from the notebooks.

Our side of a row is never typed. It is a figure that the named cell recorded, what a pattern finds
in its output, words that stand in it, or the answer of a proof that the tests run.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from course.notebooks import Cell, Notebook, read, select, source
from utils.errors import ROOT, CourseError
from utils.lesson import RECORD_TYPE
from utils.show import format_figure

Verdict = Literal[
    "right",
    "half right",
    "wrong",
    "slip",
    "outdated",
    "not comparable",
    "not decided",
]

# What an author sets as code.
MARKED = re.compile(r"(?<!`)(`[^`]+`)(?!`)")
# What Markdown would take for its own in words.
MARKUP = re.compile(r"[*_<\[\]$\\]")


class Strict(BaseModel):
    """A misspelt name is an error."""

    model_config = ConfigDict(extra="forbid")


class Source(Strict):
    """One of the texts."""

    title: str
    about: str


class Row(Strict):
    """One statement of a source, and what decides it."""

    lesson: str
    source: str
    quote: str
    verdict: Verdict
    about: str = ""
    why: str = ""
    cell: str = ""
    figure: str = ""
    read: str = ""
    sees: str = ""
    proof: str = ""
    ours: str = ""


class Page(Strict):
    """All of docs/sources.toml."""

    source: dict[str, Source]
    row: list[Row]


def load() -> Page:
    """The rows as they are written; none where there is no such file."""
    path = ROOT / "docs" / "sources.toml"
    if not path.exists():
        return Page(source={}, row=[])
    try:
        return Page(**tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, ValidationError) as error:
        first = str(error).splitlines()[:3]
        raise CourseError(" ".join(first), path, "mend that row") from None


def text_of(cell: Cell) -> str:
    """What a reader sees of a cell: its output as text, then its source."""
    parts = []
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        kind = "text/plain"
        if "text/markdown" in data:
            kind = "text/markdown"
        shown = data.get(kind, "")
        text = output.get("text", shown)
        parts.append("".join(text))
    parts.append(source(cell))
    return "\n".join(parts)


def figures_of(cell: Cell) -> dict[str, str]:
    """The figures that a cell recorded, as the lesson shows them."""
    figures = {}
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        record = data.get(RECORD_TYPE, {})
        if record.get("kind") != "figure":
            continue
        value = format_figure(record["value"])
        text = f"{value} {record['unit']}"
        name = record["name"]
        figures[name] = text.rstrip()
    return figures


def ours(row: Row, notebook: Notebook) -> str:
    """Our side of a row, or an error that says which part of it the notebook lacks."""
    if not row.cell:
        return row.ours
    cells = {cell["id"]: cell for cell in notebook["cells"]}
    where = f"lesson {row.lesson}, cell {row.cell}"
    lack = CourseError(f"no such cell, or not what {row.quote!r} asks of it", where)
    if row.cell not in cells:
        raise lack
    cell = cells[row.cell]
    if row.figure:
        figures = figures_of(cell)
        if row.figure not in figures:
            raise lack
        return f"{row.figure}: {figures[row.figure]}"
    if row.read:
        match = re.search(row.read, text_of(cell))
        if match is None:
            raise lack
        return " · ".join(match.groups())
    if row.sees not in text_of(cell):
        raise lack
    return f"“{row.sees}”"


def code(text: str) -> str:
    """Words as code in a table's cell; between quotation marks where they mark code themselves.

    >>> code("a | b"), code("a* of `b|c`")
    ('`a \\\\| b`', '“a\\\\* of `b\\\\|c`”')
    >>> code("if a:   b").count(" ")  # its blanks are its own
    4
    """
    parts = MARKED.split(text.strip())
    words = "".join(parts[::2])
    marked = len(parts) > 1 and "`" not in words
    if marked:
        for place in range(0, len(parts), 2):
            part = parts[place]
            parts[place] = MARKUP.sub(r"\\\g<0>", part)
    text = "".join(parts)
    text = text.replace("|", r"\|")
    if marked:
        return f"“{text}”"
    if "`" in text:
        # A fence, or a mark without its fellow.
        return f"`` {text} ``"
    return f"`{text}`"


def plain(text: str) -> str:
    """Our own words in a table's cell."""
    line = re.sub(r"\s+", " ", text)
    line = line.strip()
    return line.replace("|", r"\|")


def tables() -> dict[str, list[dict[str, str]]]:
    """For each lesson the rows of its table, in the order of the file."""
    page = load()
    lessons: dict[str, list[dict[str, str]]] = {}
    notebooks = {path.name[:2]: read(path) for path in paths(page)}
    for row in page.row:
        if row.lesson not in notebooks:
            continue
        lessons.setdefault(row.lesson, []).append(
            {
                "quote": code(re.sub(r"\s+", " ", row.quote)),
                "about": plain(row.about),
                "source": plain(page.source[row.source].title),
                "ours": our_cell(row, notebooks[row.lesson]),
                "verdict": row.verdict,
                "why": plain(row.why),
                "cell": row.cell,
                "proof": row.proof,
            }
        )
    return lessons


def our_cell(row: Row, notebook: Notebook) -> str:
    """Our side as it stands in a table: code where it is an output, words where it is words.

    A lesson whose outputs a reader has cleared stops nothing; the tests ask for every row.
    """
    try:
        text = ours(row, notebook)
    except CourseError:
        return "not recorded yet"
    if row.read:
        return code(text)
    return plain(text)


def paths(page: Page) -> list[Path]:
    """The lessons that have a row."""
    numbers = {row.lesson for row in page.row}
    return [path for path in select() if path.name[:2] in numbers]
