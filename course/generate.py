"""Writes what is generated: headers, set-up cells, footers, the README's tables, the sources' page, a graph.

Everything comes from the notebook's own metadata, its own calls, the recorded runs in `results/`,
and the address in `pyproject.toml`, so that one `sync` after a change brings all of it up to date.
"""

from __future__ import annotations

import hashlib
import math
import re
import tomllib
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2

from course import prerequisites, sources
from course.fetch import taken_by
from course.notebooks import (
    Notebook,
    calls,
    edited,
    inputs,
    read,
    readable,
    select,
    sizes,
    source,
    tags,
    write,
)
from course.publish import BRANCH, project
from course.results import recorded
from utils.artifacts import read_json
from utils.errors import ROOT, CourseError
from utils.show import cell_html, format_bytes

TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    trim_blocks=True,
    lstrip_blocks=True,
    autoescape=lambda name: name == "report.j2",
)
Facts = dict[str, Any]
QUESTIONS = ROOT / "notebooks" / "questions"
# The tags of the cells that are written here.
GENERATED = {"header", "bootstrap", "footer"}
# Where people write the address; in generated cells it comes from the templates.
ADDRESSED = ["README.md", "*.yml", "docs/*.md", ".devcontainer/*.json"]
ADDRESSED += [".github/**/*.yml", ".github/**/*.md", "launch/**/*.md"]
# Written last: what it says is what all the others say.
CITATION = "CITATION.cff"


def cost_of(number: str, profile: str) -> Facts:
    """Time, peak memory and disk of a lesson at a profile, from the recorded run."""
    cost = recorded(profile).get(number)
    if cost is None:
        return {"profile": profile, "time": "not yet run"}
    return {
        "profile": profile,
        "time": round_seconds(cost["seconds"]),
        "memory": round_size(cost["peak_bytes"]),
        "disk": round_size(cost["disk_bytes"]),
        "machine": cost["machine"],
    }


def profiles_of(path: Path) -> list[str]:
    """The profiles that a lesson's header shows.

    A large one stands there only if the lesson has a size for it or was recorded at it, because
    where it has neither it would do the laptop's work and promise more.
    """
    names = ["smoke", "laptop"]
    own = sizes(path)
    for name in ("gpu", "cluster"):
        if name in own or path.name[:2] in recorded(name):
            names.append(name)
    return names


def round_seconds(seconds: float) -> str:
    """Seconds as a person says them, rounded up.

    >>> round_seconds(7.2), round_seconds(34), round_seconds(250)
    ('10 s', '40 s', '5 min')
    """
    if seconds <= 90:
        tens = math.ceil(seconds / 10)
        return f"{tens}0 s"
    return f"{math.ceil(seconds / 60)} min"


def round_size(count: float) -> str:
    """Bytes to two digits, rounded up.

    >>> round_size(1_234_000_000), round_size(0)
    ('1.3 GB', 'nothing')
    """
    if not count:
        return "nothing"
    step = 10 ** max(0, len(str(int(count))) - 2)
    return format_bytes(math.ceil(count / step) * step)


def title_of(path: Path) -> str:
    """`05 · Tokenizers up close`."""
    about = read(path)["metadata"].get("course", {})
    return f"{path.name[:2]} · {about.get('title', path.stem[3:])}"


def facts_of(path: Path) -> Facts:
    """All that a template wants to know of a notebook."""
    notebook = read(path)
    number = path.name[:2]
    return {
        **project(),
        "branch": BRANCH,
        **notebook["metadata"].get("course", {}),
        "number": number,
        "file": path.name,
        "title": title_of(path),
        "costs": [cost_of(number, name) for name in profiles_of(path)],
        "assets": taken_by(path),
        "takes": dict.fromkeys(calls(path, "need")) | inputs(path),
        "makes": calls(path, "publish"),
        "questions": questions_of(number),
        "after_lessons": needed_by(path, notebook),
        "exercises": len(calls(path, "exercise")),
    }


