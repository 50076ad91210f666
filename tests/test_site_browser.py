"""The built pages as a reader meets them: links, weight, search, tasks, and axe in a real browser.

They read `build/site`, which `make site` builds. `release`, because the browser and axe come from elsewhere.
What is not there skips a test; with `COURSE_NEEDS_BROWSER=1` it fails it.
"""

from __future__ import annotations

import contextlib
import html
import json
import re
import shutil
import subprocess
import tarfile
import tempfile
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit
from xml.etree import ElementTree

import browser as browsers
import pytest

from course.site import languages, links, terms
from utils.errors import ROOT

# Where `make site` builds; what the other tests make goes elsewhere.
BUILD = ROOT / "build"
SITE = BUILD / "site"
AXE = "axe-core-4.14.1"
MOST_SCRIPT = 300_000
MOST_PAGE = 2_000_000

pytestmark = [pytest.mark.release, pytest.mark.slow]


def pages() -> list[Path]:
    return sorted(SITE.rglob("*.html"))


@pytest.fixture(scope="module", autouse=True)
def site():
    if not SITE.exists():
        browsers.go_without("no pages: make site")


@pytest.fixture(scope="module")
def browser(site):
    if browsers.why_none():
        browsers.go_without(browsers.why_none())
    with browsers.start() as one:
        yield one


# files ------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """What a page links to, loads and shows."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.scripts: list[str] = []
        self.loaded: list[str] = []
        self.alts: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        facts = {name: value or "" for name, value in attrs}
        if "id" in facts:
            self.ids.add(facts["id"])
        if tag == "a" and facts.get("href"):
            self.links.append(facts["href"])
        if tag == "script" and facts.get("src"):
            self.scripts.append(facts["src"])
        if tag == "link" and facts.get("rel") == "stylesheet":
            self.loaded.append(facts["href"])
        if tag == "img":
            self.loaded.append(facts["src"])
            self.alts.append(facts.get("alt", ""))


@cache
def read(path: Path) -> Page:
    return Page(path)


def target_of(page: Path, link: str) -> tuple[Path, str]:
    name, _, anchor = link.partition("#")
    name = unquote(name.partition("?")[0])
    return (page.parent / name).resolve() if name else page.resolve(), unquote(
        anchor
    )


def inner(links: list[str]) -> list[str]:
    return [link for link in links if not re.match(r"[a-z]+:", link)]


def test_every_link_and_anchor_leads_somewhere():
    dead = []
    count = 0
    for page in pages():
        for link in inner(read(page).links):
            count += 1
            target, anchor = target_of(page, link)
            if not target.is_file() or (
                anchor
                and target.suffix == ".html"
                and anchor not in read(target).ids
            ):
                dead.append((page.name, link))
    assert count > 5_000
    assert dead == []


def test_every_page_says_where_it_is_mended():
    for page in pages():
        name = page.relative_to(SITE).with_suffix("").as_posix()
        if name in ("genindex", "search"):
            continue
        edits = [link for link in read(page).links if "/edit/main/" in link]
        # A lesson says it on top as well.
        assert len(edits) == 1 + ("run-this" in page.read_text("utf-8")), name
        for link in edits:
            assert link.partition("/edit/main/")[2] == links.written_in(name)
        assert any("/issues/new" in link for link in read(page).links), name


def test_every_picture_and_style_is_there_and_every_picture_has_its_text():
    for page in pages():
        for place in read(page).loaded + read(page).scripts:
            assert not re.match(r"https?:|//", place), (page.name, place)
            if not place.startswith("data:"):
                assert target_of(page, place)[0].is_file(), (page.name, place)
        assert all(len(alt.split()) > 2 for alt in read(page).alts), page.name


def test_no_file_of_the_site_asks_another_host():
    asks = re.compile(
        r"(?:@import|url\(|fetch\(|importScripts\()\s*['\"]?(?:https?:)?//"
    )
    for path in [*SITE.rglob("*.css"), *SITE.rglob("*.js"), *pages()]:
        if path.name != "index.js":  # the words of the pages, no program
            text = re.sub(
                r"<pre>.*?</pre>", "", path.read_text("utf-8"), flags=re.S
            )
            assert not asks.search(text), path


