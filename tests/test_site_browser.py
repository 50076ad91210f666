"""The built pages as a reader meets them: links, weight, search, tasks, and axe in a real browser.

They read `build/site`, which `make site` builds. `release`, because the browser and axe come from elsewhere.
"""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import tarfile
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import browser as browsers
import pytest

from utils.errors import ROOT

# Where `make site` builds; what the other tests make goes elsewhere.
BUILD = ROOT / "build"
SITE = BUILD / "site"
AXE = "axe-core-4.14.1"
MOST_SCRIPT = 300_000
MOST_PAGE = 2_000_000

pytestmark = [
    pytest.mark.release,
    pytest.mark.slow,
    pytest.mark.skipif(not SITE.exists(), reason="no pages: make site"),
]
in_browser = pytest.mark.skipif(
    bool(browsers.why_none()), reason=browsers.why_none() or "there is one"
)


def pages() -> list[Path]:
    return sorted(SITE.rglob("*.html"))


@pytest.fixture(scope="module")
def browser():
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


def test_no_page_is_heavy():
    for page in pages():
        facts = read(page)
        size = {}
        for kind in ("scripts", "loaded"):
            places = {target_of(page, place)[0] for place in getattr(facts, kind)}
            size[kind] = sum(path.stat().st_size for path in places)
        assert size["scripts"] <= MOST_SCRIPT, page.name
        assert page.stat().st_size + sum(size.values()) <= MOST_PAGE, page.name


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


# in a browser -----------------------------------------------------------------------------------

# What is looked for, and the page that must be among the first five.
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
LOOK = "return [...document.querySelectorAll('#results a')].slice(0, 5).map(a => a.href)"
DONE = "return document.body.dataset.searched === arguments[0]"


def look_for(browser, term: str) -> list[str]:
    """The first five places that the search page shows for a term."""
    browser.run(
        "document.getElementById('q').value = arguments[0];"
        "document.getElementById('q').dispatchEvent(new Event('input'))",
        term,
    )
    for _ in range(100):
        if browser.run(DONE, term):
            break
    return browser.run(LOOK)


@in_browser
def test_forty_words_are_found_where_they_are_explained(browser):
    browser.size(1200)
    browser.open(f"{(SITE / 'search.html').as_uri()}?q=token")
    browser.wait("return 'searched' in document.body.dataset")
    lost = {}
    assert len(TERMS) >= 40
    for term, wanted in TERMS.items():
        found = look_for(browser, term)
        if not any(re.search(wanted, place) for place in found):
            lost[term] = found
    assert lost == {}


@in_browser
def test_a_place_that_was_found_is_shown(browser):
    browser.open(f"{(SITE / 'search.html').as_uri()}?q=gather_for_metrics")
    browser.wait("return document.querySelector('#results a')")
    browser.click("#results a")
    browser.wait("return location.hash && document.readyState === 'complete'")
    place = "return document.querySelector(decodeURIComponent(location.hash))"
    assert "gather_for_metrics" in browser.run(place + ".textContent")
    # The page moves there smoothly, which takes a moment.
    top = f"(() => {{ {place} }})().getBoundingClientRect().top"
    browser.wait(f"const top = {top}; return top > -5 && top < 400")


# What a reader wants, the steps from the first page, and what she must then see.
TASKS = {
    "what does gather_for_metrics do": [
        ("search", "gather_for_metrics"),
        ("hit", "14_|10_"),
    ],
    "which lesson fits a T4": [("link", "what fits my machine"), ("see", "T4")],
    "why is my first loss ln V": [
        ("search", "first loss ln V"),
        ("hit", "0[289]_"),
    ],
    "what is HSDP": [("search", "what is HSDP"), ("hit", "11_")],
    "how do I begin on my machine": [
        ("link", "Begin on your machine"),
        ("see", "make lab"),
    ],
    "open lesson 09 in Colab": [("link", "09 ·"), ("see", "Run this lesson")],
    "the meaning of perplexity": [
        ("link", "glossary"),
        ("see", "e to the power of the mean loss"),
    ],
    "a message that says the kernel is wrong": [
        ("link", "a message that went wrong"),
        ("see", "lacks"),
    ],
    "the arguments of show_figure": [
        ("search", "show_figure"),
        ("hit", "utils.show"),
    ],
    "cite the course": [("link", "cite the course"), ("see", "CITATION.cff")],
}


