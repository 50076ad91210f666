"""The glossary as data: which terms there are, what each means, and where a text says one."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from utils.errors import ROOT

# A translation says a term in English and, in brackets, in its own language.
ENTRY = re.compile(
    r"^- \*\*(.+?)\*\*(?: ?[(（]([^)）]+)[)）])?[:：] ?(.+?)(?=\n- |\n\n|\n#|\Z)",
    re.M | re.S,
)
HANGUL = re.compile("[가-힣]")
# Ordinary words besides: only where a lesson sets one in bold does it speak of the term.
ORDINARY = {"power", "head", "step", "seed", "forgetting", "block", "rank"}
ORDINARY |= {"document", "parameter", "bootstrap", "stride", "recipe", "batch"}
# Where a lesson's own use of a word is another than the glossary's.
OTHER_SENSE: dict[str, set[str]] = {
    "notebooks/00_start_here": {"block"},
    "notebooks/02_inside_a_transformer": {"block"},
    "notebooks/07_training_a_tokenizer": {"rank", "encoder"},
    "notebooks/08_from_text_to_batches": {"stride", "utilization"},
    "notebooks/09_pretraining": {"power"},
    "notebooks/11_sharding": {"confidence interval"},
    "notebooks/13_finetuning_with_the_trainer": {"step"},
    "notebooks/14_the_full_training_loop": {"corpus"},
    "notebooks/17_instruction_tuning": {"rank"},
    "notebooks/21_serving": {"confidence interval"},
}


@dataclass(frozen=True)
class Term:
    """A term with the names it goes by, and what it means."""

    names: tuple[str, ...]
    meaning: str


def read_terms(text: str) -> list[Term]:
    """The terms of a glossary's text.

    >>> read_terms("- **BLEU, chrF**: scores of\\n  a text.\\n- **token**: a piece.")[0]
    Term(names=('BLEU', 'chrF'), meaning='scores of a text.')
    >>> read_terms("- **token**（词元）：一段文字。")[0].names
    ('token', '词元')
    """
    terms = []
    for names, translated, meaning in ENTRY.findall(text):
        names = ",".join(filter(None, [names, translated]))
        parts = tuple(name.strip() for name in re.split("[,，、]", names))
        line = " ".join(meaning.split())
        term = Term(parts, line)
        terms.append(term)
    return terms


def glossary(root: Path = ROOT) -> list[Term]:
    """The terms of the course."""
    page = root / "docs" / "glossary.md"
    text = page.read_text(encoding="utf-8")
    return read_terms(text)


@functools.cache
def pattern_of(name: str) -> re.Pattern[str]:
    """What finds a name, or its plural, in a text; an acronym keeps its capitals.

    Korean writes its particles behind a word, Chinese puts no spaces between words.

    >>> bool(pattern_of("token").search("Tokens")), bool(pattern_of("BPE").search("bpe"))
    (True, False)
    >>> bool(pattern_of("토큰").search("이 토큰을")), bool(pattern_of("步").search("一步"))
    (True, True)
    """
    if HANGUL.search(name):
        return re.compile(rf"(?<!\w){re.escape(name)}")
    if not name.isascii():
        return re.compile(re.escape(name))
    words = re.escape(name).replace(r"\ ", r"[\s-]").replace("'", "['’]")
    loose = name.islower()
    return re.compile(
        rf"(?<![\w–-]){words}(?:e?s)?(?![\w–-])", re.I if loose else 0
    )


def longer_names(name: str, known: Sequence[Term]) -> list[str]:
    """The names of other terms that this one is a part of.

    >>> longer_names("attention", [Term(("attention mask", "attention"), "")])
    ['attention mask']
    """
    names = [other for term in known for other in term.names]
    return [
        other for other in names if other != name and pattern_of(name).search(other)
    ]


def find_term(
    term: Term, text: str, known: Sequence[Term] = ()
) -> re.Match[str] | None:
    """Where a text first says a term, under any of its names, and not as a part of a longer one."""
    found = []
    for name in term.names:
        matches = list(pattern_of(name).finditer(text))
        if not matches:
            continue
        longer = [pattern_of(other) for other in longer_names(name, known)]
        taken = [other.span() for one in longer for other in one.finditer(text)]
        for match in matches:
            start, end = match.span()
            if not any(first <= start and end <= last for first, last in taken):
                found.append(match)
                break
    return min(found, key=lambda match: match.start(), default=None)


def first_use(
    term: Term, said: Sequence[tuple[str, bool]], known: Sequence[Term]
) -> tuple[int, re.Match[str]] | None:
    """Which text first says a term, and where in it: in bold where there is one, since there it is explained.

    Each text comes with whether it is bold.
    """
    found = []
    for place, (text, bold) in enumerate(said):
        match = find_term(term, text, known)
        if match:
            found.append((place, match, bold))
    explained = [(place, match) for place, match, bold in found if bold]
    if explained or is_ordinary(term):
        return next(iter(explained), None)
    return next(((place, match) for place, match, _ in found), None)


def is_ordinary(term: Term) -> bool:
    """Whether a word is also one of everyday language."""
    return term.names[0] in ORDINARY