def test_every_lesson_is_there_with_its_figures_solutions_and_formulas():
    from course.notebooks import cells, select, source
    from course.notebooks import read as read_notebook

    for path in select():
        page = (SITE / "notebooks" / f"{path.stem}.html").read_text(
            encoding="utf-8"
        )
        notebook = read_notebook(path)
        plots = [
            output
            for cell in cells(notebook, "code")
            for output in cell["outputs"]
            if "[figure: " in "".join(output.get("data", {}).get("text/plain", ""))
        ]
        shown = read(SITE / "notebooks" / f"{path.stem}.html").alts
        assert len(shown) >= len(plots), path.name
        assert "No description" not in page
        formulas = "".join(source(cell) for cell in cells(notebook, "markdown"))
        if "$$" in formulas:
            assert "<math" in page
        assert page.count("Solution " + path.name[:2]) >= 3, path.name
        assert "$$" not in re.sub(
            r"<pre>.*?</pre>|<code.*?</code>", "", page, flags=re.S
        )


@pytest.mark.parametrize("folder", ["docs", "ko", "zh"])
def test_a_glossary_leads_from_a_meaning_to_the_terms_it_names(folder):
    page = (SITE / folder / "glossary.html").read_text(encoding="utf-8")
    led = re.findall(r'<a class="[^"]*\bterm\b[^"]*" href="#(term-[^"]+)"', page)
    assert len(led) >= 30 and len(led) == len(set(led))
    # The name at the head of an entry explains nothing.
    assert not re.search(r"<(strong|dt)\b[^>]*><a class=\"[^\"]*\bterm\b", page)


NO_PROSE = {"h1", "h2", "h3", "h4", "a", "code", "pre", "math", "table", "details"}
VOID = {"br", "hr", "img", "input", "link", "meta", "source"}


class Prose(HTMLParser):
    """The plain texts of a lesson behind its first cell, and between them the meanings it shows."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.around: list[tuple[str, str, str]] = []
        self.begun = False
        self.texts: list[tuple[str, str]] = []
        article = languages.ARTICLE.search(page.read_text(encoding="utf-8"))
        self.feed(article[0])

    def handle_starttag(self, tag, attrs):
        facts = dict(attrs)
        look = (facts.get("class") or "").split()
        self.begun = self.begun or "cell" in look
        kind = "term" if "term" in look else ""
        if "cell" in look:
            kind = "cell"
        elif tag in NO_PROSE and not kind:
            kind = "no prose"
        if tag not in VOID:
            self.around.append((tag, kind, facts.get("title") or ""))

    def handle_endtag(self, tag):
        while tag in [name for name, _, _ in self.around]:
            if self.around.pop()[0] == tag:
                return

    def handle_data(self, data):
        kinds = [kind for _, kind, _ in self.around]
        if "term" in kinds:
            assert "cell" not in kinds, data
            self.texts.append(("", self.around[-1][2]))
        elif self.begun and not any(kinds):
            self.texts.append((data, ""))


def unexplained(page: Path) -> list[str]:
    """The terms that a lesson says in plain prose before, or without, showing their meaning."""
    other = terms.other_sense(f"notebooks/{page.stem}")
    known = terms.glossary()
    texts = Prose(page).texts
    meanings = [meaning for _, meaning in texts]
    found = []
    for term in known:
        if term.names[0] in other or terms.is_ordinary(term, page.stem):
            continue
        meaning = term.meaning.replace("`", "")
        end = meanings.index(meaning) if meaning in meanings else len(texts)
        for text, _ in texts[:end]:
            if terms.find_term(term, text, known):
                found.append(f"{term.names[0]}: {text.strip()[:60]}")
                break
    return found


def test_a_lesson_explains_each_term_where_its_prose_first_says_it():
    lessons = sorted((SITE / "notebooks").glob("*.html"))
    late = {page.stem: unexplained(page) for page in lessons}
    assert len(late) > 20
    assert {name: found for name, found in late.items() if found} == {}


def said_around(page: Path) -> set[str]:
    """The texts and labels of a page beside its own text; what scripts and styles hold is left out."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"(?s)<(script|style)\b.*?</\1>", "", text)
    labels = {found[1] for found in languages.LABEL.findall(text)}
    around = "".join(languages.ARTICLE.split(text)[::2])
    return labels | {found[1] for found in languages.TEXT.findall(around)}


def test_what_a_translation_says_around_a_text_is_what_pages_say():
    said = said_around(SITE / "notebooks" / "00_start_here.html")
    assert set(languages.AROUND) <= said


