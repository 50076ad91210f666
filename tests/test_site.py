"""The pages: what is made of a lesson, of the glossary and of docstrings, and what a search finds."""

import ast
import base64
import json
import re
import subprocess
import sys
import urllib.request

import pytest

from course import __main__ as command
from course import checkout
from course.notebooks import cells, read, select, source, write
from course.site import (
    build,
    index,
    languages,
    lessons,
    links,
    modules,
    pages,
    terms,
)
from utils.errors import ROOT

PICTURE = base64.b64encode(b"\x89PNG").decode()


def output(**data):
    return {"output_type": "display_data", "data": data, "metadata": {}}


# links ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target, folder, wanted",
    [
        (
            "03_building_a_corpus.ipynb#x",
            "notebooks",
            "03_building_a_corpus.ipynb#x",
        ),
        ("../README.md#lessons", "notebooks", "../README.md#lessons"),
        ("images/00_map.svg", "notebooks", "images/00_map.svg"),
        ("../utils/show.py", "notebooks", "../api/utils.show.md"),
        ("stages/tokens.py", "", "api/stages.tokens.md"),
        ("https://example.org", "docs", "https://example.org"),
        ("#here", "docs", "#here"),
    ],
)
def test_a_link_leads_to_a_page(target, folder, wanted):
    assert links.lead(target, folder) == wanted


@pytest.mark.parametrize(
    "target, kind", [("../launch", "tree"), ("../LICENSE", "blob")]
)
def test_what_is_no_page_is_in_the_repository(target, kind):
    led = links.lead(target, "docs")
    assert led.endswith(f"/{kind}/main/{target[3:]}")


def test_a_link_in_code_is_left_alone():
    text = "[a](../LICENSE) `[a](../LICENSE)`\n```\n[a](../LICENSE)\n```"
    assert links.relead(text, "docs").count("](../LICENSE)") == 2


def test_every_page_is_mended_in_a_file_of_the_course():
    names = ["index", "machines", "README"]
    names += [f"docs/{path.stem}" for path in pages.docs()]
    names += [f"notebooks/{path.stem}" for path in select()]
    for package in modules.PACKAGES:
        paths = modules.modules_of(package)
        names += [f"api/{package}", *(f"api/{modules.name_of(p)}" for p in paths)]
    for language, page, _ in languages.translated():
        names.append(f"{language}/{page}")
        wanted = f"translations/{language}/{page}.po"
        assert links.written_in(names[-1]) == wanted
    for name in names:
        assert (ROOT / links.written_in(name)).is_file(), name
    assert links.written_in("api/stages.cage.warden") == "stages/cage/warden.py"


def test_the_words_of_a_picture_keep_their_spaces():
    text = "before\n\n![a `step` and\nwhat it costs](images/09_loop.svg)\nbehind"
    wanted = "before\n\n![a `step` and what it costs](images/09_loop.svg)\nbehind"
    assert links.relead(text, "notebooks") == wanted


def test_a_badge_of_another_host_is_in_no_page():
    badge = (
        "[![CI](https://a.org/ci.yml/badge.svg)](https://a.org/ci.yml) [![x](y)](z)"
    )
    assert links.relead(f"# A\n\n{badge}\n\ntext", "") == "# A\n\n\ntext"


# lessons ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["as committed before", "png", "webp"])
def test_a_plot_keeps_its_text(tmp_path, way):
    kind = "png"
    if way != "as committed before":
        kind = way
        tag = f'<img alt="a &lt;curve&gt;" src="data:image/{way};base64,{PICTURE}">'
        made = output(**{"text/html": tag})
    else:
        made = output(**{"image/png": PICTURE})
        made["metadata"] = {"image/png": {"alt": "a <curve>"}}
    shown = lessons.plain(made, tmp_path / "plots-05" / "x-0.png")
    assert shown["data"] == {
        "text/markdown": f"![a \\<curve>](plots-05/x-0.{kind})"
    }
    assert (tmp_path / "plots-05" / f"x-0.{kind}").read_bytes() == b"\x89PNG"


