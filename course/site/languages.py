"""Pages in other languages: a catalogue of paragraphs for each page, in gettext's own format.

`translations/ko/glossary.po` holds each English paragraph (msgid) with its translation (msgstr). A
paragraph that has changed since finds no translation and stands in English, until somebody looks at it.
"""

from __future__ import annotations

import difflib
import functools
import posixpath
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import polib

from course.notebooks import cells, read, source
from course.site.links import relead
from course.site.terms import Term, read_terms
from utils.errors import ROOT

NAMES = {"ko": "한국어", "zh": "中文"}
# Where the pages of a catalogue come from.
SOURCES = {
    "README": "README.md",
    "00_start_here": "notebooks/00_start_here.ipynb",
    "glossary": "docs/glossary.md",
}
# What stands on top of a page of which a part is not translated.
PARTLY = {
    "ko": "*이 쪽은 {total}개 문단 가운데 {translated}개가 번역되어 있습니다. 나머지는 영어입니다.*",
    "zh": "*本页共 {total} 段，已译 {translated} 段，其余仍是英文。*",
}
# The catalogue of what the site itself says, which is no page of its own.
SITE = "site"
# In the header of a lesson and on its folds.
IN_LESSONS = [
    "**Run this lesson** on",
    "your machine",
    "**Mend it:**",
    "edit it",
    "report a mistake",
    "Last runs at `smoke`:",
    "not recorded yet",
    "before its last change",
    "The outputs below are of",
    "recorded on",
    "green in",
    "green on",
    "red in",
    "Set-up",
    "Solution",
]
# Around the text of a page, by our templates, the theme and Sphinx.
AROUND = [
    "Contents",
    "Menu",
    "Expand",
    "Light mode",
    "Dark mode",
    "Auto light/dark, in light mode",
    "Auto light/dark, in dark mode",
    "Toggle Light / Dark / Auto color theme",
    "Toggle site navigation sidebar",
    "Toggle table of contents sidebar",
    "Toggle navigation of utils",
    "Toggle navigation of stages",
    "Skip to content",
    "Search",
    "Lessons",
    "Beside the lessons",
    "Other languages",
    "Languages",
    "Index",
    "Link to this heading",
    "Back to top",
    "On this page",
    "Next",
    "Previous",
    "Mend this page:",
    "Made with",
    "Last updated on",
    "Built from commit",
    "repository",
    "issues",
]
ARTICLE = re.compile(r"(<article\b.*?</article>)", re.S)
# A text between two tags, and its end: behind some stands a day.
TEXT = re.compile(r"(>\s*)([^<>]*?\S)((?: \d{4}-\d\d-\d\d)?\s*<)")
LABEL = re.compile(r'( (?:aria-label|placeholder|title)=")([^"]+)(")')
CODE = re.compile(r"^```.*?^```", re.M | re.S)
# A paragraph ends at an empty line, and in a list where the next point begins.
BREAK = re.compile(r"(\n\s*\n|\n(?=- ))")
# Of a table, each cell is a paragraph.
TABLE = re.compile(r"(?:\s*(?:\|.*|<!--.*-->)(?:\n|\Z))+")
BAR = re.compile(r"((?<!\\)\||\n)")
# What has no words of a language: code, tags, formulas, where a link leads; the doors of a header.
WORDLESS = re.compile(
    r"`[^`]*`|<[^>]*>|\$\$.*?\$\$|\]\([^)]*\)|^\[!\[.*|^---.*", re.S
)
NUMBERS = re.compile(r"\d[\w.,+:()/-]*\s*\w*")
WORD = re.compile(r"[^\W\d_]{3}")
LINK = re.compile(r'(\]\(|src="|href=")(?!https?:|data:|mailto:)([^)"\s]+)')
HEADING = re.compile(r"(?m)^#+ (.+)$")
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


def parts_of(text: str) -> list[str]:
    """A text cut into its paragraphs, with what parts them in between.

    >>> parts_of("a\\n\\n| b | c |\\n")
    ['a', '\\n\\n', '', '|', ' b ', '|', ' c ', '|', '', '\\n', '']
    """
    parts = []
    for part in BREAK.split(text):
        if TABLE.fullmatch(part):
            parts += BAR.split(part)
        else:
            parts.append(part)
    return parts