@pytest.mark.parametrize("language", languages.NAMES)
def test_a_translated_page_says_nothing_around_its_text_in_english(language):
    found = sorted((SITE / language).glob("*.html"))
    assert len(found) == len(languages.SOURCES)
    for page in found:
        assert f' lang="{language}"' in page.read_text(encoding="utf-8")[:200]
        assert not said_around(page) & set(languages.AROUND), page


# in a browser -----------------------------------------------------------------------------------

# Also what a script asks for when the page has been read.
AT_REST = """
const done = arguments[arguments.length - 1];
requestIdleCallback(() => setTimeout(done, 100), {timeout: 5000});
"""
BROKEN = "return [...document.images].filter(i => !(i.complete && i.naturalWidth)).length"


@pytest.fixture(scope="module")
def visits(browser):
    """For each page what was asked for, and how many of its pictures are broken."""
    browser.size(1200)
    seen = {}
    for page in pages():
        browser.requests()
        browser.open(page)
        browser.ask("POST", "/execute/async", script=AT_REST, args=[])
        seen[page] = (browser.requests(), browser.run(BROKEN))
    return seen


def bytes_of(addresses: list[str]) -> tuple[int, int]:
    """The bytes of the scripts among some files of the site, and of all of them, each counted once."""
    places = {unquote(urlsplit(address).path) for address in addresses}
    files = [Path(place) for place in places if place.startswith(str(SITE))]
    script = sum(file.stat().st_size for file in files if file.suffix == ".js")
    return script, sum(file.stat().st_size for file in files)


def test_every_part_of_a_formula_has_what_it_wants():
    wanted = {"msub": 2, "msup": 2, "mfrac": 2, "munder": 2, "mover": 2}
    wanted |= {"msubsup": 3, "munderover": 3}
    count = 0
    for page in pages():
        text = page.read_text(encoding="utf-8")
        for formula in re.findall(r"<math.*?</math>", text, flags=re.S):
            for part in ElementTree.fromstring(formula).iter():
                name = part.tag.rpartition("}")[2]
                count += name in wanted
                if name in wanted:
                    assert len(part) == wanted[name], (page.name, formula)
    assert count > 100


def test_a_formula_is_drawn_in_a_font_that_comes_with_the_page(browser):
    browser.open(SITE / "notebooks" / "02_inside_a_transformer.html")
    browser.wait("return document.readyState === 'complete'")
    ours = "[...document.fonts].filter(one => one.family.includes('STIX Two Math'))"
    browser.wait(f"return {ours}.some(one => one.status === 'loaded')")
    used = "return getComputedStyle(document.querySelector('math')).fontFamily"
    assert "STIX Two Math" in browser.run(used)


def test_no_page_is_heavy(visits):
    heavy = {}
    for page, (asked, _) in visits.items():
        # A picture further down counts as well, though the browser may leave it for later.
        below = [target_of(page, place)[0].as_uri() for place in read(page).loaded]
        script, whole = bytes_of([*asked, *below])
        assert whole > page.stat().st_size
        if script > MOST_SCRIPT or whole > MOST_PAGE:
            heavy[page.name] = (script, whole)
    assert heavy == {}


# Asks for an address of its own as soon as the search has answered, if only "so far".
WATCH = """
const watch = new MutationObserver(() => {
  if (!document.querySelector('#found')?.textContent) return;
  watch.disconnect();
  new Image().src = 'answered';
});
watch.observe(document, {childList: true, subtree: true});
"""


QUERIES = ["gather_for_metrics", "first loss ln V", "어텐션", "注意力"]


@pytest.mark.parametrize("query", QUERIES)
def test_a_search_is_not_heavy(browser, query):
    watching = browser.tool("Page.addScriptToEvaluateOnNewDocument", source=WATCH)
    browser.open("about:blank")
    browser.traffic()
    open_search(browser, query)
    happened = browser.traffic()
    browser.tool("Page.removeScriptToEvaluateOnNewDocument", **watching)
    answered = ("asked", (SITE / "answered").as_uri())
    first = happened[: happened.index(answered)]
    happened.remove(answered)
    # Nobody sees an answer before these have come; the texts that follow count in the whole.
    script, _ = bytes_of([place for what, place in first if what == "came"])
    _, whole = bytes_of([place for what, place in happened if what == "asked"])
    assert 0 < script <= MOST_SCRIPT
    assert script < whole <= MOST_PAGE


