"""Writes what is generated: headers, bootstrap cells, footers, the README's table.

Everything comes from the notebook's own metadata, its own calls, and the recorded runs in
`results/`, so that one `sync` after a change brings all of it up to date.
"""
from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import jinja2
import nbformat

from course.fetch import taken_by
from utils import artifacts
from utils.errors import ROOT
from utils.show import format_bytes
from course.notebooks import calls, maker_of, select

TEMPLATES = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
                               trim_blocks=True, lstrip_blocks=True,
                               autoescape=lambda name: name == "report.j2")
GENERATED = ("header", "bootstrap", "footer")  # the tags of the cells that are written here


def costs(number: str) -> list[dict[str, str]]:
    """Time, peak memory and disk of a lesson at each profile, from the recorded runs."""
    rows = []
    for profile in ("smoke", "laptop", "gpu"):
        run = artifacts.read_json(ROOT / "results" / f"{profile}.json") or {}
        cost = run.get("notebooks", {}).get(number)
        rows.append({"profile": profile, "time": "not yet run"} if cost is None else {
            "profile": profile, "time": say_seconds(cost["seconds"]), "machine": cost["machine"],
            "memory": say_size(cost["peak_bytes"]), "disk": say_size(cost["disk_bytes"])})
    return rows


def say_seconds(seconds: float) -> str:
    """Seconds as a person says them, rounded up.

    >>> say_seconds(7.2), say_seconds(34), say_seconds(250)
    ('10 s', '40 s', '5 min')
    """
    return f"{-(-seconds // 10) * 10:.0f} s" if seconds <= 90 else f"{-(-seconds // 60):.0f} min"


def say_size(count: float) -> str:
    """Bytes to two digits, rounded up.

    >>> say_size(1_234_000_000), say_size(0)
    ('1.3 GB', 'nothing')
    """
    step = 10 ** max(0, len(str(int(count))) - 2)
    return format_bytes(-(-count // step) * step) if count else "nothing"


def title_of(path: Path) -> str:
    """`05 · Training a tokenizer`."""
    given = nbformat.read(path, as_version=4).metadata.get("course", {})
    return f"{path.name[:2]} · {given.get('title', path.stem[3:])}"


def facts_of(path: Path) -> dict[str, Any]:
    """All that a template wants to know of a notebook."""
    given = nbformat.read(path, as_version=4).metadata.get("course", {})
    paths = [None, *select(), None]
    here = paths.index(path)
    near = [p and {"file": p.name, "title": title_of(p)} for p in (paths[here - 1], paths[here + 1])]
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {**given, "number": path.name[:2], "file": path.name, "title": title_of(path),
            "repository": project["urls"]["Repository"], "costs": costs(path.name[:2]),
            "assets": taken_by(path),
            "takes": {name: maker_of(name) for name in calls(path, "need")},
            "makes": calls(path, "publish"), "before": near[0], "after": near[1]}


def wanted() -> dict[Path, str]:
    """Every file that holds something generated, as it should be."""
    texts, lessons = {}, [facts_of(path) for path in select()]
    for path, facts in zip(select(), lessons):
        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            for tag in set(cell.metadata.get("tags", [])) & set(GENERATED):
                if tag == "bootstrap":
                    cell.metadata.update(jupyter={"source_hidden": True}, cellView="form")
                cell.source = TEMPLATES.get_template(f"{tag}.j2").render(facts).strip()
        texts[path] = nbformat.writes(notebook) + "\n"
    table = TEMPLATES.get_template("lessons.j2").render(lessons=lessons).strip()
    marks = "<!-- lessons:begin -->", "<!-- lessons:end -->"
    held = (ROOT / "README.md").read_text(encoding="utf-8")
    texts[ROOT / "README.md"] = re.sub(f"{marks[0]}.*?{marks[1]}", lambda _: f"\n{table}\n".join(marks),
                                       held, flags=re.S)
    return texts


def stale() -> list[Path]:
    """The files in which something generated is not as it should be."""
    return [path for path, text in wanted().items() if path.read_text(encoding="utf-8") != text]


def sync() -> list[Path]:
    """Bring everything generated up to date; the files that changed."""
    changed = stale()
    for path, text in wanted().items():
        if path in changed:
            path.write_text(text, encoding="utf-8")
    return changed
