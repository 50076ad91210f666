"""The index that the search of the site reads: one entry for each section of each page.

It is a script and not a data file, because a page opened from a folder may load the one and not the
other. It is loaded when somebody begins to search.
"""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

HEADINGS = {"h1", "h2", "h3", "h4", "dt"}
# Elements without an end.
VOID = {"br", "img", "hr", "input", "link", "meta", "wbr", "source", "col"}
LEFT_OUT = {"script", "style", "nav", "form", "svg"}
# What a run printed is left out: who looks for a word wants the place that speaks of it.
OUTPUTS = "cell_output"
NO_PAGES = {"search.html", "genindex.html"}


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
        section = self.sections[self.around[-1]]
        part = "title" if {name for name, _ in self.open} & HEADINGS else "text"
        section[part] += data


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


def write_index(folder: Path) -> int:
    """Write the index of all pages of a folder; how many pages there are."""
    entries: list[list[str]] = []
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
            entries.append(
                [name, section["id"], page, section["title"], section["text"]]
            )
    body = json.dumps(entries, ensure_ascii=False, separators=(",", ":"))
    script = f"window.courseIndex({body});\n"
    file = folder / "_static" / "index.js"
    file.write_text(script, encoding="utf-8")
    return len(paths)
