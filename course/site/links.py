"""Where a page's links lead: to other pages of the site, or to the file in the repository."""

from __future__ import annotations

import functools
import posixpath
import re

from course.publish import LINK, project
from utils.errors import ROOT

CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.S)
PAGES = re.compile(r"notebooks/[^/]+\.ipynb|docs/[^/]+\.md|README\.md")
PICTURES = (".svg", ".png")
MODULES = re.compile(r"((?:utils|stages)(?:/\w+)+)\.py")
TO_CELL = re.compile(r"(\w+)\.ipynb#cell-id=([\w-]+)")
BRANCH = "main"
# A badge is a picture of another host, and a page asks none.
BADGES = re.compile(r"(?m)^\[!\[.*/badge\.svg.*\n")
# Pages whose text no file of their name holds.
WRITTEN_IN = {
    "index": "course/templates/site_index.j2",
    "machines": "course/templates/site_machines.j2",
    "api/utils": "course/site/modules.py",
    "api/stages": "course/site/modules.py",
}
# What a picture shows, in words, which may run over several lines.
ALT = re.compile(r"!\[[^\]\[]*\]\(")


def in_repository(path: str, kind: str = "blob") -> str:
    """The address of a file of the course."""
    return f"{project()['repository']}/{kind}/{BRANCH}/{path}"


def written_in(name: str) -> str:
    """The file of the course in which the text of a page is written.

    >>> written_in("api/stages.tokens"), written_in("ko/glossary")
    ('stages/tokens.py', 'translations/ko/glossary.po')
    """
    folder, _, page = name.rpartition("/")
    if name in WRITTEN_IN:
        return WRITTEN_IN[name]
    if folder == "api":
        return f"{page.replace('.', '/')}.py"
    if folder == "notebooks":
        return f"{name}.ipynb"
    if folder and (ROOT / "translations" / folder).is_dir():
        return f"translations/{folder}/{page}.po"
    return f"{name}.md"


def cell_label(lesson: str, cell: str) -> str:
    """The name by which the whole site knows a cell.

    >>> cell_label("05_tokens.ipynb", "merges")
    'cell-05-merges'
    """
    return f"cell-{lesson[:2]}-{cell}"


@functools.cache
def cited_cells() -> set[str]:
    """The labels of the cells to which a page leads."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    pages += (ROOT / "notebooks").glob("*.ipynb")
    found = set()
    for page in pages:
        for lesson, cell in TO_CELL.findall(page.read_text(encoding="utf-8")):
            found.add(cell_label(lesson, cell))
    return found


def lead(target: str, folder: str) -> str:
    """A link of a page in some folder of the checkout, as a page of the site has it.

    >>> lead("../README.md#begin", "notebooks"), lead("../stages/tokens.py", "notebooks")
    ('../README.md#begin', '../api/stages.tokens.md')
    >>> lead("../notebooks/05_tokens.ipynb#cell-id=merges", "docs")
    '#cell-05-merges'
    """
    if re.match(r"[a-z]+:|#", target):
        return target
    path, mark, anchor = target.partition("#")
    if anchor.startswith("cell-id="):
        return "#" + cell_label(posixpath.basename(path), anchor.partition("=")[2])
    place = posixpath.normpath(posixpath.join(folder, path))
    if PAGES.fullmatch(place) or place.endswith(PICTURES):
        return target
    module = MODULES.fullmatch(place)
    if module:
        page = f"api/{module[1].replace('/', '.')}.md"
        return posixpath.relpath(page, folder or ".")
    kind = "tree" if (ROOT / place).is_dir() else "blob"
    return in_repository(place, kind) + mark + anchor


def on_one_line(found: re.Match[str]) -> str:
    """The words of a picture without line breaks, which Sphinx drops together with the space."""
    return " ".join(found[0].split())


def relead(text: str, folder: str) -> str:
    """Markdown whose links fit the site, without badges; code is left alone."""

    def led(link: re.Match[str]) -> str:
        return link[1] + lead(link[2], folder)

    text = ALT.sub(on_one_line, BADGES.sub("", text))
    parts = CODE.split(text)
    for place in range(0, len(parts), 2):
        part = parts[place]
        parts[place] = LINK.sub(led, part)
    return "".join(parts)