# What is looked for, and the page that must be among the first three.
TERMS = {
    "gather_for_metrics": "14_",
    "HSDP": "11_",
    "ln V": "0[89]_",
    "MinHash": "03_|glossary",
    "locality-sensitive hashing": "03_",
    "redaction": "03_",
    "memory mapping": "04_|glossary",
    "shuffle buffer": "04_",
    "page cache": "04_",
    "byte-pair encoding": "05_|glossary",
    "fertility": "05_|glossary",
    "WordPiece": "05_",
    "chat template": "06_|glossary",
    "glitch tokens": "0[56]_",
    "rustbpe": "07_",
    "padding": "01_|06_|08_|glossary",
    "packing": "08_|glossary",
    "AdamW": "09_|glossary",
    "gradient clipping": "09_",
    "all-reduce": "10_|glossary",
    "ring": "10_",
    "torchrun": "10_|launch",
    "FSDP": "11_|glossary",
    "tensor parallelism": "11_",
    "gradient checkpointing": "12_|glossary",
    "8-bit AdamW": "12_",
    "TrainingArguments": "13_|trainer",
    "overfitting": "13_|glossary",
    "McNemar": "13_|14_|glossary",
    "whole-word masking": "15_|glossary",
    "beam search": "16_|glossary",
    "BLEU": "16_|glossary",
    "LoRA": "17_|glossary",
    "DPO": "17_|glossary",
    "contamination": "18_|03_|glossary",
    "perplexity": "18_|glossary",
    "pass@k": "19_|glossary",
    "temperature": "00_|glossary",
    "rotary": "02_|glossary",
    "key–value cache": "02_|00_|01_",
    "show_table": "utils.show|contributing",
    "HF_HUB_OFFLINE": "01_|00_|README|trouble",
}
LOOK = "return [...document.querySelectorAll('#results a')].slice(0, 3).map(a => a.href)"
DONE = "return document.body.dataset.searched === arguments[0]"


def searched(browser, query: str) -> None:
    """Wait until all that a query needs has been searched."""
    wanted = json.dumps(query)
    browser.wait(f"return document.body.dataset.searched === {wanted}")


def open_search(browser, query: str) -> None:
    """Open the search page with a query."""
    browser.open(f"{(SITE / 'search.html').as_uri()}?q={quote(query)}")
    searched(browser, query)


def look_for(browser, term: str) -> list[str]:
    """The first three places that the search page shows for a term."""
    browser.run(
        "document.getElementById('q').value = arguments[0];"
        "document.getElementById('q').dispatchEvent(new Event('input'))",
        term,
    )
    for _ in range(100):
        if browser.run(DONE, term):
            break
    return browser.run(LOOK)


def test_forty_words_are_found_where_they_are_explained(browser):
    browser.size(1200)
    open_search(browser, "token")
    lost = {}
    assert len(TERMS) >= 40
    for term, wanted in TERMS.items():
        found = look_for(browser, term)
        if not any(re.search(wanted, place) for place in found):
            lost[term] = found
    assert lost == {}


# Words of the translated glossaries, lesson and README, and where they must be found.
TRANSLATED = {
    "과적합": "ko/glossary",
    "신뢰 구간": "ko/glossary",
    "연습 문제": "ko/00_",
    "강의 목록": "ko/README",
    "过拟合": "zh/glossary",
    "困惑度": "zh/glossary",
    "练习": "zh/00_",
    "课程列表": "zh/README",
}


def test_words_of_other_languages_are_found_on_their_pages(browser):
    browser.size(1200)
    lost = {}
    for word, wanted in TRANSLATED.items():
        # Each anew: the texts of other languages come only for such a word.
        open_search(browser, word)
        found = browser.run(LOOK)
        if not any(re.search(wanted, place) for place in found):
            lost[word] = found
    assert lost == {}


def test_a_place_that_was_found_is_shown(browser):
    open_search(browser, "gather_for_metrics")
    browser.click("#results a")
    browser.wait("return location.hash && document.readyState === 'complete'")
    place = "return document.querySelector(decodeURIComponent(location.hash))"
    assert "gather_for_metrics" in browser.run(place + ".textContent")
    # The page moves there smoothly, which takes a moment.
    top = f"(() => {{ {place} }})().getBoundingClientRect().top"
    browser.wait(f"const top = {top}; return top > -5 && top < 400")


