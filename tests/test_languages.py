"""Pages in other languages: each paragraph has its own, and what is older than the English is told."""

import re

import polib
import pytest

from course.site import languages
from course.site.lessons import page_of

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
    monkeypatch.setattr(languages, "SOURCES", {"glossary": "docs/glossary.md"})
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


def test_a_cell_of_a_table_is_a_paragraph(page):
    table = "# Word\n\n<!-- x:begin -->\n| `a` | what |\n|:--|--:|\n| 30 s | it does |\n"
    assert languages.paragraphs(table) == ["# Word", "what", "it does"]
    known = {"it does": "한다", "what": "무엇"}
    assert "| `a` | 무엇 |\n|:--|--:|\n| 30 s | 한다 |\n" in languages.translate(
        table, known
    )


def test_a_page_that_is_not_whole_says_so(page):
    languages.renew("ko", "glossary")
    fill({"# Title": "# 제목"})
    known = languages.catalogue("ko", "glossary")
    words = languages.note("glossary", "ko", known)
    assert "4개 문단 가운데 1개" in words
    assert languages.noted("# 제목\n\nA", words).startswith(f"# 제목{words}\n\nA")


def test_links_lead_to_translated_pages_where_there_are_some():
    def settle(text):
        return languages.settle(text, "00_start_here", "ko")

    lessons = languages.anchors("ko", "README")["lessons"]
    assert lessons == "강의-목록"
    assert settle("[a](../README.md#lessons)") == f"[a](README.md#{lessons})"
    assert settle("[a](../docs/glossary.md)") == "[a](glossary.md)"
    assert settle("[a](01_x.ipynb)") == "[a](../notebooks/01_x.ipynb)"
    assert settle("![a](images/a.svg)") == "![a](../notebooks/images/a.svg)"
    assert settle("[a](https://a.org/b)") == "[a](https://a.org/b)"
    inner = languages.settle("[a](#lessons)", "README", "ko")
    assert inner == f"[a](#{lessons})"


@pytest.mark.parametrize("language", languages.NAMES)
def test_code_and_outputs_of_a_lesson_stay(language, tmp_path):
    path = languages.ROOT / languages.SOURCES["00_start_here"]
    english = page_of(path, tmp_path / "notebooks")
    other = page_of(path, tmp_path / language, language)
    assert len(english["cells"]) == len(other["cells"])
    for one, two in zip(english["cells"], other["cells"]):
        if one["cell_type"] == "code":
            assert one["source"] == two["source"], one["id"]
            assert one["outputs"] == two["outputs"], one["id"]
    assert (tmp_path / language / path.name).exists()


@pytest.mark.parametrize(
    "language, wanted",
    [("ko", {"설치", "풀이 00.1"}), ("zh", {"安装", "解答 00.1"})],
)
def test_a_fold_of_a_translated_lesson_is_named_in_its_language(
    language, wanted, tmp_path
):
    path = languages.ROOT / languages.SOURCES["00_start_here"]
    lesson = page_of(path, tmp_path / language, language)
    folds = [cell["metadata"].get("mystnb", {}) for cell in lesson["cells"]]
    names = {fold.get("code_prompt_show") for fold in folds}
    assert wanted <= names
    assert not re.search("Solution|Set-up", str(names))


def test_what_the_site_says_around_a_text_is_translated():
    def say(text):
        return languages.say_around(text, "ko")

    assert say("<p>\n  Next\n</p>") == "<p>\n  다음\n</p>"
    assert say('<input placeholder="Search" name="Next">') == (
        '<input placeholder="검색" name="Next">'
    )
    assert say("<p>Last updated on 2026-02-03</p>") == (
        "<p>마지막 갱신: 2026-02-03</p>"
    )
    assert say("<a>Next of kin</a>") == "<a>Next of kin</a>"
    inside = '<article><p>Next</p><a title="Link to this heading">#</a></article>'
    assert say(inside) == inside.replace(
        "Link to this heading", "이 제목으로 가는 링크"
    )


# What holds the translations that are there to the English.


def code_of(text: str) -> list[str]:
    spans = re.findall(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", text)
    return sorted(inside for _, inside in spans)


def starts(text: str) -> str:
    return re.match(r"(#+ |- |!\[|> |<details><summary>|\*\*\d+\.)?", text)[0]


def addresses(text: str) -> list[str]:
    return sorted(re.findall(r"\]\(([^)]*)\)", text))


@pytest.mark.parametrize("page", languages.SOURCES)
@pytest.mark.parametrize("language", languages.NAMES)
def test_a_translation_keeps_code_links_and_form(language, page):
    known = languages.catalogue(language, page)
    assert len(known) >= 100
    for english, other in known.items():
        assert code_of(english) == code_of(other), english
        assert addresses(english) == addresses(other), english
        assert starts(english) == starts(other), english
        assert english.count("**") == other.count("**"), english


@pytest.mark.parametrize("language", languages.NAMES)
def test_all_that_the_site_says_is_translated(language):
    known = languages.catalogue(language, languages.SITE)
    assert set(known) == {*languages.IN_LESSONS, *languages.AROUND}
    for english, other in known.items():
        assert not other.isascii(), english
        assert code_of(english) == code_of(other), english
        assert english.count("**") == other.count("**"), english


@pytest.mark.parametrize("language", languages.NAMES)
def test_an_entry_of_the_glossary_keeps_its_term(language):
    for english, other in languages.catalogue(language, "glossary").items():
        term = re.match(r"- \*\*(.+?)\*\*", english)
        if term:
            assert other.startswith(term[0]), english


@pytest.mark.parametrize("page", languages.SOURCES)
@pytest.mark.parametrize("language", languages.NAMES)
def test_most_of_a_page_is_translated(language, page):
    state = languages.state_of(
        languages.source_of(page), languages.catalogue(language, page)
    )
    assert state.translated >= 4 * len(state.missing)
