"""Message catalogues as clean pairs, split by project, and a translation memory.

    pairs, lost = clean(folder, "ro")
    train, validation, test = split(pairs)

Placeholders become markers <x1>, <x2> … , the same on both sides, and `restore` puts them back.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import polib

from utils.errors import CourseError

TAGS = "a|abbr|b|br|code|div|em|h[1-6]|i|kbd|li|ol|p|small|span|strong|sup|u|ul"
PLACEHOLDER = re.compile(
    r"%\(\w+\)[a-z]|%[sdif]|\{\w*\}|&#?\w+;|</?(?:" + TAGS + r")\b[^>]*>"
)
CEDILLA = str.maketrans("şţŞŢ", "șțȘȚ")  # left with cedilla, right with comma
TRAIN, VALIDATION = ("django", "oscar", "wagtail"), "cms"
LONGEST = 20  # words of a source
NEAR = 0.8  # a message as similar as this to a training message is no test


class Pair(NamedTuple):
    """A message in two languages."""

    project: str
    source: str  # English, with markers
    target: str  # the other language, with the same markers
    numbers: dict[str, int]  # the placeholders behind the markers


def entries(folder: Path, language: str) -> Iterator[tuple[str, Any]]:
    """The project and the entry of each message in a language's catalogues.

    `.po` is the text that people edit, `.mo` the compiled form that programs load.
    """
    pattern = f"locale/{language}/**/*.?o"
    paths = sorted(folder.rglob(pattern))
    if not paths:
        what = f"there is no catalogue of the language {language!r}"
        raise CourseError(what, folder, "choose ro, fr, de or ko")
    for path in paths:
        read = polib.mofile
        if path.suffix == ".po":
            read = polib.pofile
        inside = path.relative_to(folder)
        project = inside.parts[0]
        for entry in read(str(path)):
            yield project, entry


def state_of(entry: Any) -> str:
    """Whether a program would show this entry: live, or fuzzy, obsolete or untranslated."""
    if "fuzzy" in getattr(entry, "flags", []):  # compiled catalogues have no flags
        return "fuzzy"
    if entry.obsolete:
        return "obsolete"
    translated = entry.msgstr or any(entry.msgstr_plural.values())
    return "live" if translated else "untranslated"


def pairs_of(entry: Any) -> list[tuple[str, str]]:
    """Source and target; of a plural entry the first form and the last, as English has two."""
    forms = entry.msgstr_plural
    if not forms:
        return [(entry.msgid, entry.msgstr)]
    first = forms[0]
    last = forms[max(forms)]
    english = entry.msgid
    plural = entry.msgid_plural
    one = (english, first)
    many = (plural, last)
    return [one, many]


def same_words(text: str) -> str:
    """What counts as the same message: its words in lower case.

    >>> same_words("Log out!") == same_words("log out")
    True
    """
    return " ".join(re.findall(r"\w+", text.lower())) or text


def character_ngrams(text: str, size: int = 4) -> set[str]:
    """All runs of `size` characters of a message's words.

    >>> sorted(character_ngrams("Save"))
    [' sav', 'ave ', 'save']
    """
    padded = f" {same_words(text)} "
    places = range(max(1, len(padded) - size + 1))
    return {padded[place : place + size] for place in places}


class Memory:
    """A translation memory: finds the most similar source among known ones.

    >>> Memory(["Save the page", "Log out"]).nearest("Save this page")[1]
    0
    """

    def __init__(self, sources: Sequence[str]) -> None:
        self.ngrams = [character_ngrams(source) for source in sources]
        self.where: dict[str, list[int]] = defaultdict(list)
        for index, ngrams in enumerate(self.ngrams):
            for ngram in ngrams:
                self.where[ngram].append(index)

    def nearest(self, text: str) -> tuple[float, int]:
        """Jaccard's similarity of the nearest source, and its number; the first of equals."""
        ours = character_ngrams(text)
        shared = Counter(
            index for ngram in ours for index in self.where.get(ngram, ())
        )
        best = 0.0
        place = 0
        for index, both in sorted(shared.items()):
            theirs = self.ngrams[index]
            either = len(ours) + len(theirs) - both
            likeness = both / either
            if likeness > best:
                best = likeness
                place = index
        return best, place


def mark(text: str, numbers: dict[str, int]) -> str:
    """The text with <x1>, <x2> … for its placeholders; `numbers` remembers what stood there.

    >>> mark("%s of %s", {})
    '<x1> of <x1>'
    """

    def marker(match: re.Match[str]) -> str:
        number = numbers.setdefault(match[0], len(numbers) + 1)
        return f"<x{number}>"

    return PLACEHOLDER.sub(marker, text)