def do(browser, step: str, what: str) -> None:
    """One step of a reader."""
    if step == "search":
        browser.write("#front-q", what)
        browser.click(".front-search button")
        browser.wait("return document.querySelector('#results a')")
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
    else:
        text = browser.wait("return document.querySelector('article').textContent")
        assert what in text, what


@in_browser
@pytest.mark.parametrize("task", TASKS)
def test_a_reader_gets_there_in_three_steps(browser, task):
    steps = TASKS[task]
    assert len(steps) <= 3
    browser.size(360)
    browser.open(SITE / "index.html")
    for step, what in steps:
        do(browser, step, what)
    text = browser.run("return document.querySelector('article').textContent")
    if steps[0][0] == "search":
        assert steps[0][1].split()[-1] in text


@in_browser
def test_nothing_but_files_of_the_site_is_asked_for(browser):
    browser.requests()
    for page in pages():
        browser.open(page)
        broken = "return [...document.images].filter(i => !(i.complete && i.naturalWidth)).length"
        assert browser.run(broken) == 0, page.name
    asked = browser.requests()
    assert len(asked) > len(pages())
    assert [
        place for place in asked if not place.startswith((SITE.as_uri(), "data:"))
    ] == []


@in_browser
def test_a_term_shows_its_meaning_to_mouse_keys_and_finger(browser):
    browser.size(1200)
    browser.open(sorted((SITE / "notebooks").glob("05_*.html"))[0])
    tip = "const t = document.getElementById('term-tip'); return t.hidden ? '' : t.textContent"
    assert browser.run(tip) == ""
    browser.run("document.querySelector('a.term').focus()")
    shown = browser.run(tip)
    assert len(shown.split()) > 5 and shown.endswith("glossary")
    described = "return document.activeElement.getAttribute('aria-describedby')"
    assert browser.run(described) == "term-tip"
    browser.press("Escape")
    assert browser.run(tip) == ""
    address = browser.run("return location.href")
    browser.run(
        "const a = document.querySelectorAll('a.term')[1];"
        "a.dispatchEvent(new PointerEvent('pointerdown', {pointerType: 'touch', bubbles: true}));"
        "a.click()"
    )
    assert browser.run(tip).endswith("glossary")
    assert browser.run("return location.href") == address


@in_browser
def test_a_lesson_prints(browser):
    browser.open(sorted((SITE / "notebooks").glob("05_*.html"))[0])
    printed = browser.ask("POST", "/print", shrinkToFit=True)
    assert len(printed) > 200_000


# axe --------------------------------------------------------------------------------------------


def axe() -> str:
    """axe's program, from npm's registry; the test is skipped where it cannot be had."""
    folder = BUILD / AXE
    program = folder / "package" / "axe.min.js"
    if not program.exists():
        npm = shutil.which("npm")
        if not npm:
            pytest.skip("axe comes from npm, and there is none")
        folder.mkdir(parents=True, exist_ok=True)
        name = AXE.replace("core-", "core@")
        done = subprocess.run([npm, "pack", name], cwd=folder, capture_output=True)
        if done.returncode:
            pytest.skip("npm's registry does not answer")
        with tarfile.open(folder / f"{AXE}.tgz") as archive:
            archive.extractall(folder, filter="data")
    return program.read_text(encoding="utf-8")


FAULTS = """
const done = arguments[arguments.length - 1];
axe.run(document, {resultTypes: ['violations']}).then(found => done(found.violations
  .filter(one => ['serious', 'critical'].includes(one.impact))
  .map(one => `${one.id}: ${one.nodes.length}: ${one.nodes[0].html.slice(0, 160)}`)));
"""


@in_browser
@pytest.mark.parametrize("width", [360, 1200])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault(browser, scheme, width):
    program = axe()
    faults = {}
    browser.ask("POST", "/timeouts", script=120_000)
    for page in pages():
        browser.size(width, scheme=scheme)
        browser.open(page)
        # A page of code has thousands of spans; contrast is looked at on all the same.
        browser.run(program + ";return 1")
        found = browser.ask("POST", "/execute/async", script=FAULTS, args=[])
        if found:
            faults[html.unescape(page.name)] = found
    assert faults == {}