# What a reader wants, the steps from the first page, and the words she must then see there.
TASKS = {
    "what does gather_for_metrics do": [
        ("search", "gather_for_metrics"),
        ("hit", "14_|10_"),
        ("see", "gather_for_metrics"),
    ],
    "which lesson fits a T4": [
        ("link", "what fits my machine"),
        ("see", "T4.* lesson"),
    ],
    "why is my first loss ln V": [
        ("search", "first loss ln V"),
        ("hit", "0[289]_"),
        ("see", r"\bln\W*V\b"),
    ],
    "what is HSDP": [
        ("search", "what is HSDP"),
        ("hit", "11_"),
        ("see", r"\bHSDP\b"),
    ],
    "how do I begin on my machine": [
        ("link", "Begin on your machine"),
        ("see", "make lab"),
    ],
    "open lesson 09 in Colab": [
        ("link", "09 ·"),
        (
            "way",
            r"https://colab\.research\.google\.com/github/.+/notebooks/09_\w+\.ipynb",
        ),
    ],
    "the meaning of perplexity": [
        ("search", "perplexity"),
        ("hit", "glossary"),
        ("see", "e to the power of the mean loss"),
    ],
    "a message that says the kernel is wrong": [
        ("search", "RuntimeError: This kernel lacks"),
        ("hit", "troubleshooting"),
        ("see", "lacks"),
    ],
    "the arguments of show_figure": [
        ("search", "show_figure"),
        ("hit", "utils.show"),
        ("see", r"show_figure\(.*\balt\b"),
    ],
    "cite the course": [("link", "cite the course"), ("see", "CITATION.cff")],
}


WAYS = """
return document.readyState === 'complete'
  && [...document.querySelectorAll('article a')].filter(a => a.checkVisibility()).map(a => a.href);
"""
# The words in sight of the place that an address leads to: of a definition, of a section without those
# inside it, or, where the address names no place, of what stands in the window.
PLACE = """
if (document.readyState !== 'complete') return null;
const place = document.getElementById(decodeURIComponent(location.hash.slice(1)));
let parts = [...document.querySelectorAll('article :is(h1, h2, h3, p, pre, td, dt)')]
  .filter(part => part.getBoundingClientRect().bottom <= innerHeight);
if (place && place.tagName === 'DT') parts = [place, place.nextElementSibling];
else if (place) parts = [...place.closest('section').children].filter(part => part.tagName !== 'SECTION');
return parts.map(part => part.innerText).join(' ');
"""


def do(browser, step: str, what: str) -> None:
    """One step of a reader."""
    if step == "search":
        browser.write("#front-q", what)
        browser.click(".front-search button")
        searched(browser, what)
    elif step == "hit":
        links = browser.run(LOOK)
        place = next(link for link in links if re.search(what, link))
        browser.open(place)
    elif step == "link":
        browser.run(
            "[...document.querySelectorAll('article a')]"
            ".find(a => a.textContent.trim().startsWith(arguments[0])).click()",
            what,
        )
        browser.wait("return !document.querySelector('#front-q')")
    elif step == "way":
        links = browser.wait(WAYS)
        assert [link for link in links if re.fullmatch(what, link)], links
    else:
        text = browser.wait(PLACE)
        assert re.search(what, " ".join(text.split())), (what, text)


@pytest.mark.parametrize("task", TASKS)
def test_a_reader_gets_there_in_three_steps(browser, task):
    steps = TASKS[task]
    assert len(steps) <= 3
    browser.size(360)
    browser.open(SITE / "index.html")
    for step, what in steps:
        do(browser, step, what)


def test_nothing_but_files_of_the_site_is_asked_for(visits):
    for page, (asked, broken) in visits.items():
        assert broken == 0, page.name
        assert len(asked) > 1, page.name
        elsewhere = [
            place
            for place in asked
            if not place.startswith((SITE.as_uri(), "data:"))
        ]
        assert elsewhere == [], page.name


# The browser of a phone shows a page that is too wide in a window as wide as that, and the theme lets the
# middle of the page scroll by itself: all three must be as wide as the phone, whatever is unfolded.
WIDTHS = """
for (const fold of document.querySelectorAll('details')) fold.open = true;
const parts = [document.documentElement, document.querySelector('.content')];
return [innerWidth, ...parts.map(part => part.scrollWidth)];
"""