def restore(text: str, numbers: dict[str, int]) -> str:
    """The text with its placeholders; a marker that never was becomes nothing.

    >>> restore("Pagina <x1><x2>", {"%(page)s": 1})
    'Pagina %(page)s'
    """
    originals = {
        f"<x{number}>": placeholder for placeholder, number in numbers.items()
    }
    return re.sub(r"<x\d+>", lambda match: originals.get(match[0], ""), text)


def originals(pairs: Sequence[Pair]) -> tuple[list[str], list[str]]:
    """Sources and references as a user would see them."""
    sources = [restore(pair.source, pair.numbers) for pair in pairs]
    references = [restore(pair.target, pair.numbers) for pair in pairs]
    return sources, references


def placeholders_kept(translations: Sequence[str], pairs: Sequence[Pair]) -> float:
    """Of the messages with placeholders, the share whose translation holds exactly theirs."""
    asked, kept = 0, 0
    sources, _ = originals(pairs)
    for source, translation in zip(sources, translations):
        wanted = PLACEHOLDER.findall(source)
        found = PLACEHOLDER.findall(translation)
        if wanted:
            asked += 1
            kept += sorted(wanted) == sorted(found)
    return kept / max(1, asked)


def tidy(text: str) -> str:
    """One spelling of spaces, accents and Romanian letters.

    >>> tidy("şi  ţara") == "și țara"
    True
    """
    words = text.split()
    spaced = " ".join(words)
    composed = unicodedata.normalize("NFC", spaced)
    return composed.translate(CEDILLA)


def plain(text: str) -> str:
    """Text without accents.

    >>> plain("Șterge pagină")
    'Sterge pagina'
    """
    parts = unicodedata.normalize("NFD", text)
    return "".join(part for part in parts if not unicodedata.combining(part))


def problem_of(source: str, target: str) -> str:
    """Why nothing can be learned from a pair; empty if something can."""
    markers = [set(re.findall(r"<x\d+>", text)) for text in (source, target)]
    if not target:
        return "a plural form is empty"
    if markers[0] != markers[1] or len(markers[0]) > 9:
        return "placeholders differ"
    if same_words(source) == same_words(target):
        return "same in both languages"
    words = source.split()
    if len(words) > LONGEST:
        return f"over {LONGEST} words"
    return ""


def clean(folder: Path, language: str) -> tuple[list[Pair], Counter[str]]:
    """The pairs of a language that can be learned from, and why the others go."""
    kept: dict[tuple[str, str], Pair] = {}
    lost: Counter[str] = Counter()
    for project, entry in entries(folder, language):
        state = state_of(entry)
        if state != "live":
            lost[state] += 1
            continue
        for english, other in pairs_of(entry):
            english, other = tidy(english), tidy(other)
            numbers: dict[str, int] = {}
            source = mark(english, numbers)
            target = mark(other, numbers)
            said = same_words(source)
            words = project, said
            problem = problem_of(source, target)
            if not problem and words in kept:
                problem = "said before in its project"
            if problem:
                lost[problem] += 1
            else:
                kept[words] = Pair(project, source, target, numbers)
    return list(kept.values()), lost


def split(pairs: Sequence[Pair]) -> tuple[list[Pair], list[Pair], list[Pair]]:
    """Training, validation and test pairs by project; the last two unlike all training pairs.

    They are sorted by length, so that neighbours make a batch with little padding.
    """
    known = {
        same_words(pair.source): pair for pair in pairs if pair.project in TRAIN
    }
    train = list(known.values())
    memory = Memory([pair.source for pair in train])
    fresh = {}
    for pair in pairs:
        if pair.project not in TRAIN and memory.nearest(pair.source)[0] < NEAR:
            fresh[same_words(pair.source)] = pair
    others = sorted(fresh.values(), key=lambda pair: len(pair.source))
    validation = [pair for pair in others if pair.project == VALIDATION]
    test = [pair for pair in others if pair.project != VALIDATION]
    return train, validation, test


def recall(known: Sequence[Pair], pairs: Sequence[Pair]) -> list[str]:
    """What a translation memory says: the translation of the most similar known message."""
    sources = []
    for pair in known:
        sources.append(pair.source)
    memory = Memory(sources)
    said = []
    for pair in pairs:
        _, place = memory.nearest(pair.source)
        near = known[place]
        text = restore(near.target, pair.numbers)
        said.append(text)
    return said
