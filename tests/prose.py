"""Where the prose of lessons and pages points: a mention of a lesson is a link, a link leads there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

from course import notebooks

NUMBER = r"(?:\d\d|A\d)\b"
TO_COME = {"06", "11", "18", "19", "20", "21", "A1"}
LINK = re.compile(r"!?\[([^\]]*)\]\(([^)\s]*)[^)]*\)")
# "lesson 05", "lessons 03, 07 and 08"; a § stands where a link was.
MENTION = re.compile(
    rf"[Ll]essons?\s+(?:{NUMBER}|§)(?:(?:,? and|,? or|,|–|-| to)\s*(?:{NUMBER}|§))*"
)


def problems() -> Iterator[tuple[Path, str]]:
    """Every mention of a lesson that is no link to it, and every link that leads nowhere."""
    numbers = {path.name[:2] for path in notebooks.select()}
    pages = [
        notebooks.ROOT / "README.md",
        *sorted((notebooks.ROOT / "docs").glob("*.md")),
    ]
    for path in [*notebooks.readable(notebooks.select()), *pages]:
        if path.suffix == ".md":
            text = path.read_text(encoding="utf-8") if path.exists() else ""
        else:
            text = "\n\n".join(
                notebooks.source(cell)
                for cell in notebooks.cells(notebooks.read(path), "markdown")
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
