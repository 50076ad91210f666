"""The index that the search of the site reads: one entry for each section of each page.

It is made of scripts and not of data files, because a page opened from a folder may load the one and not
the other. `index.js` has the titles, which are found at once; the texts follow in parts, those of other
languages only for who searches in one. Nothing is loaded before somebody begins to search.
"""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from course.site.languages import NAMES

HEADINGS = {"h1", "h2", "h3", "h4", "dt"}
# Elements without an end.
VOID = {"br", "img", "hr", "input", "link", "meta", "wbr", "source", "col"}
LEFT_OUT = {"script", "style", "nav", "form", "svg"}
# What a run printed is left out: who looks for a word wants the place that speaks of it.
OUTPUTS = "cell_output"
NO_PAGES = {"search.html", "genindex.html"}
# The rows of a lesson's last fold stand in docs/sources.html as well, each with its lesson.
SAID_ELSEWHERE = "What the sources say of this lesson"
# Characters of text in one part.
PART = 250_000


class Sections(HTMLParser):
    """Reads a page and keeps the text of each of its sections."""

    def __init__(self) -> None:
        super().__init__()
        self.sections: list[dict[str, str]] = []
        self.open: list[
            tuple[str, str]
        ] = []  # elements around, each with what it is
        self.around: list[int] = []  # sections around

    def handle_starttag(
        self, tag: str, attrs: list[tuple[str, str | None]]
    ) -> None:
        """Note what begins."""
        if tag in VOID:
            self.handle_data(" ")
            return
        facts = dict(attrs)
        kind = ""
        look = facts.get("class") or ""
        if tag in LEFT_OUT or OUTPUTS in look or look == "headerlink":
            kind = "left out"
        elif tag == "section" and facts.get("id"):
            kind = "section"
            self.begin(facts["id"] or "")
        elif tag == "dl" and "glossary" in (facts.get("class") or ""):
            kind = "section"
            self.begin("")
        elif tag == "dt" and facts.get("id"):
            # An entry of the glossary is a section of its own, until the next begins.
            self.around.pop()
            self.begin(facts["id"] or "")
        self.open.append((tag, kind))

    def begin(self, anchor: str) -> None:
        """Begin a section."""
        self.around.append(len(self.sections))
        self.sections.append({"id": anchor, "title": "", "text": ""})

    def handle_endtag(self, tag: str) -> None:
        """Note what ends; an end without a beginning is none."""
        if tag not in [name for name, _ in self.open]:
            return
        while self.open:
            name, kind = self.open.pop()
            if kind == "section":
                self.around.pop()
            if name == tag:
                return

    def handle_data(self, data: str) -> None:
        """Keep a text where it stands."""
        kinds = [kind for _, kind in self.open]
        if not self.around or "left out" in kinds:
            return
        if data.startswith(SAID_ELSEWHERE):
            self.leave_fold_out()
            return
        section = self.sections[self.around[-1]]
        part = "title" if {name for name, _ in self.open} & HEADINGS else "text"
        section[part] += data

    def leave_fold_out(self) -> None:
        """Read no more of the fold that is open."""
        for place, (name, _) in enumerate(self.open):
            if name == "details":
                self.open[place] = (name, "left out")


def sections_of(page: str) -> list[dict[str, str]]:
    """The sections of a page, the white space of their texts joined.

    >>> sections_of('<section id="a"><h1>A<a class="headerlink">#</a></h1><p>b  c</p></section>')
    [{'id': 'a', 'title': 'A', 'text': 'b c'}]
    """
    reader = Sections()
    reader.feed(page)
    for section in reader.sections:
        for part in ("title", "text"):
            section[part] = " ".join(section[part].split())
    return [part for part in reader.sections if part["title"] or part["text"]]


def parts_of(names: list[str], texts: list[str]) -> list[list[int]]:
    """Where each part begins and ends: neighbours in one language, up to so many characters.

    >>> parts_of(["a.html", "docs/b.html", "ko/a.html"], ["x", "y", "z"])
    [[0, 2], [2, 3]]
    """
    parts: list[list[int]] = []
    size = 0
    before = ""
    for place, (name, text) in enumerate(zip(names, texts)):
        language = language_of(name)
        if not parts or language != before or size + len(text) > PART:
            parts.append([place, place])
            size = 0
        parts[-1][1] = place + 1
        size += len(text)
        before = language
    return parts


def language_of(name: str) -> str:
    """The folder of a page's language; nothing for English."""
    folder = name.partition("/")[0]
    return folder if folder in NAMES else ""


def write_script(file: Path, function: str, *values: Any) -> None:
    """A script that hands values to a function of the page."""
    said = [
        json.dumps(v, ensure_ascii=False, separators=(",", ":")) for v in values
    ]
    file.write_text(f"window.{function}({','.join(said)});\n", encoding="utf-8")


def write_index(folder: Path) -> int:
    """Write the index of all pages of a folder; how many pages there are."""
    entries: list[list[str]] = []
    texts: list[str] = []
    paths = sorted(folder.rglob("*.html"))
    for path in paths:
        name = path.relative_to(folder).as_posix()
        if name in NO_PAGES or name.startswith("_"):
            continue
        found = sections_of(path.read_text(encoding="utf-8"))
        page = name
        if found:
            page = found[0]["title"]
        for section in found:
            entries.append([name, section["id"], page, section["title"]])
            texts.append(section["text"])
    names = [entry[0] for entry in entries]
    parts = parts_of(names, texts)
    place = folder / "_static"
    for number, (first, end) in enumerate(parts):
        file = place / f"index-{number}.js"
        write_script(file, "courseTexts", number, first, texts[first:end])
    foreign = [bool(language_of(names[first])) for first, _ in parts]
    write_script(place / "index.js", "courseIndex", entries, foreign)
    return len(paths)
