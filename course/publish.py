"""A copy of the lessons for places that open one file at a time: Colab and Kaggle.

Pictures and links of a lesson are relative, so that a checkout needs no network. In the copy they
lead to the one address in pyproject.toml, at the tag of this version.
"""

from __future__ import annotations

import re
import shutil
import tomllib
from collections.abc import Collection
from pathlib import Path

from course.notebooks import Notebook, cells, read, select, source, tags, write
from course.results import CHECKOUT
from utils.errors import CourseError

# The branch that badges lead to: the copies of the newest release.
BRANCH = "colab"
LINK = re.compile(
    r'(\]\(|src="|href=")(?!https?:|data:|#|mailto:|attachment:)([^)"\s]+)'
)


def project() -> dict[str, str]:
    """The version of the course, and its one address."""
    text = (CHECKOUT / "pyproject.toml").read_text(encoding="utf-8")
    facts = tomllib.loads(text)["project"]
    return {"version": facts["version"], "repository": facts["urls"]["Repository"]}


def absolute(
    text: str, repository: str, tag: str, beside: Collection[str] = ()
) -> str:
    """Markdown of a lesson with its pictures and links led to a repository; those to files beside it stay.

    >>> absolute("![a](images/a.svg) [b](../docs/b.md)", "https://github.com/me/it", "v1")
    '![a](https://github.com/me/it/raw/v1/notebooks/images/a.svg) [b](https://github.com/me/it/blob/v1/docs/b.md)'
    >>> absolute("[a](05_a.ipynb#b)", "https://github.com/me/it", "v1", ["05_a.ipynb"])
    '[a](05_a.ipynb#b)'
    """

    def lead(match: re.Match) -> str:
        name, _, _ = match[2].partition("#")
        if name in beside:
            return match[0]
        path = f"notebooks/{match[2]}"
        while "/../" in path:
            path = re.sub(r"[^/]+/\.\./", "", path, count=1)
        kind = "raw" if Path(path).suffix in (".svg", ".png") else "blob"
        ref = tag
        if path.endswith(".ipynb"):
            ref = BRANCH
        return f"{match[1]}{repository}/{kind}/{ref}/{path}"

    return LINK.sub(lead, text)


def copy_of(
    notebook: Notebook, facts: dict[str, str], beside: Collection[str] = ()
) -> Notebook:
    """A notebook whose Markdown needs nothing but what lies beside it."""
    repository = facts["repository"]
    tag = f"v{facts['version']}"
    for cell in cells(notebook, "markdown"):
        text = absolute(source(cell), repository, tag, beside)
        cell["source"] = text.splitlines(keepends=True)
    return notebook


def publish(folder: Path) -> list[Path]:
    """Write the copies of all lessons into a folder."""
    facts = project()
    copies = []
    for path in select():
        copy = folder / "notebooks" / path.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        write(copy, copy_of(read(path), facts))
        copies.append(copy)
    return copies


def without_solutions(notebook: Notebook) -> Notebook:
    """A lesson for a class: its solutions are gone, with all that they printed."""
    kept = [cell for cell in notebook["cells"] if "solution" not in tags(cell)]
    notebook["cells"] = kept
    return notebook


def student(folder: Path, paths: list[Path]) -> list[Path]:
    """Write the chosen lessons without their solutions into a folder, their pictures beside them.

    Links to what is not in the folder lead to the repository.
    """
    if folder.exists() and any(folder.iterdir()):
        raise CourseError("the folder holds something", folder, "name a new one")
    pictures = CHECKOUT / "notebooks" / "images"
    shutil.copytree(pictures, folder / "images")
    beside = {f"images/{picture.name}" for picture in pictures.iterdir()}
    beside |= {path.name for path in paths}
    facts = project()
    copies = []
    for path in paths:
        copy = folder / path.name
        lesson = without_solutions(read(path))
        write(copy, copy_of(lesson, facts, beside))
        copies.append(copy)
    return copies
