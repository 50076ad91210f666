"""The cells of a lesson, for tests that run them: by name, changed or as they are."""

from __future__ import annotations

import ast
from typing import Any

import nbformat

from course.notebooks import select


def cells(lesson: str) -> list[Any]:
    """All cells of the lesson with this number."""
    (path,) = (path for path in select() if path.name.startswith(f"{lesson}_"))
    return nbformat.read(path, as_version=4).cells


def cell(lesson: str, name: str) -> str:
    """The source of a cell, with the parts before it that belong to it."""
    return "\n\n".join(
        one.source for one in cells(lesson) if one.id.split("-part")[0] == name
    )


def imports(lesson: str) -> str:
    """The imports of all cells of a lesson."""
    lines = []
    for one in cells(lesson):
        if one.cell_type == "code":
            for node in ast.parse(one.source).body:
                if isinstance(node, ast.Import | ast.ImportFrom):
                    lines.append(ast.unparse(node))
    return "\n".join(lines)


def run_cells(lesson: str, wanted: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run some cells, after the lesson's imports, in a copy of the names: what is then defined."""
    names = dict(names)
    exec(imports(lesson), names)
    for name in wanted.split():
        exec(cell(lesson, name), names)
    return names