def test_a_record_is_no_data_of_a_page(tmp_path):
    small = '<small style="opacity:0.6">a figure: 3</small>'
    made = output(**{"text/html": small, lessons.RECORD: {"value": 3}})
    shown = lessons.plain(made, tmp_path / "x.png")
    assert shown["data"] == {
        "text/html": '<small class="record">a figure: 3</small>'
    }


def test_a_solution_is_folded_and_a_header_says_where_to_run(tmp_path):
    path = sorted((ROOT / "notebooks").glob("05_*.ipynb"))[0]
    page = lessons.page_of(path, tmp_path)
    text = json.dumps(page)
    solutions = [
        c for c in page["cells"] if "solution" in c["metadata"].get("tags", [])
    ]
    assert len(solutions) >= 4
    for cell in solutions:
        assert "hide-cell" in cell["metadata"]["tags"]
        assert cell["metadata"]["mystnb"]["code_prompt_show"].startswith(
            "Solution 05."
        )
    for place in (
        "colab.research",
        "kaggle.com",
        "codespaces.new",
        "README.md#begin",
    ):
        assert place in text
    assert "mybinder" not in text
    assert "image/png" not in text and lessons.RECORD not in text
    assert "[all lessons](" not in text


def test_a_formula_has_no_sign_that_common_fonts_lack():
    for path in select():
        prose = [source(cell) for cell in cells(read(path), "markdown")]
        # Drawn as U+29F5, an empty box where no font for formulas is installed.
        assert r"\setminus" not in "\n".join(prose), path.name


# terms ------------------------------------------------------------------------------------------


def test_a_helper_that_a_notebook_hides_is_folded_with_its_output_in_sight():
    cell = {
        "cell_type": "code",
        "id": "drawing",
        "source": ["# @title Drawing: one figure\n", "draw()"],
        "metadata": {"jupyter": {"source_hidden": True}},
        "outputs": [],
    }
    lessons.prepare(cell, "00", {}, "en")
    assert cell["metadata"]["tags"] == ["hide-input"]
    words = cell["metadata"]["mystnb"]["code_prompt_show"]
    assert words == "Drawing: one figure"


def test_a_table_stands_between_what_was_printed_before_and_behind_it(tmp_path):
    def stream(text, name="stdout"):
        return {"output_type": "stream", "name": name, "text": [text]}

    table = {"output_type": "display_data", "data": {}, "metadata": {}}
    outputs = [stream("a"), stream("b"), table, stream("c"), stream("d", "stderr")]
    cell = {"cell_type": "code", "id": "a", "source": "", "metadata": {}}
    cell["outputs"] = outputs
    lessons.prepare(cell, "00", {}, "en")
    said = [one.get("text") for one in cell["outputs"]]
    assert said == ["ab", None, ["c"], ["d"]]


def test_a_lessons_rows_of_the_sources_are_searched_on_their_own_page():
    template = (ROOT / "course/templates/footer.j2").read_text(encoding="utf-8")
    assert f"<summary>{index.SAID_ELSEWHERE}" in template
    fold = (
        f"<details><summary>{index.SAID_ELSEWHERE}</summary><p>quoted</p></details>"
    )
    page = f'<section id="a"><h1>A</h1><p>b </p>{fold}<p>c</p></section>'
    assert index.sections_of(page) == [{"id": "a", "title": "A", "text": "b c"}]


def test_the_parts_of_the_index_hold_each_text_once(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "PART", 5)
    (tmp_path / "_static").mkdir()
    (tmp_path / "ko").mkdir()
    for name, text in (("a", "four"), ("b", "more"), ("ko/a", "last")):
        page = f'<section id="{name}"><h1>T</h1><p>{text}</p></section>'
        (tmp_path / f"{name}.html").write_text(page, encoding="utf-8")
    assert index.write_index(tmp_path) == 3
    said = [
        (tmp_path / "_static" / f"index-{number}.js").read_text(encoding="utf-8")
        for number in range(3)
    ]
    assert said == [
        'window.courseTexts(0,0,["four"]);\n',
        'window.courseTexts(1,1,["more"]);\n',
        'window.courseTexts(2,2,["last"]);\n',
    ]
    first = (tmp_path / "_static" / "index.js").read_text(encoding="utf-8")
    assert first.endswith(",[false,false,true]);\n")