def test_no_page_is_wider_than_a_phone(browser):
    browser.size(360)
    addresses = [page.as_uri() for page in pages()]
    wide = {}
    for address in [*addresses, f"{(SITE / 'search.html').as_uri()}?q=HSDP"]:
        browser.open(address)
        if "?q=" in address:
            searched(browser, "HSDP")
        widths = browser.run(WIDTHS)
        if max(widths) > 360:
            wide[address] = widths
    assert wide == {}


def test_a_term_shows_its_meaning_to_mouse_keys_and_finger(browser):
    browser.size(1200)
    browser.open(sorted((SITE / "notebooks").glob("05_*.html"))[0])
    tip = "const t = document.getElementById('term-tip'); return t.hidden ? '' : t.textContent"
    assert browser.run(tip) == ""
    browser.run(
        "document.querySelector('a.term').scrollIntoView({block: 'center', behavior: 'instant'})"
    )
    browser.hover("a.term")
    shown = browser.run(tip)
    assert len(shown.split()) > 5 and shown.endswith("glossary")
    browser.hover(".sidebar-search")
    browser.wait(f"return !(() => {{ {tip} }})()")
    browser.run("document.querySelector('a.term').focus()")
    assert browser.run(tip) == shown
    described = "return document.activeElement.getAttribute('aria-describedby')"
    assert browser.run(described) == "term-tip"
    browser.press("Escape")
    assert browser.run(tip) == ""
    address = browser.run("return location.href")
    browser.run("document.activeElement.blur()")
    browser.tap("a.term")
    assert browser.wait(tip) == shown
    assert browser.run("return location.href") == address


def tab_to(browser, selector: str, most: int = 80) -> None:
    """Go on with the key Tab until such an element has the focus."""
    for _ in range(most):
        browser.press("Tab")
        if browser.run(
            "return document.activeElement.matches(arguments[0])", selector
        ):
            return
    raise AssertionError(f"{most} times Tab do not reach {selector}")


def test_a_reader_without_a_mouse_finds_a_place_and_opens_a_solution(browser):
    browser.size(1200)
    browser.open(SITE / "index.html")
    tab_to(browser, ".sidebar-search")
    browser.press(*"top-p", "Enter")
    browser.wait("return location.pathname.endsWith('search.html')")
    searched(browser, "top-p")
    tab_to(browser, "#results a[href*='notebooks/']")
    browser.press("Enter")
    browser.wait("return location.hash && document.readyState === 'complete'")
    assert "/notebooks/" in browser.run("return location.pathname")
    tab_to(browser, "main summary, article summary", 400)
    folded = "return document.activeElement.parentElement.open"
    before = browser.run(folded)
    browser.press("Enter")
    assert browser.run(folded) != before


@pytest.mark.parametrize("language, word", [("ko", "용어집"), ("zh", "术语表")])
def test_a_translated_lesson_shows_meanings_in_its_own_language(
    browser, language, word
):
    browser.size(1200)
    browser.open(SITE / language / "00_start_here.html")
    count = "return document.querySelectorAll('a.term').length"
    assert browser.run(count) >= 10
    browser.run("document.querySelector('a.term').focus()")
    shown = browser.run("return document.getElementById('term-tip').textContent")
    assert shown.endswith(word)
    _, _, meaning = shown.removesuffix(word).partition(": ")
    assert sum(not sign.isascii() for sign in meaning) > len(meaning) / 4
    led = browser.run(
        "return document.querySelector('a.term').getAttribute('href')"
    )
    assert led.startswith(f"glossary.html#term-{language}-")


# What scrolls on a screen, and would be cut off on paper.
CUT = """
for (const fold of document.querySelectorAll('details')) fold.open = true;
return [...document.querySelectorAll('article *')]
  .filter(one => one.clientWidth && one.scrollWidth > one.clientWidth + 1)
  .filter(one => getComputedStyle(one).overflowX !== 'visible')
  .map(one => one.textContent.trim().slice(0, 80));
"""


@pytest.mark.parametrize(
    "page",
    [
        "notebooks/01_a_tour_of_transformers",  # the widest table
        "notebooks/02_inside_a_transformer",  # the most drawings
        "notebooks/04_big_data_in_small_memory",  # the longest code
        "docs/sources",  # long code in tables
    ],
)
def test_a_page_prints_whole(browser, page):
    browser.size(718, 1000)  # a sheet of A4 without its margins
    browser.open(SITE / f"{page}.html")
    assert len(browser.ask("POST", "/print", shrinkToFit=True)) > 200_000
    browser.tool("Emulation.setEmulatedMedia", media="print")
    try:
        assert browser.run(CUT) == []
    finally:
        browser.tool("Emulation.setEmulatedMedia", media="")