def needed_by(path: Path, notebook: Notebook) -> list[str]:
    """The lessons that come before one: those that its header names, and the makers of what it takes."""
    about = notebook["metadata"].get("course", {})
    named = re.findall(r"\]\((\w\w_\w+\.ipynb)\)", about.get("needs", ""))
    made = [maker.name for maker in inputs(path).values()]
    return sorted({*named, *made})


def questions_of(number: str, folder: Path = QUESTIONS) -> list[Facts]:
    """The questions that a lesson ends with; none where nobody has written any.

    A question without one right choice, or a choice without a reason, is an error.
    """
    path = folder / f"{number}.toml"
    if not path.exists():
        return []
    questions = tomllib.loads(path.read_text(encoding="utf-8"))["questions"]
    for question in questions:
        choices = question["choices"]
        for choice in choices:
            # Within HTML nothing is Markdown any more.
            choice["text"] = cell_html(choice["text"])
        right = [choice for choice in choices if choice.get("right")]
        if len(right) != 1 or not all(choice.get("why") for choice in choices):
            what = f"a question wants one right choice, and a reason for each: {question['ask']}"
            raise CourseError(what, path, "mend the question")
        question["choices"] = shuffled(choices)
    return questions


def shuffled(choices: list[Facts]) -> list[Facts]:
    """Choices in an order that follows from their words, since a writer puts the right one first.

    >>> [choice["text"] for choice in shuffled([{"text": "one"}, {"text": "two"}])]
    ['two', 'one']
    """

    def drawn(choice: Facts) -> str:
        return hashlib.sha256(choice["text"].encode()).hexdigest()

    return sorted(choices, key=drawn)


def places() -> list[Facts]:
    """The last recorded run of the course in each environment, and the lessons that have not run there."""
    record = read_json(ROOT / "results" / "places.json") or {}
    numbers = [path.name[:2] for path in select()]
    rows = []
    for name, facts in record.items():
        lessons = facts["lessons"].values()
        green = [lesson for lesson in lessons if not lesson["problems"]]
        counts = {"green": len(green), "count": len(lessons)}
        row = {**facts, **counts, "name": name}
        row["commits"] = dict.fromkeys(lesson["commit"] for lesson in lessons)
        row["missing"] = [one for one in numbers if one not in facts["lessons"]]
        rows.append(row)
    return rows


def between_marks(text: str, name: str, **facts: Any) -> str:
    """A page with a table of ours written anew between its two marks."""
    table = TEMPLATES.get_template(f"{name}.j2").render(facts).strip()
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        return text
    return f"{before}{begin}\n{table}\n{end}{after}"


def sync(write_it: bool = True) -> list[Path]:
    """Bring everything generated up to date; the files that changed, or that would."""
    paths = readable(select())
    lessons = [facts_of(path) for path in paths]
    for first, second in pairwise(lessons):
        first["after"] = second
        second["before"] = first
    for number, rows in sources.tables().items():
        for facts in lessons:
            if facts["number"] == number:
                facts["said"] = rows
    changed = []
    for path, facts in zip(paths, lessons):
        notebook = read(path)
        if fill(notebook, facts):
            changed.append(path)
            if write_it:
                write(path, notebook)
    tables = {"lessons": {"lessons": lessons}, "places": {"places": places()}}
    if fill_page(ROOT / "README.md", tables, write_it):
        changed.append(ROOT / "README.md")
    changed += write_teaching(lessons, write_it)
    changed += write_sources(lessons, write_it)
    for path in change_address(write_it):
        if path not in changed:
            changed.append(path)
    return changed


def fill_page(path: Path, tables: dict[str, Facts], write_it: bool) -> bool:
    """Write the tables of a page between their marks; whether one of them changed."""
    if not path.exists():
        return False
    text = path.read_text(encoding="utf-8")
    filled = text
    for name, facts in tables.items():
        filled = between_marks(filled, name, **facts)
    changed = filled != text
    if changed and write_it:
        path.write_text(filled, encoding="utf-8", newline="\n")
    return changed