def test_a_word_of_another_sense_is_a_term_and_stands_in_its_lesson():
    for name, other in terms.OTHER_SENSE.items():
        folder, _, page = name.partition("/")
        notebook = read(ROOT / "notebooks" / f"{page}.ipynb")
        glossary = terms.glossary()
        if folder in languages.NAMES:
            lessons.translate(notebook, page, folder)
            glossary = languages.glossary(folder)
        known = {term.names[0]: term for term in glossary}
        prose = "\n".join(source(cell) for cell in cells(notebook, "markdown"))
        for word in other:
            assert terms.find_term(known[word], prose), f"{word} is not in {name}"


def test_the_corpus_of_corpus_bleu_is_not_the_courses():
    said = []
    for path in select():
        prose = [source(cell) for cell in cells(read(path), "markdown")]
        if re.search(r"\bcorpus BLEU\b", "\n".join(prose)):
            said.append(f"notebooks/{path.stem}")
    assert said
    assert all("corpus" in terms.OTHER_SENSE.get(page, ()) for page in said)


def test_the_glossary_is_read_whole():
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    found = terms.read_terms(text)
    assert len(found) == text.count("\n- **") >= 100
    assert all(term.meaning.endswith((".", "?")) for term in found)


def test_the_glossary_has_words_that_lessons_use_without_ado():
    names = {name for term in terms.glossary() for name in term.names}
    assert {"HSDP", "hybrid sharding", "confidence interval", "sandbox"} <= names
    # "The cage", "its 95% interval": no lesson says more.
    assert {"cage", "interval"} <= names


@pytest.mark.parametrize(
    "name, text, wanted",
    [
        ("token", "two Tokens here", "Tokens"),
        ("batch", "the batches", "batches"),
        ("KV cache", "a KV-cache", "KV-cache"),
        ("BPE", "bpe", None),
        ("token", "a tokenizer", None),
        ("step", "a five-step plan", None),
    ],
)
def test_a_term_is_found_as_a_word(name, text, wanted):
    match = terms.find_term(terms.Term((name,), ""), text)
    assert (match and match[0]) == wanted


@pytest.mark.parametrize(
    "name, text, place",
    [
        ("attention", "the attention mask hides what attention may see", 30),
        ("attention", "a paged attention, nothing else", None),
        ("encoder", "an encoder–decoder is more than an encoder", 35),
        ("decoder", "an encoder–decoder", None),
        ("KV cache", "its key–value cache", 4),
    ],
)
def test_a_part_of_a_longer_term_is_another_term(name, text, place):
    known = terms.glossary()
    (term,) = [one for one in known if one.names[0] == name]
    match = terms.find_term(term, text, known)
    assert (match and match.start()) == place


@pytest.mark.parametrize(
    "name, page, place",
    [
        ("attention", "02_inside_a_transformer", (2, 7)),
        ("attention mask", "02_inside_a_transformer", (0, 3)),
        # Said in a fold before, where it may stay unread.
        ("head", "02_inside_a_transformer", (5, 2)),
        ("logits", "02_inside_a_transformer", (3, 16)),
        # The power of a number is none of a test, which speaks of it in bold.
        ("power", "02_inside_a_transformer", (7, 0)),
        ("step", "02_inside_a_transformer", None),
        ("step", "10_many_processes", (4, 2)),
        ("tokenizer", "02_inside_a_transformer", None),
    ],
)
def test_a_page_explains_a_term_where_it_first_says_it(name, page, place):
    said = [
        terms.Said("an attention mask"),
        terms.Said("attention mask", bold=True),
        terms.Said(" tells attention"),
        terms.Said("of one head the logits", folded=True),
        terms.Said("a step"),
        terms.Said("a head to the power of two"),
        terms.Said("head", bold=True),
        terms.Said("power", bold=True),
    ]
    known = terms.glossary()
    (term,) = [one for one in known if one.names[0] == name]
    found = terms.first_use(term, said, known, page)
    assert (found and (found[0], found[1].start())) == place