def test_on_paper_nothing_lies_over_the_text(browser):
    """A link that is fixed on the screen would stand on every sheet, over what is there."""
    browser.open(sorted((SITE / "notebooks").glob("05_*.html"))[0])
    browser.size(800, 1000)  # about a sheet
    fixed = """return [...document.querySelectorAll("body *")].filter(one => {
        const {width, height, left, right} = one.getBoundingClientRect();
        const there = width * height && right > 0 && left < innerWidth;
        return there && getComputedStyle(one).position == "fixed";
    }).map(one => one.className)"""
    assert "skip-to-content" in str(browser.run(fixed))
    browser.tool("Emulation.setEmulatedMedia", media="print")
    try:
        assert browser.run(fixed) == []
    finally:
        browser.tool("Emulation.setEmulatedMedia", media="")


def test_what_is_folded_is_printed(browser):
    """Nobody opens a solution on paper, nor the reason why a choice is wrong."""
    browser.open(sorted((SITE / "notebooks").glob("05_*.html"))[0])
    unseen = """return [...document.querySelectorAll("article details:not([open]) > :not(summary)")]
        .filter(one => !one.checkVisibility()).length"""
    assert browser.run(unseen) > 20
    browser.tool("Emulation.setEmulatedMedia", media="print")
    try:
        assert browser.run(unseen) == 0
    finally:
        browser.tool("Emulation.setEmulatedMedia", media="")


# axe --------------------------------------------------------------------------------------------


def axe() -> str:
    """axe's program, from npm's registry."""
    program = BUILD / AXE / "package" / "axe.min.js"
    if not program.exists():
        npm = shutil.which("npm")
        if not npm:
            browsers.go_without("axe comes from npm, and there is none")
        BUILD.mkdir(exist_ok=True)
        # In a folder of its own first: several workers may come for it at once.
        with tempfile.TemporaryDirectory(dir=BUILD) as place:
            name = AXE.replace("core-", "core@")
            done = subprocess.run(
                [npm, "pack", name], cwd=place, capture_output=True
            )
            if done.returncode:
                browsers.go_without("npm's registry does not answer")
            with tarfile.open(Path(place) / f"{AXE}.tgz") as archive:
                archive.extractall(place, filter="data")
            program.parent.parent.mkdir(exist_ok=True)
            with contextlib.suppress(OSError):  # another worker was first
                (Path(place) / "package").rename(program.parent)
    return program.read_text(encoding="utf-8")


# axe leaves out what is folded, so that every fold is opened first. A colour on its way to another
# would be judged halfway, so that nothing may take its time; the page has a moment to answer.
FAULTS = """
const done = arguments[arguments.length - 1];
for (const fold of document.querySelectorAll('details')) fold.open = true;
const still = document.createElement('style');
still.textContent = '* { transition: none !important; animation: none !important }';
document.head.append(still);
setTimeout(() => axe.run(document, {resultTypes: ['violations']}).then(found => done(found.violations
  .filter(one => ['serious', 'critical'].includes(one.impact) || one.id === 'heading-order')
  .map(one => `${one.id}: ${one.nodes.length}: ${one.nodes[0].html.slice(0, 160)}`))), 200);
"""


def faults_of(browser) -> list[str]:
    """What axe finds on the page that is open, once its styles and fonts are there."""
    whole = "return document.readyState === 'complete' && document.fonts.status === 'loaded'"
    browser.wait(whole)
    browser.run(axe() + ";return 1")
    return browser.ask("POST", "/execute/async", script=FAULTS, args=[])


@pytest.mark.parametrize("width", [360, 1200])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault(browser, scheme, width):
    faults = {}
    browser.ask("POST", "/timeouts", script=120_000)
    browser.size(width, scheme=scheme)
    for page in pages():
        browser.open(page)
        # A page of code has thousands of spans; contrast is looked at on all the same.
        found = faults_of(browser)
        if found:
            faults[html.unescape(page.name)] = found
    browser.open(SITE / "search.html")
    browser.write("#q", "padding")
    searched(browser, "padding")
    if faults_of(browser):
        faults["search.html?q=padding"] = faults_of(browser)
    assert faults == {}
