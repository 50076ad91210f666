"""Pages in other languages: a catalogue of paragraphs for each page, in gettext's own format.

`translations/ko/glossary.po` holds each English paragraph (msgid) with its translation (msgstr). A
paragraph that has changed since finds no translation and stands in English, until somebody looks at it.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

import polib

from utils.errors import ROOT

NAMES = {"ko": "한국어", "zh": "中文"}
# Where the pages of a catalogue come from.
SOURCES = {"glossary": "docs/glossary.md"}
CODE = re.compile(r"^```.*?^```", re.M | re.S)
# A paragraph ends at an empty line, and in a list where the next point begins.
BREAK = re.compile(r"(\n\s*\n|\n(?=- ))")
ALIKE = 0.6


@dataclass(frozen=True)
class State:
    """How much of a page is translated, and what of the translation is older than the page."""

    translated: int
    missing: list[str]
    stale: list[str]


def plain(paragraph: str) -> str:
    """A paragraph however its lines are broken.

    >>> plain("- a\\n  word ")
    '- a word'
    """
    return " ".join(paragraph.split())


def paragraphs(text: str) -> list[str]:
    """The paragraphs of a page that a person translates; code and rules are none.

    >>> paragraphs("# A\\n\\n- one\\n  line\\n- two\\n\\n```\\ncode\\n```")
    ['# A', '- one line', '- two']
    """
    parts = [plain(part) for part in BREAK.split(CODE.sub("", text))]
    return [part for part in parts if re.search(r"\w", part)]


def catalogue(language: str, page: str) -> dict[str, str]:
    """The translated paragraphs of a page; what a translator has marked as doubtful is none."""
    path = path_of(language, page)
    if not path.exists():
        return {}
    file = polib.pofile(str(path))
    known = {}
    for entry in file.translated_entries():
        known[entry.msgid] = entry.msgstr
    return known


def path_of(language: str, page: str) -> Path:
    """The file of a catalogue."""
    folder = ROOT / "translations" / language
    return folder / f"{page}.po"


def source_of(page: str) -> str:
    """The English page."""
    path = ROOT / SOURCES[page]
    return path.read_text(encoding="utf-8")


def translate(text: str, known: dict[str, str]) -> str:
    """A page with each paragraph that is known in another language, and the others as they are."""
    parts = BREAK.split(text)
    return "".join(known.get(plain(part), part) for part in parts)


def state_of(text: str, known: dict[str, str]) -> State:
    """What is translated, what is not, and what was and has changed."""
    wanted = paragraphs(text)
    missing = [part for part in wanted if part not in known]
    stale = [part for part in known if part not in wanted]
    return State(len(wanted) - len(missing), missing, stale)


def renew(language: str, page: str) -> State:
    """Bring a catalogue up to date: new paragraphs empty, changed ones marked with what was near."""
    path = path_of(language, page)
    text = source_of(page)
    known = catalogue(language, page)
    file = polib.POFile(wrapwidth=110)
    file.metadata = {
        "Language": language,
        "Content-Type": "text/plain; charset=utf-8",
    }
    for paragraph in paragraphs(text):
        entry = polib.POEntry(msgid=paragraph, msgstr=known.get(paragraph, ""))
        near = difflib.get_close_matches(paragraph, known, 1, ALIKE)
        if not entry.msgstr and near:
            entry.msgstr = known[near[0]]
            entry.previous_msgid = near[0]
            entry.flags.append("fuzzy")
        file.append(entry)
    path.parent.mkdir(parents=True, exist_ok=True)
    file.save(str(path))
    return state_of(text, known)


def report() -> list[str]:
    """A line for each page and language."""
    lines = []
    for language, name in NAMES.items():
        for page in SOURCES:
            known = catalogue(language, page)
            state = state_of(source_of(page), known)
            total = state.translated + len(state.missing)
            lines.append(f"{name} {page}: {state.translated} of {total} paragraphs")
            lines += [f"  stale: {part[:70]}" for part in state.stale]
            lines += [f"  to do: {part[:70]}" for part in state.missing]
    return lines


def write_pages(folder: Path) -> list[str]:
    """Write the translated pages into the site's sources; their names."""
    names = []
    for language in NAMES:
        for page in SOURCES:
            known = catalogue(language, page)
            if known:
                target = folder / language / f"{page}.md"
                target.parent.mkdir(parents=True, exist_ok=True)
                text = translate(source_of(page), known)
                target.write_text(text, encoding="utf-8", newline="\n")
                names.append(f"{language}/{page}")
    return names
