"""Where the prose of lessons and pages points: a mention of a lesson is a link, a link leads there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

from course import notebooks

# What our lessons said where the field has a word, so that nobody could search the web with it.
HOUSE_WORDS = {
    r"dear(er|est)?": "costly",
    r"for ever": "endlessly",
    r"stands? in a": "is in a",
    r"so many (rows|tokens|steps|words)": "n",
    r"foreign (ground|text|source)": "from another source",
    r"praises?|blames?": "positive, negative",
    r"(learn|learned|learnt|learns) (rows )?by heart": "overfitting",
    r"runs? of (ten|five|\w+teen) words": "n-gram, shingle",
    r"share of the (learning )?rate": "schedule",
    r"manner": "way",
    r"exams?": "test set",
    r"rehearsals?": "validation set",
    r"blanks": "spaces",
    # "The sign that it trains" and "a sign and an exponent" are no characters.
    r"of signs (that|or|and) ": "character",
    r"one sign (or|and) ": "character",
    r"of one sign": "of one character",
    r"(set|file|word|sentence|row|token)s? stands? in (the|an?|one|every)": "is in",
}
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
        text = prose_of(path)
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


def prose_of(path: Path) -> str:
    """The text of a lesson or a page, its code left out."""
    if path.suffix == ".md":
        text = path.read_text(encoding="utf-8") if path.exists() else ""
    else:
        cells = notebooks.cells(notebooks.read(path), "markdown")
        text = "\n\n".join(notebooks.source(cell) for cell in cells)
    return re.sub(r"(?ms)^ *```.*?^ *```|`[^`\n]*`", "", text)


def sentence_lengths(path: Path) -> list[int]:
    """Words of each sentence of a lesson, without headings, tables, pictures and generated cells."""
    lengths = []
    for cell in notebooks.cells(notebooks.read(path), "markdown"):
        if {"header", "footer"} & set(cell["metadata"].get("tags", [])):
            continue
        text = re.sub(r"(?ms)^ *```.*?^ *```", "", notebooks.source(cell))
        text = re.sub(r"(?m)!\[[^]]*\]\([^)]*\)|^\s*(\||#|<).*$", "", text)
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
        text = re.sub(r"`[^`]*`|\$[^$]*\$", "X", text)
        for sentence in re.split(r"(?<=[.!?:])\s+|\n\n+", text):
            words = re.findall(r"[\w'’-]+", sentence)
            if words:
                lengths.append(len(words))
    return lengths


def house_words() -> Iterator[tuple[Path, str]]:
    """Every word of ours that a lesson uses where the field has its own."""
    for path in notebooks.readable(notebooks.select()):
        text = " ".join(prose_of(path).split())
        for pattern, word in HOUSE_WORDS.items():
            for match in re.finditer(rf"(?i)\b({pattern})\b", text):
                yield path, f'"{match[0]}": the field says {word}'


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
