"""The pages around the lessons: the first one, the glossary, what fits which machine."""

from __future__ import annotations

from pathlib import Path

from course.generate import TEMPLATES, Facts, facts_of, profiles_of
from course.notebooks import select
from course.results import recorded
from course.site.languages import NAMES
from course.site.links import relead
from course.site.terms import Term, find_term, read_terms
from utils.errors import ROOT
from utils.show import format_bytes


def docs() -> list[Path]:
    """The pages of `docs/`, whichever there are."""
    folder = ROOT / "docs"
    return sorted(folder.glob("*.md"))


def title_of(path: Path) -> str:
    """The first heading of a page."""
    text = path.read_text(encoding="utf-8")
    _, _, rest = text.partition("# ")
    title, _, _ = rest.partition("\n")
    return title


def largest(rows: list[Facts]) -> str:
    """The most memory that any recorded lesson takes."""
    return format_bytes(max((row["peak_bytes"] for row in rows), default=0))


def front_page(translated: list[tuple[str, str, str]]) -> str:
    """The first page: what the course is, its lessons, where to look, pages in other languages."""
    lessons = [facts_of(path) for path in select()]
    first = (ROOT / "README.md").read_text(encoding="utf-8").split("\n\n")[1]
    pages = {path.stem: title_of(path) for path in docs()}
    template = TEMPLATES.get_template("site_index.j2")
    return template.render(
        intro=first,
        lessons=lessons,
        pages=pages,
        translated=translated,
        names=NAMES,
    )


def machines_page() -> str:
    """Which lesson fits which machine, from the recorded runs."""
    rows = []
    for path in select():
        facts = facts_of(path)
        own = [name for name in profiles_of(path) if name in ("gpu", "cluster")]
        rows.append({**facts, "own": own})
    peaks = {name: list(recorded(name).values()) for name in ("smoke", "laptop")}
    template = TEMPLATES.get_template("site_machines.j2")
    smoke = largest(peaks["smoke"])
    laptop = largest(peaks["laptop"])
    return template.render(rows=rows, smoke=smoke, laptop=laptop)


def glossary_page(texts: dict[str, str]) -> str:
    """The glossary as a list of definitions, each with the lessons that use the word."""
    path = ROOT / "docs" / "glossary.md"
    page = path.read_text(encoding="utf-8")
    start, *sections = page.split("\n## ")
    lines = [start.strip()]
    lines.append("")
    for section in sections:
        heading, _, body = section.partition("\n")
        lines.append(f"## {heading}")
        lines.append("")
        lines.append("```{glossary}")
        for term in read_terms(body):
            lines += entry(term, texts)
        lines += ["```", ""]
    return "\n".join(lines)


def entry(term: Term, texts: dict[str, str]) -> list[str]:
    """A term, what it means, and where it is used."""
    lines = [*term.names, f"  {term.meaning}"]
    numbers = [name for name, text in texts.items() if find_term(term, text)]
    if numbers:
        links = [f"[{name[:2]}](../notebooks/{name}.ipynb)" for name in numbers]
        used = "lesson" if len(links) == 1 else "lessons"
        lines += ["", f"  In {used} {', '.join(links)}."]
    return [*lines, ""]


def write_docs(folder: Path) -> None:
    """Copy the pages of `docs/` and the README, their links led to where the site has them."""
    for path in docs():
        text = relead(path.read_text(encoding="utf-8"), "docs")
        (folder / "docs" / path.name).write_text(text, encoding="utf-8")
    readme = relead((ROOT / "README.md").read_text(encoding="utf-8"), "")
    (folder / "README.md").write_text(readme, encoding="utf-8")