def test_an_ordinary_word_is_a_term_and_stands_where_a_lesson_speaks_of_it():
    known = {term.names[0]: term for term in terms.glossary()}
    prose = {"glossary": (ROOT / "docs" / "glossary.md").read_text("utf-8")}
    for path in select():
        texts = [source(cell) for cell in cells(read(path), "markdown")]
        prose[path.stem[:2]] = "\n".join(texts)
    for name, pages_that_say_it in terms.ORDINARY.items():
        for page in pages_that_say_it:
            said = terms.find_term(known[name], prose[page])
            assert said, f"{name} is not in {page}"


@pytest.mark.parametrize("language", ["ko", "zh"])
def test_a_translated_glossary_has_each_term_its_meaning_and_its_place(language):
    translated = languages.glossary(language)
    assert [term.names[0] for term in translated] == [
        term.names[0] for term in terms.glossary()
    ]
    (corpus,) = [term for term in translated if term.names[0] == "corpus"]
    assert len(corpus.names) > 1 and not corpus.meaning.isascii()
    page = languages.page_text("glossary", language)
    for term in translated:
        anchor = languages.term_anchor(term.names[0], language)
        head = f"- ({anchor})=\n  **{term.names[0]}"
        assert page.count(head) == 1, term.names


@pytest.mark.parametrize(
    "names, text, wanted",
    [
        (("corpus", "말뭉치"), "이 말뭉치를 보라, corpus", "말뭉치"),
        (("corpus", "语料库"), "把语料库切开", "语料库"),
        (("corpus", "语料库"), "a corpus 语料库", "corpus"),
    ],
)
def test_a_translated_term_is_found_where_it_is_first_said(names, text, wanted):
    match = terms.find_term(terms.Term(names, ""), text)
    assert match and match[0] == wanted


def test_the_page_of_the_glossary_names_the_lessons():
    page = pages.glossary_page(
        {"05_tokenizers_up_close": "each token is", "09_x": "nothing"}
    )
    assert "token\n  a piece of text" in page
    assert "In lesson [05](../notebooks/05_tokenizers_up_close.ipynb)." in page
    assert "09_x" not in page


# modules ----------------------------------------------------------------------------------------


def test_a_module_page_has_signatures_examples_and_nothing_private():
    page = modules.page_of(ROOT / "utils" / "show.py")
    assert (
        "def show_table(rows: Iterable[dict[str, Any]], align: str='') -> None"
        in page
    )
    assert "```python\n>>> format_bytes" in page
    module = ast.parse(
        "def _a(): pass\ndef b(): '''B *c*.'''\nclass B: pass\nclass b2: pass"
    )
    assert [node.name for node in modules.public(module.body)] == ["b", "B", "b2"]


def test_every_public_function_has_its_place():
    for package in modules.PACKAGES:
        listed = modules.package_page(package)
        for path in modules.modules_of(package):
            assert f"({modules.name_of(path)}.md)" in listed
    assert "(stages.cage.warden.md)" in modules.package_page("stages")


# building and serving ---------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A build whose Sphinx writes one page."""

    def write(source, target):
        (target / "_static").mkdir(parents=True)
        page = '<section id="a"><h1>A</h1><p>words</p></section>'
        (target / "index.html").write_text(page, encoding="utf-8")

    monkeypatch.setattr(build.setup, "install_site_tools", lambda: False)
    monkeypatch.setattr(build, "prepare", lambda folder: None)
    monkeypatch.setattr(build, "call_sphinx", write)
    return tmp_path / "site"


@pytest.mark.parametrize(
    "seconds, said",
    [(119, "119 s (the bar is 120 s)"), (121, "121 s, OVER the bar of 120 s")],
)
def test_the_last_line_says_whether_the_pages_took_too_long(
    small, monkeypatch, capsys, seconds, said
):
    clock = iter([1000, 1000 + seconds])
    monkeypatch.setattr(build.time, "perf_counter", lambda: next(clock))
    assert build.build(small) == small
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(rf"1 pages, [\d.]+ k?B, {re.escape(said)}", last)


