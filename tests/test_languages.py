"""Pages in other languages: each paragraph has its own, and what is older than the English is told."""

import re

import polib
import pytest

from course.site import languages

PAGE = """# Title

- **one**: a first
  point.
- **two**: another.

```bash
make it
```

A last line.
"""


@pytest.fixture
def page(tmp_path, monkeypatch):
    """A page with an empty shelf of catalogues."""
    (tmp_path / "docs").mkdir()
    path = tmp_path / "docs" / "glossary.md"
    path.write_text(PAGE, encoding="utf-8")
    monkeypatch.setattr(languages, "ROOT", tmp_path)
    return path


def fill(words: dict[str, str]) -> None:
    path = languages.path_of("ko", "glossary")
    file = polib.pofile(str(path))
    for entry in file:
        entry.msgstr = words.get(entry.msgid, entry.msgstr)
    file.save()


def test_a_page_is_translated_paragraph_by_paragraph(page):
    assert languages.renew("ko", "glossary").missing == languages.paragraphs(PAGE)
    fill({"# Title": "# 제목", "- **one**: a first point.": "- **one**: 첫째."})
    text = languages.translate(PAGE, languages.catalogue("ko", "glossary"))
    assert text.startswith(
        "# 제목\n\n- **one**: 첫째.\n- **two**: another.\n\n```bash"
    )
    assert text.endswith("A last line.\n")


def test_a_changed_paragraph_is_stale_and_stands_in_english(page):
    languages.renew("ko", "glossary")
    fill({"A last line.": "마지막 줄."})
    page.write_text(
        PAGE.replace("A last line.", "A very last line."), encoding="utf-8"
    )
    known = languages.catalogue("ko", "glossary")
    state = languages.state_of(languages.source_of("glossary"), known)
    assert state.stale == ["A last line."]
    assert "A very last line." in state.missing
    assert "  stale: A last line." in languages.report()
    languages.renew("ko", "glossary")
    file = polib.pofile(str(languages.path_of("ko", "glossary")))
    entry = file.find("A very last line.")
    assert entry.fuzzy and entry.msgstr == "마지막 줄."
    assert entry.previous_msgid == "A last line."
    text = languages.translate(
        page.read_text("utf-8"), languages.catalogue("ko", "glossary")
    )
    assert "A very last line." in text and "마지막" not in text


@pytest.mark.parametrize("language", languages.NAMES)
def test_a_translated_entry_keeps_the_term_and_its_code(language):
    known = languages.catalogue(language, "glossary")
    assert len(known) >= 100
    for english, other in known.items():
        term = re.match(r"- \*\*(.+?)\*\*", english)
        if term:
            assert other.startswith(term[0]), english
        assert re.findall(r"`[^`]+`", english) == re.findall(r"`[^`]+`", other)
        assert english.count("#") == other.count("#")