def has_words(part: str, in_table: bool = False) -> bool:
    """Whether there is anything to translate.

    >>> has_words("`make`"), has_words("at 30 s, 2 cores", in_table=True), has_words("[run](it.md)")
    (False, False, True)
    """
    text = WORDLESS.sub("", part)
    if in_table:
        text = NUMBERS.sub("", text)
    return bool(WORD.search(text))


def paragraphs(text: str) -> list[str]:
    """The paragraphs of a page that a person translates, each once; code and rules are none.

    >>> paragraphs("# Word\\n\\n- one\\n  line\\n- two\\n\\n```\\ncode\\n```")
    ['# Word', '- one line', '- two']
    """
    found = []
    prose = CODE.sub("", text)
    for block in BREAK.split(prose):
        parts = parts_of(block)
        in_table = len(parts) > 1
        for part in parts:
            part = part.strip()
            if has_words(part, in_table):
                found.append(plain(part))
    once = dict.fromkeys(found)
    return list(once)


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
    folder = ROOT / "translations"
    name = f"{page}.po"
    return folder / language / name


def source_of(page: str) -> str:
    """The English text of a page; of a lesson, its prose; of the site, what it says itself."""
    if page == SITE:
        return "\n\n".join([*IN_LESSONS, *AROUND])
    path = ROOT / SOURCES[page]
    if path.suffix == ".ipynb":
        prose = [source(cell) for cell in cells(read(path), "markdown")]
        return "\n\n".join(prose)
    return path.read_text(encoding="utf-8")


def translate(text: str, known: dict[str, str]) -> str:
    """A page with each paragraph that is known in another language, and the others as they are."""
    translated = []
    for part in parts_of(text):
        other = known.get(plain(part))
        if other is None:
            translated.append(part)
            continue
        # The spaces of a cell of a table stay.
        start = " " * part.startswith(" ")
        translated.append(start + other + start)
    return "".join(translated)


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


def catalogues() -> list[str]:
    """What there is to translate: the pages, and what the site itself says."""
    return [*SOURCES, SITE]


def report() -> list[str]:
    """A line for each page and language."""
    lines = []
    for language, name in NAMES.items():
        for page in catalogues():
            known = catalogue(language, page)
            state = state_of(source_of(page), known)
            total = state.translated + len(state.missing)
            lines.append(f"{name} {page}: {state.translated} of {total} paragraphs")
            lines += [f"  stale: {part[:70]}" for part in state.stale]
            lines += [f"  to do: {part[:70]}" for part in state.missing]
    return lines


def slug(heading: str) -> str:
    """The name by which a link finds a heading.

    >>> slug("What `it` is, and why")
    'what-it-is-and-why'
    """
    text = heading.lower()
    text = re.sub(r"[^\w\- ]", "", text)
    text = text.strip()
    return text.replace(" ", "-")


@functools.cache
def anchors(language: str, page: str) -> dict[str, str]:
    """The names of a page's headings in English, each with that in another language."""
    known = catalogue(language, page)
    names = {}
    for heading in HEADING.finditer(CODE.sub("", source_of(page))):
        other = known.get(heading[0], heading[0]).lstrip("# ")
        names[slug(heading[1])] = slug(other)
    return names


def leader(page: str, language: str) -> Callable[[re.Match[str]], str]:
    """What leads the links of a translated page, which stands in a folder of its language."""
    here = SOURCES[page]
    folder = posixpath.dirname(here)
    pages = {place: name for name, place in SOURCES.items()}

    def lead(link: re.Match[str]) -> str:
        path, mark, anchor = link[2].partition("#")
        place = here
        if path:
            place = posixpath.join(folder, path)
            place = posixpath.normpath(place)
        other = pages.get(place)
        target = posixpath.relpath(place, language)
        if other and path_of(language, other).exists():
            names = anchors(language, other)
            anchor = names.get(anchor, anchor)
            target = posixpath.basename(place)
        if not path:
            target = ""
        return link[1] + target + mark + anchor

    return lead