def test_the_pages_are_served_with_their_search(small):
    build.build(small)
    code = "import pathlib, sys; from course.site import build; "
    code += "build.serve(pathlib.Path(sys.argv[1]), 0)"
    program = [sys.executable, "-c", code, str(small)]
    with subprocess.Popen(
        program,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        try:
            address = server.stdout.readline().split()[0]
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            for name in ("index.html", "_static/index.js", "_static/index-0.js"):
                with opener.open(f"{address}/{name}", timeout=60) as answer:
                    assert answer.read() == (small / name).read_bytes()
        finally:
            server.terminate()


def test_make_site_serve_builds_and_serves_the_same_folder(small, monkeypatch):
    shown = []
    monkeypatch.setattr(build, "build_folder", lambda: small.parent)
    monkeypatch.setattr(build, "serve", shown.append)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (target,) = re.findall(r"(?m)^site-serve:.*\n\t@\$\(COURSE\) (.+)$", makefile)
    assert command.main(target.split()) == 0
    assert shown == [small]
    assert command.main(["site"]) == 0
    assert len(shown) == 1


# the search -------------------------------------------------------------------------------------


def test_sections_have_their_own_text():
    page = """<nav>menu</nav><section id="a"><h1>One<a class="headerlink">#</a></h1><p>first<br>line
    </p><div class="cell_output docutils"><pre>printed</pre></div><section id="b"><h2>Two</h2>
    <pre>code</pre></section>tail</section>"""
    assert index.sections_of(page) == [
        {"id": "a", "title": "One", "text": "first line tail"},
        {"id": "b", "title": "Two", "text": "code"},
    ]


def test_each_entry_of_the_glossary_is_a_place():
    page = """<section id="g"><h1>G</h1><dl class="glossary"><dt id="x">X</dt><dd>one</dd>
    <dt id="y">Y</dt><dd>two</dd></dl><p>end</p></section>"""
    assert index.sections_of(page) == [
        {"id": "g", "title": "G", "text": "end"},
        {"id": "x", "title": "X", "text": "one"},
        {"id": "y", "title": "Y", "text": "two"},
    ]


def test_a_page_says_when_its_lesson_last_ran():
    for path in select():
        said = lessons.last_run(path)
        assert "green" in said and "not recorded" not in said, path.name


@pytest.fixture
def ran(course, monkeypatch):
    """A lesson that ran at its first commit, at home and elsewhere; its path."""
    path = course.add("00_a.ipynb", "1 + 1")
    course.git("init", "-q")
    course.git("add", "-A")
    monkeypatch.setenv("GIT_COMMITTER_DATE", "2026-02-03T12:00:00")
    course.git("commit", "-qm", "a")
    monkeypatch.setattr(lessons, "ROOT", course.root)
    name = checkout.commit(course.root)
    run = {"commit": name, "machine": "2 cores", "problems": []}
    monkeypatch.setattr(lessons, "recorded", lambda profile: {"00": run})
    old = {"00": {**run, "commit": "0123456789", "date": "2025-12-31"}}
    row = {"name": "oldest", "lessons": old}
    monkeypatch.setattr(lessons, "places", lambda: [row])
    lessons.has_changed.cache_clear()
    yield path
    lessons.has_changed.cache_clear()


def test_a_run_has_its_day_and_its_commit(ran):
    name = checkout.commit(ran.parent.parent)
    said = lessons.last_run(ran)
    assert f"green on 2 cores, 2026-02-03 ({name})" in said
    # Of a commit that git does not know, the record alone speaks.
    assert "green in `oldest`, 2025-12-31 (0123456789)" in said
    assert f"outputs below are of 2026-02-03 ({name}), recorded on 2 cores" in said


def test_a_run_is_older_than_the_code_of_its_lesson_and_not_than_its_outputs(ran):
    notebook = read(ran)
    notebook["cells"][0]["outputs"] = [output(**{"text/plain": "2"})]
    write(ran, notebook)
    assert "before its last change" not in lessons.last_run(ran)
    notebook["cells"][0]["source"] = "1 + 2"
    write(ran, notebook)
    lessons.has_changed.cache_clear()
    assert lessons.last_run(ran).count(", before its last change)") == 2


def test_a_run_of_a_lesson_under_another_name_is_older(ran):
    moved = ran.rename(ran.with_name("00_b.ipynb"))
    assert lessons.last_run(moved).count(", before its last change)") == 2
