"""docs/sources.toml: each row stands on a cell or a proof, and what is generated from it is fresh."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import source_proofs
from pydantic import ValidationError

from course import generate, notebooks, sources
from course.sources import Row
from utils.errors import ROOT, CourseError

PAGE = sources.load()
ROWS = PAGE.row
NUMBERS = {path.name[:2]: path for path in notebooks.select()}
IDS = [f"{row.lesson} {row.quote[:30]}" for row in ROWS]
PROVED = [row for row in ROWS if row.proof]
BESIDE = [row for row in ROWS if row.cell and row.lesson in NUMBERS]


def row(**changes: str) -> Row:
    facts = {"lesson": "01", "source": "scratch", "quote": "x", "verdict": "right"}
    return Row(**{**facts, "cell": "c", **changes})


NOTEBOOK = {
    "cells": [
        {
            "id": "c",
            "cell_type": "code",
            "metadata": {},
            "source": ["print(7)"],
            "outputs": [
                {"text": ["size 7 MB\n"]},
                {
                    "data": {
                        "text/plain": ["length: 3"],
                        sources.RECORD_TYPE: {
                            "kind": "figure",
                            "name": "length",
                            "value": 3.0,
                            "unit": "cm",
                        },
                    }
                },
            ],
        }
    ]
}


@pytest.mark.parametrize(
    "words, cell",
    [
        ("set `save_steps`", "“set `save_steps`”"),
        ("`a` and` b`", "“`a` and` b`”"),
        ("a_b of `c_d`", r"“a\_b of `c_d`”"),
        ("| `x`", r"“\| `x`”"),
        ("a_b", "`a_b`"),
        ("a fence ``` of code", "`` a fence ``` of code ``"),
        ("no `fellow", "`` no `fellow ``"),
    ],
)
def test_what_a_source_sets_as_code_is_code_in_the_table(
    words: str, cell: str
) -> None:
    assert sources.code(words) == cell


def test_no_page_shows_the_marks_of_code() -> None:
    page = (ROOT / "docs" / "sources.md").read_text(encoding="utf-8")
    shown = re.findall(r"(?<!`)`` (.+?) ``(?!`)", page)
    # Only where they are what the quotation is about.
    assert all("```" in words for words in shown)


@pytest.mark.parametrize("one", ROWS, ids=IDS)
def test_a_row_stands_on_one_thing(one: Row) -> None:
    kinds = [one.figure, one.read, one.sees]
    if one.cell:
        assert sum(map(bool, kinds)) == 1 and not one.proof
        assert not one.ours, "what a cell holds is not typed"
    else:
        assert not any(kinds)
        assert bool(one.proof) == bool(one.ours)
    decided = bool(one.cell or one.proof)
    assert decided or one.verdict == "not decided", "nothing decides this"
    assert one.why or one.verdict in ("right", "wrong", "half right", "outdated")
    assert one.source in PAGE.source


@pytest.mark.parametrize("one", BESIDE, ids=lambda one: f"{one.lesson} {one.cell}")
def test_the_cell_holds_it(one: Row) -> None:
    assert sources.ours(one, notebooks.read(NUMBERS[one.lesson]))


@pytest.mark.parametrize("one", PROVED, ids=lambda one: one.proof)
def test_a_proof_gives_what_the_row_says(one: Row) -> None:
    assert getattr(source_proofs, one.proof)() == one.ours


def test_every_proof_has_its_row() -> None:
    text = Path(source_proofs.__file__).read_text(encoding="utf-8")
    found = set(re.findall(r"(?m)^def (\w+)\(\) -> str:", text))
    assert found == {one.proof for one in PROVED}


def test_no_statement_is_there_twice() -> None:
    told = [(one.source, one.quote, one.cell, one.proof) for one in ROWS]
    assert len(set(told)) == len(told)


@pytest.mark.parametrize("one", ROWS, ids=IDS)
def test_a_quotation_is_short(one: Row) -> None:
    assert 0 < len(one.quote.split()) <= 30 and one.quote == one.quote.strip()


@pytest.mark.parametrize("one", ROWS, ids=IDS)
def test_a_quotation_is_exact(one: Row) -> None:
    """Where the five texts are at hand, in files that begin with the rows' names for them."""
    folder = os.environ.get("COURSE_SOURCES")
    if not folder:
        pytest.skip("COURSE_SOURCES names no folder with the texts")
    text = next(Path(folder).glob(f"{one.source}*")).read_text(encoding="utf-8")
    assert one.quote in text


@pytest.mark.parametrize(
    "changes, found",
    [
        ({"figure": "length"}, "length: 3 cm"),
        ({"read": r"size (\d) (MB)"}, "7 · MB"),
        ({"sees": "print(7)"}, "“print(7)”"),
    ],
)
def test_our_side_comes_from_the_cell(changes: dict[str, str], found: str) -> None:
    assert sources.ours(row(**changes), NOTEBOOK) == found


@pytest.mark.parametrize(
    "changes",
    [
        {"cell": "gone", "sees": "print(7)"},
        {"figure": "width"},
        {"read": r"size (\d) GB"},
        {"sees": "print(8)"},
    ],
)
def test_what_the_cell_lacks_is_an_error(changes: dict[str, str]) -> None:
    with pytest.raises(CourseError, match="no such cell"):
        sources.ours(row(**changes), NOTEBOOK)


def test_a_lesson_without_outputs_stops_nothing() -> None:
    cleared = {"cells": [{**NOTEBOOK["cells"][0], "outputs": []}]}
    assert sources.our_cell(row(figure="length"), cleared) == "not recorded yet"
    assert sources.our_cell(row(figure="length"), NOTEBOOK) == "length: 3 cm"


def test_a_misspelt_verdict_is_an_error() -> None:
    with pytest.raises(ValidationError):
        row(verdict="rihgt")


def test_a_misspelt_field_names_the_file(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    assert sources.load().row == []
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/sources.toml").write_text("[[row]]\nlessn = '01'\n")
    with pytest.raises(CourseError, match="mend that row"):
        sources.load()


@pytest.mark.release
def test_page_and_tables_are_fresh() -> None:
    stale = generate.sync(write_it=False)
    assert ROOT / "docs" / "sources.md" not in stale
    assert [path.name for path in stale if path.suffix == ".ipynb"] == []
