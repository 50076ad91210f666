"""The glossary as data: which terms there are, what each means, and where a text says one."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from utils.errors import ROOT

# A translation says a term in English and, in brackets, in its own language.
ENTRY = re.compile(
    r"^- \*\*(.+?)\*\*(?: ?[(（]([^)）]+)[)）])?[:：] ?(.+?)(?=\n- |\n\n|\n#|\Z)",
    re.M | re.S,
)
HANGUL = re.compile("[가-힣]")
# Words of everyday language besides. These lessons speak of the term; any other does so only in bold.
ORDINARY: dict[str, set[str]] = {
    "block": {"08", "09", "15", "glossary"},
    "forgetting": set(),
    "power": set(),
    "step": {"10", "11", "12", "14", "15", "16", "17", "A1", "glossary"},
}
# Where a lesson's own use of a word is another than the glossary's; a translation has these besides.
OTHER_SENSE: dict[str, set[str]] = {
    "notebooks/00_start_here": {"block"},
    "notebooks/02_inside_a_transformer": {"activation", "block"},
    "notebooks/04_big_data_in_small_memory": {"batch", "recipe"},
    "notebooks/05_tokenizers_up_close": {"rank"},
    "notebooks/06_special_tokens_and_templates": {"document"},
    "notebooks/07_training_a_tokenizer": {"rank", "encoder", "head"},
    "notebooks/08_from_text_to_batches": {"stride", "utilization"},
    "notebooks/09_pretraining": {"power", "rank"},
    "notebooks/11_sharding": {"confidence interval"},
    "notebooks/13_finetuning_with_the_trainer": {"step"},
    "notebooks/14_the_full_training_loop": {"corpus", "document", "parameter"},
    "notebooks/15_masked_language_models": {"rank", "recipe"},
    "notebooks/17_instruction_tuning": {"rank"},
    "notebooks/19_code_that_runs": {"document", "rank"},
    "notebooks/20_inference": {"rank"},
    "notebooks/21_serving": {"confidence interval", "document"},
    "ko/00_start_here": {"truncation"},
    "zh/00_start_here": {"document", "epoch", "head", "packing", "truncation"},
}


@dataclass(frozen=True)
class Term:
    """A term with the names it goes by, and what it means."""

    names: tuple[str, ...]
    meaning: str


class Said(NamedTuple):
    """A text of a page, and how a reader meets it."""

    text: str
    bold: bool = False
    folded: bool = False


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


def other_sense(name: str) -> set[str]:
    """The terms whose words a page says in another sense: those of its lesson and, in a translation, more.

    >>> sorted(other_sense("ko/00_start_here"))
    ['block', 'truncation']
    """
    _, _, page = name.rpartition("/")
    lesson = f"notebooks/{page}"
    words: set[str] = set()
    for place in (lesson, name):
        words |= OTHER_SENSE.get(place, set())
    return words


def first_use(
    term: Term, said: Sequence[Said], known: Sequence[Term], page: str
) -> tuple[int, re.Match[str]] | None:
    """Which text of a page first says a term, and where in it: in sight, unless only a fold says it."""
    only_bold = is_ordinary(term, page)
    first = None
    for place, one in enumerate(said):
        if only_bold and not one.bold:
            continue
        match = find_term(term, one.text, known)
        if match and not one.folded:
            return place, match
        if match and not first:
            first = place, match
    return first


def is_ordinary(term: Term, page: str) -> bool:
    """Whether a page says a word as everyday language does.

    >>> step = Term(("step",), "one update of the weights")
    >>> is_ordinary(step, "00_start_here"), is_ordinary(step, "10_many_processes")
    (True, False)
    """
    name = term.names[0]
    if name not in ORDINARY:
        return False
    lessons = tuple(ORDINARY[name])
    return not page.startswith(lessons)