def write_sources(lessons: list[Facts], write_it: bool) -> list[Path]:
    """Write the page of what the sources say; itself, where it changed or would.

    A reader's own run of a lesson gives other outputs, and these are not the record, so they do not
    make the page stale.
    """
    page = ROOT / "docs" / "sources.md"
    said = [facts for facts in lessons if facts.get("said")]
    if not said:
        return []
    verdicts = Counter(row["verdict"] for facts in said for row in facts["said"])
    counts = ", ".join(f"{n} {verdict}" for verdict, n in verdicts.most_common())
    total = f"Of {verdicts.total()} rows: {counts}."
    texts = sources.load().source.values()
    template = TEMPLATES.get_template("sources.j2")
    text = template.render(lessons=said, texts=texts, counts=total, page=True)
    text = text.strip() + "\n"
    if page.exists() and page.read_text(encoding="utf-8") == text:
        return []
    if write_it:
        page.write_text(text, encoding="utf-8", newline="\n")
    elif any(edited(ROOT / "notebooks" / facts["file"]) for facts in said):
        return []
    return [page]


def write_teaching(lessons: list[Facts], write_it: bool) -> list[Path]:
    """Write the table of the page for teachers, and its drawing; which of the two changed or would."""
    page = ROOT / "docs" / "teaching.md"
    if not lessons or not page.exists():
        return []
    words = prerequisites.in_words(lessons)
    tables: dict[str, Facts] = {
        "hours": {"lessons": lessons},
        "prerequisites": {"words": words},
    }
    changed = []
    if fill_page(page, tables, write_it):
        changed.append(page)
    picture = page.with_name("prerequisites.svg")
    text = prerequisites.drawing(lessons)
    if not picture.exists() or picture.read_text(encoding="utf-8") != text:
        changed.append(picture)
        if write_it:
            picture.write_text(text, encoding="utf-8", newline="\n")
    return changed


def addresses(repository: str) -> list[str]:
    """What leads to a repository: itself, its codespace, and its pages.

    >>> addresses("https://github.com/me/course")[1:]
    ['codespaces.new/me/course', 'me.github.io/course']
    """
    parts = repository.rstrip("/").split("/")
    owner = parts[-2]
    name = parts[-1]
    together = f"{owner}/{name}"
    return [
        "github.com/" + together,
        "codespaces.new/" + together,
        f"{owner}.github.io/{name}",
    ]


def change_address(write_it: bool = True) -> list[Path]:
    """Replace the address that the citation names by that of pyproject.toml; the files that hold it."""
    citation = ROOT / CITATION
    if not citation.exists():
        return []
    text = citation.read_text(encoding="utf-8")
    old = re.search(r"(?m)^repository-code: \"(.+)\"$", text)
    if not old or old[1] == project()["repository"]:
        return []
    changed = []
    for path in [*addressed(), citation]:
        text = path.read_text(encoding="utf-8")
        filled = replace_address(text, old[1])
        if filled != text:
            changed.append(path)
            if write_it:
                path.write_text(filled, encoding="utf-8", newline="\n")
    return changed


def addressed() -> list[Path]:
    """The files in which the address stands by hand."""
    paths = []
    for pattern in ADDRESSED:
        paths += sorted(ROOT.glob(pattern))
    return paths


def replace_address(text: str, old: str) -> str:
    """A text in which every address of a repository is today's; a longer name is another one."""
    today = project()["repository"]
    news = addresses(today)
    for before, after in zip(addresses(old), news):
        whole = re.escape(before)
        whole += r"(?![\w-])"
        text = re.sub(whole, after, text)
    return text


def fill(notebook: Notebook, facts: Facts) -> bool:
    """Write the generated cells of a notebook; whether one of them changed."""
    changed = False
    for cell in notebook["cells"]:
        for tag in GENERATED & set(tags(cell)):
            text = TEMPLATES.get_template(f"{tag}.j2").render(facts).strip()
            if source(cell) != text:
                cell["source"] = text.splitlines(keepends=True)
                changed = True
    return changed