def settle(text: str, page: str, language: str) -> str:
    """A translated text with its links led from the folder of its language."""
    return LINK.sub(leader(page, language), text)


@functools.cache
def words(language: str) -> dict[str, str]:
    """What the site itself says, each with its translation."""
    return catalogue(language, SITE)


def say(text: str, language: str) -> str:
    """What the site says in a lesson, in another language.

    >>> say("[edit it](a)", "zh"), say("[edit it](a)", "")
    ('[编辑](a)', '[edit it](a)')
    """
    known = words(language)
    for english in IN_LESSONS:
        text = text.replace(english, known.get(english, english))
    return text


def say_around(page: str, language: str) -> str:
    """A page with what the site says around its text in another language.

    >>> say_around('<a title="Menu">Next</a><article>Next</article>', "zh")
    '<a title="菜单">下一页</a><article>Next</article>'
    """
    known = words(language)

    def put(found: re.Match[str]) -> str:
        before, text, behind = found.groups()
        other = known.get(text, text)
        return before + other + behind

    parts = ARTICLE.split(page)
    for place in range(0, len(parts), 2):
        part = parts[place]
        parts[place] = TEXT.sub(put, part)
    whole = "".join(parts)
    return LABEL.sub(put, whole)


def note(page: str, language: str, known: dict[str, str]) -> str:
    """What is said on top of a page that is not whole."""
    english = source_of(page)
    state = state_of(english, known)
    if not state.missing:
        return ""
    done = state.translated
    total = done + len(state.missing)
    form = PARTLY[language]
    words = form.format(total=total, translated=done)
    return f"\n\n{words}"


def noted(text: str, words: str) -> str:
    """A text with a note behind its title."""
    title, rest = re.match(r"(# [^\n]*)?(.*)", text, re.S).groups()  # type: ignore[union-attr]
    return f"{title}{words}{rest}" if title else text


def translated() -> list[tuple[str, str, str]]:
    """Each translated page: its language, its name, its title."""
    found = []
    for language in NAMES:
        for page in SOURCES:
            known = catalogue(language, page)
            if known:
                (title, *_) = HEADING.findall(translate(source_of(page), known))
                found.append((language, page, title))
    return found


@functools.cache
def glossary(language: str) -> list[Term]:
    """The terms of the course, with their names and meanings in another language."""
    known = catalogue(language, "glossary")
    return read_terms(translate(source_of("glossary"), known))


def lessons() -> list[str]:
    """The lessons among the pages that may be translated."""
    return [page for page, place in SOURCES.items() if place.endswith(".ipynb")]


def term_anchor(name: str, language: str) -> str:
    """The label by which a link finds a term on a translated page; the whole site has one of each.

    >>> term_anchor("pass@k", "ko")
    'term-ko-passk'
    """
    return f"term-{language}-{slug(name)}"


def with_anchors(text: str, language: str) -> str:
    """A translated glossary, with a label before each term.

    >>> with_anchors("- **BLEU, chrF**: a score.", "ko")
    '- (term-ko-bleu)=\\n  **BLEU, chrF**: a score.'
    """

    def put(start: re.Match[str]) -> str:
        anchor = term_anchor(start[1], language)
        return f"- ({anchor})=\n  {start[0][2:]}"

    return re.sub(r"(?m)^- \*\*([^*,]+)", put, text)


def page_text(page: str, language: str) -> str:
    """A page of `docs/`, or the README, in another language."""
    known = catalogue(language, page)
    words = note(page, language, known)
    english = source_of(page)
    text = translate(english, known)
    if page == "glossary":
        text = with_anchors(text, language)
    folder = posixpath.dirname(SOURCES[page])
    text = relead(text, folder)
    text = settle(text, page, language)
    return noted(text, words)


def write_pages(folder: Path) -> None:
    """Write the translated pages of `docs/` and the README into the site's sources."""
    for language, page, _ in translated():
        if SOURCES[page].endswith(".md"):
            name = f"{page}.md"
            target = folder / language / name
            target.parent.mkdir(parents=True, exist_ok=True)
            text = page_text(page, language)
            target.write_text(text, encoding="utf-8", newline="\n")
