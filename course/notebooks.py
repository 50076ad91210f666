"""The notebooks as files: which there are, what is in them, what each takes and makes."""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import re
import subprocess
from pathlib import Path
from typing import Any

from utils.errors import ROOT, CourseError

Notebook = dict[str, Any]
Cell = dict[str, Any]
Calls = list[tuple[str, str]]
# A copy of a reader's own, like `05_tokenizers-Copy1.ipynb`, is not a lesson.
LESSON_NAME = re.compile(r"(\d\d|A\d)_[a-z0-9_]+\.ipynb")


def select(only: str | None = None) -> list[Path]:
    """The lessons named by `05`, `04-07` or `00,02`, in reading order; without a name, all."""
    folder = ROOT / "notebooks"
    paths = sorted(folder.glob("*.ipynb"))
    paths = [path for path in paths if LESSON_NAME.fullmatch(path.name)]
    only = (only or "").replace(" ", "")
    if not only:
        return paths
    chosen = set()
    for part in only.split(","):
        span = [number.zfill(2).upper() for number in part.split("-")]
        chosen |= {path for path in paths if span[0] <= path.name[:2] <= span[-1]}
    if not chosen:
        known = ", ".join(path.name[:2] for path in paths)
        way = f"write it as 05, 04-07 or 00,02; there are {known}"
        raise CourseError(f"there is no notebook {only}", folder, way)
    return sorted(chosen)


def read(path: Path) -> Notebook:
    """A notebook's JSON."""
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        notebook["cells"]
    except (ValueError, LookupError, TypeError) as error:
        what = f"this notebook is not whole: {error}"
        raise CourseError(what, path, "save or restore it") from None
    return notebook


def readable(paths: list[Path]) -> list[Path]:
    """Those that are whole; one that is half written does not disturb the others."""
    whole = []
    for path in paths:
        with contextlib.suppress(CourseError):
            read(path)
            whole.append(path)
    return whole


def write(path: Path, notebook: Notebook) -> None:
    """Write a notebook as Jupyter does, the order of its keys as it was."""
    text = json.dumps(notebook, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8", newline="\n")


def cells(notebook: Notebook, kind: str) -> list[Cell]:
    """The cells of one kind: `code` or `markdown`."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def source(cell: Cell) -> str:
    """The text of a cell, which JSON may hold in lines."""
    return "".join(cell["source"])


def tags(cell: Cell) -> list[str]:
    """The tags of a cell."""
    return cell["metadata"].get("tags", [])


def code_cells(path: Path) -> list[str]:
    """The Python of each code cell, magics blanked."""
    sources = [source(cell) for cell in cells(read(path), "code")]
    return [re.sub(r"(?m)^[ \t]*[%!].*$", "pass", text) for text in sources]


def called(code: str) -> Calls:
    """Functions called with a literal string first; code that does not parse makes no calls.

    >>> called('a = lesson.need("corpus"); need("x")'), called("x = (")
    ([('need', 'corpus'), ('need', 'x')], [])
    """
    try:
        nodes = list(ast.walk(ast.parse(code)))
    except SyntaxError:
        return []
    pairs = []
    for node in nodes:
        if isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            argument = getattr(node.args[0], "value", None)
            if isinstance(argument, str):
                pairs.append((name, argument))
    return pairs


def calls(path: Path, function: str) -> list[str]:
    """The literal first arguments of every call `….function("…")` in a notebook, each once."""
    pairs = _calls(path, path.stat().st_mtime_ns)
    names = [argument for name, argument in pairs if name == function]
    return list(dict.fromkeys(names))


@functools.lru_cache(maxsize=256)
def _calls(path: Path, changed: int) -> Calls:
    pairs = []
    with contextlib.suppress(CourseError):  # half written, it makes no calls
        for code in code_cells(path):
            pairs += called(code)
    return pairs


def sizes(path: Path) -> set[str]:
    """The profiles that a lesson names where it picks a size: `lesson.pick(smoke=1, laptop=2)`."""
    profiles = set()
    with contextlib.suppress(CourseError):  # half written, it picks nothing
        for code in code_cells(path):
            with contextlib.suppress(SyntaxError):
                profiles |= picked(code)
    return profiles


def picked(code: str) -> set[str]:
    """The profiles for which some code has a size.

    >>> sorted(picked("a = lesson.pick(smoke=1, gpu=[2]); take(cluster=3)"))
    ['gpu', 'smoke']
    """
    profiles = set()
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", "")
        if name != "pick":
            continue
        for keyword in node.keywords:
            profiles.add(keyword.arg or "")
    return profiles


def parameters(path: Path) -> list[str]:
    """The names that the cell tagged `parameters` gives a value; none where there is no such cell."""
    names: list[str] = []
    with contextlib.suppress(CourseError):
        for cell in cells(read(path), "code"):
            if "parameters" in tags(cell):
                names += re.findall(r"(?m)^(\w+) *=", source(cell))
    return names


def inputs(path: Path) -> dict[str, Path]:
    """The artifacts that a lesson takes, each with the earlier lesson that publishes it."""
    makers = {}
    for earlier in select():
        if earlier < path:
            makers.update(dict.fromkeys(calls(earlier, "publish"), earlier))
    names = calls(path, "need")
    return {name: makers[name] for name in names if name in makers}


def edited(path: Path) -> bool:
    """Whether a reader has changed a lesson since she got it; False where git cannot tell."""
    command = ["git", "status", "--porcelain", "--", path.name]
    with contextlib.suppress(OSError):
        status = subprocess.run(command, cwd=path.parent, capture_output=True)
        return bool(status.stdout)
    return False
