"""Builds the pages: a tree of sources in `build/site-source`, Sphinx, an index for the search."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import time
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from course import setup
from course.checkout import commit
from course.notebooks import cells, readable, select, source
from course.publish import project
from course.site import index, languages, lessons, modules, pages
from utils.errors import ROOT, CourseError, build_folder, short_path
from utils.show import format_bytes

CONFIGURATION = setup.CHECKOUT / "docs" / "site"
# Sphinx's own search, and what only the build reads.
NOT_NEEDED = [
    ".doctrees",
    ".buildinfo",
    "_sources",
    "searchindex.js",
    "_static/*stemmer.js",
]
NOT_NEEDED += [
    "_static/searchtools.js",
    "_static/language_data.js",
    "_static/scripts/*.map",
]
NOT_NEEDED += ["_static/debug.css", "_static/styles/*.map"]


# Seconds that the pages may take on two cores; more is told and fails nothing.
BAR = 120
# What a screen reader would stumble on: all solutions of one name, headings without a level.
MENDED = {
    ' aria-label="Toggle hidden content"': "",
    'class="caption" role="heading"': 'class="caption" role="heading" aria-level="2"',
}


def prepare(folder: Path) -> None:
    """Write what Sphinx reads; it has the shape of the checkout, so that links hold."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("notebooks", "docs", "api"):
        (folder / name).mkdir(parents=True)
    ignore = shutil.ignore_patterns("colab.svg")
    pictures = folder / "notebooks" / "images"
    shutil.copytree(ROOT / "notebooks" / "images", pictures, ignore=ignore)
    for path in (ROOT / "docs").glob("*.svg"):
        shutil.copy(path, folder / "docs")
    texts = {}
    for path in readable(select()):
        notebook = lessons.page_of(path, folder / "notebooks")
        prose = [source(cell) for cell in cells(notebook, "markdown")]
        texts[path.stem] = "\n".join(prose)
    pages.write_docs(folder)
    write_translations(folder)
    made = {"index": pages.front_page(languages.translated())}
    made["machines"] = pages.machines_page()
    made["docs/glossary"] = pages.glossary_page(texts)
    for package in modules.PACKAGES:
        made[f"api/{package}"] = modules.package_page(package)
        for path in modules.modules_of(package):
            made[f"api/{modules.name_of(path)}"] = modules.page_of(path)
    for name, text in made.items():
        (folder / f"{name}.md").write_text(text, encoding="utf-8", newline="\n")


def write_translations(folder: Path) -> None:
    """Write what there is in other languages, each in a folder of its own."""
    languages.write_pages(folder)
    for language, page, _ in languages.translated():
        path = ROOT / languages.SOURCES[page]
        if path.suffix == ".ipynb":
            lessons.page_of(path, folder / language, language)


def call_sphinx(source_folder: Path, target: Path) -> None:
    """Turn the sources into pages; a warning is an error."""
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "sphinx",
        "-b",
        "html",
        "-q",
        "-W",
        "--keep-going",
    ]
    command += ["-j", "auto", "-c", CONFIGURATION, source_folder, target]
    path = [setup.SITE_TOOLS, setup.CHECKOUT]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    env |= {"COURSE_COMMIT": commit(), "COURSE_REPOSITORY": project()["repository"]}
    if subprocess.run([str(part) for part in command], env=env).returncode:
        what = "the pages could not be built; what Sphinx said stands above"
        raise CourseError(what, source_folder, "mend the page that it names")


def tidy(folder: Path) -> None:
    """Take away what no page needs, mend what a screen reader would stumble on, translate the rest."""
    for name in NOT_NEEDED:
        for path in folder.glob(name):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
    for path in folder.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        for found, better in MENDED.items():
            text = text.replace(found, better)
        language = index.language_of(path.relative_to(folder).as_posix())
        if language:
            text = languages.say_around(text, language)
        path.write_text(text, encoding="utf-8", newline="\n")


def build(target: Path | None = None) -> Path:
    """Build the site from the committed lessons; nothing is executed."""
    start = time.perf_counter()
    target = target or build_folder() / "site"
    setup.install_site_tools()
    shutil.rmtree(target, ignore_errors=True)
    folder = build_folder() / "site-source"
    prepare(folder)
    call_sphinx(folder, target)
    tidy(target)
    count = index.write_index(target)
    files = [path for path in target.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    first = target / "index.html"
    print(f"site: {short_path(first)}")
    seconds = time.perf_counter() - start
    print(f"{count} pages, {format_bytes(size)}, {told(seconds)}")
    return target


def told(seconds: float) -> str:
    """How long the pages took, and whether they may take so long.

    >>> told(49.3), told(130)
    ('49 s (the bar is 120 s)', '130 s, OVER the bar of 120 s')
    """
    if seconds > BAR:
        return f"{seconds:.0f} s, OVER the bar of {BAR} s"
    return f"{seconds:.0f} s (the bar is {BAR} s)"


def serve(folder: Path, port: int = 8000) -> None:
    """Show the pages on this machine until it is interrupted."""
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        print(f"http://127.0.0.1:{server.server_port} (Ctrl-C ends it)", flush=True)
        server.serve_forever()
