"""Floor 1: the notebooks as files: which there are, what each takes and makes, read from its own calls."""
from __future__ import annotations

import ast
import functools
import json
import re
from pathlib import Path

from utils.errors import CourseError, ROOT


def select(only: str | None = None) -> list[Path]:
    """The notebooks named by `05`, `04-07` or `00,02`, in reading order; without a name, all."""
    paths = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
    only = (only or "").replace(" ", "")
    if not only:
        return paths
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", only):
        raise CourseError(f"ONLY={only} is not understood", fix="write it as 05, 04-07 or 00,02")
    spans = [part.split("-") for part in only.split(",")]
    chosen = [p for p in paths if any(int(s[0]) <= int(p.name[:2]) <= int(s[-1]) for s in spans)]
    if not chosen:
        known = ", ".join(p.name[:2] for p in paths)
        raise CourseError(f"there is no notebook {only}", ROOT / "notebooks", f"choose of {known}")
    return chosen


def code_cells(path: Path) -> list[str]:
    """The Python of each code cell, magics blanked."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    return [re.sub(r"(?m)^[ \t]*[%!].*$", "pass", source) for source in sources]


def calls(path: Path, function: str) -> list[str]:
    """The literal first arguments of every call `….function("…")` in a notebook, each once."""
    return list(dict.fromkeys(name for cell in code_cells(path) for name in called_with(cell, function)))


def called_with(code: str, function: str) -> list[str]:
    """The same in one cell; one that does not parse makes no calls, and its kernel will say why.

    >>> called_with('a = lesson.need("corpus"); need("x")', "need"), called_with("x = (", "need")
    (['corpus', 'x'], [])
    """
    try:
        nodes = ast.walk(ast.parse(code))
    except SyntaxError:
        return []
    found = [node for node in nodes if isinstance(node, ast.Call) and node.args
             and getattr(node.func, "attr", getattr(node.func, "id", None)) == function]
    values = [getattr(call.args[0], "value", None) for call in found]
    return [value for value in values if isinstance(value, str)]


@functools.cache
def makers() -> dict[str, str]:
    """Which lesson publishes which artifact, read from the notebooks themselves."""
    return {name: path.name[:2] for path in select() for name in calls(path, "publish")}


def maker_of(name: str) -> str | None:
    """The number of the lesson that publishes an artifact."""
    return makers().get(name)
