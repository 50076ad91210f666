"""The notebooks as files: which there are, what each takes and makes, where its prose points."""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from utils.errors import ROOT, CourseError

# A copy of a reader's own, like `05_tokenizers-Copy1.ipynb`, is not a lesson.
LESSON_NAME = re.compile(r"(\d\d|A\d)_[a-z0-9_]+\.ipynb")
NUMBER = r"(?:\d\d|A\d)\b"
TO_COME = {"02", "06", "11", "18", "19", "20", "21", "A1"}
LINK = re.compile(r"!?\[([^\]]*)\]\(([^)\s]*)[^)]*\)")
# "lesson 05", "lessons 03, 07 and 08"; a § stands where a link was.
MENTION = re.compile(
    rf"[Ll]essons?\s+(?:{NUMBER}|§)(?:(?:,? and|,? or|,|–|-| to)\s*(?:{NUMBER}|§))*"
)


def select(only: str | None = None) -> list[Path]:
    """The lessons named by `05`, `04-07` or `00,02`, in reading order; without a name, all."""
    folder = ROOT / "notebooks"
    paths = sorted(
        path for path in folder.glob("*.ipynb") if LESSON_NAME.fullmatch(path.name)
    )
    for number, count in Counter(path.name[:2] for path in paths).items():
        if count > 1:
            names = " and ".join(
                path.name for path in paths if path.name[:2] == number
            )
            raise CourseError(
                f"two lessons have the number {number}: {names}",
                folder,
                "rename one",
            )
    only = (only or "").replace(" ", "")
    if not only:
        return paths
    if not re.fullmatch(r"[A\d]\d?(-[A\d]\d?)?(,[A\d]\d?(-[A\d]\d?)?)*", only):
        raise CourseError(
            f"ONLY={only} is not understood", fix="write it as 05, 04-07 or 00,02"
        )
    spans = [
        [number.zfill(2) for number in part.split("-")] for part in only.split(",")
    ]
    chosen = [
        path for path in paths if any(s[0] <= path.name[:2] <= s[-1] for s in spans)
    ]
    if not chosen:
        known = ", ".join(path.name[:2] for path in paths)
        raise CourseError(
            f"there is no notebook {only}", folder, f"choose of {known}"
        )
    return chosen


def read(path: Path) -> dict[str, Any]:
    """A notebook's JSON."""
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        notebook["cells"]
    except (ValueError, LookupError, TypeError) as error:
        raise CourseError(
            f"this notebook is not whole: {error}", path, "save or restore it"
        ) from None
    return notebook


def write(path: Path, notebook: dict[str, Any]) -> None:
    """Write a notebook as Jupyter does, the order of its keys as it was."""
    path.write_text(
        json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def cells(notebook: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """The cells of one kind: `code` or `markdown`."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def source(cell: dict[str, Any]) -> str:
    """The text of a cell, which JSON may hold in lines."""
    return "".join(cell["source"])


def tags(cell: dict[str, Any]) -> list[str]:
    """The tags of a cell."""
    return cell["metadata"].get("tags", [])


def code_cells(path: Path) -> list[str]:
    """The Python of each code cell, magics blanked."""
    sources = [source(cell) for cell in cells(read(path), "code")]
    return [re.sub(r"(?m)^[ \t]*[%!].*$", "pass", text) for text in sources]


def calls(path: Path, function: str) -> list[str]:
    """The literal first arguments of every call `….function("…")` in a notebook, each once."""
    pairs = _calls(path, path.stat().st_mtime_ns)
    return list(
        dict.fromkeys(argument for name, argument in pairs if name == function)
    )


@functools.lru_cache(maxsize=256)
def _calls(path: Path, changed: int) -> list[tuple[str, str]]:
    return [pair for cell in code_cells(path) for pair in called(cell)]


def called(code: str) -> list[tuple[str, str]]:
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


def readable(paths: list[Path]) -> list[Path]:
    """Those that are whole; one that is half written does not disturb the others."""
    whole = []
    for path in paths:
        with contextlib.suppress(CourseError):
            read(path)
            whole.append(path)
    return whole


def inputs(path: Path) -> dict[str, Path]:
    """The artifacts that a lesson takes, each with the earlier lesson that publishes it."""
    makers = {}
    for earlier in readable(select()):
        if earlier < path:
            makers.update(dict.fromkeys(calls(earlier, "publish"), earlier))
    names = calls(path, "need") if readable([path]) else []
    return {name: makers[name] for name in names if name in makers}


def edited(path: Path) -> bool:
    """Whether a reader has changed a lesson since she got it; False where git cannot tell."""
    command = ["git", "show", f"HEAD:./{path.name}"]
    shown = subprocess.run(
        command, cwd=path.parent, capture_output=True, encoding="utf-8"
    )
    if shown.returncode:
        return False
    before = [source(cell) for cell in json.loads(shown.stdout)["cells"]]
    return before != [source(cell) for cell in read(path)["cells"]]


# prose --------------------------------------------------------------------------------------------


def link_mentions(text: str) -> str:
    """Prose in which each mention of a lesson that is there has become a link."""
    files = {path.name[:2]: path.name for path in select()}

    def link(mention: re.Match) -> str:
        numbers = re.findall(NUMBER, mention[0])
        if len(numbers) == 1 and numbers[0] in files:
            return f"[{mention[0]}]({files[numbers[0]]})"
        return re.sub(
            NUMBER,
            lambda n: f"[{n[0]}]({files[n[0]]})" if n[0] in files else n[0],
            mention[0],
        )

    return MENTION.sub(link, text)


def prose_problems() -> Iterator[tuple[Path, str]]:
    """Every mention of a lesson that is no link to it, and every link that leads nowhere."""
    numbers = {path.name[:2] for path in select()}
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for path in [*readable(select()), *pages]:
        if path.suffix == ".md":
            text = path.read_text(encoding="utf-8") if path.exists() else ""
        else:
            text = "\n\n".join(
                source(cell) for cell in cells(read(path), "markdown")
            )
        text = re.sub(r"(?ms)^ *```.*?^ *```|`[^`\n]*`", "", text)
        for words, target in LINK.findall(text):
            yield from (
                (path, problem) for problem in _link_problems(path, words, target)
            )
        for mention in MENTION.findall(LINK.sub("§", text)):
            for number in re.findall(NUMBER, mention):
                if number in numbers - {path.name[:2]}:
                    yield path, f'"{mention}" is not a link to lesson {number}'
                elif number not in numbers | TO_COME:
                    yield path, f'"{mention}": there is no lesson {number}'


def _link_problems(page: Path, words: str, target: str) -> Iterator[str]:
    """What is wrong with one link: it leads nowhere, or to another lesson than it says."""
    file = unquote(target.partition("#")[0])
    if not file or re.match(r"\w+:", file):
        return
    place = page.parent / file
    if not place.exists():
        yield f"[{words}]({target}) leads nowhere"
    number = re.fullmatch(rf"(?:[Ll]esson )?({NUMBER})", words)
    if number and not place.name.startswith(f"{number[1]}_"):
        yield f"[{words}]({target}) is not lesson {number[1]}"
