"""The shape of a notebook: what every lesson has, and what none may have. One function a rule."""

from __future__ import annotations

import ast
import re
import statistics
from collections.abc import Iterator

import nbformat
from nbformat import NotebookNode

MOST_BYTES = 400_000
MAGIC = re.compile(r"(?m)^[ \t]*[%!].*$")
PATHS = re.compile(
    r"(?<![\w.~])(/(?:root|home|tmp|Users|work|var|private|content)/[\w.-]+|[A-Z]:\\\\?\w+)"
)
NOISE = re.compile(
    r"\b\w*Warning\b:|Traceback \(most recent|IProgress not found|\x1b\[|\| WARNING \|"
)
IMAGE = re.compile(r"!\[([^\]]*)\]\(|<img\b([^>]*)>")
SHOWS = (
    "print(",
    "display(",
    "show_table(",
    "show_figure(",
    "show_source(",
    "lesson.record(",
)
# What checks the course and is no part of it.
OUR_TOOLS = {"tests", "benchmarks"}
QUIET = {"exercise", "bootstrap", "parameters"}  # cells that need not show anything


def tags(cell: NotebookNode) -> set[str]:
    return set(cell.metadata.get("tags", []))


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [c for c in notebook.cells if c.cell_type == "code" and c.source.strip()]


def lines(cell: NotebookNode) -> list[str]:
    return [line for line in cell.source.splitlines() if line.strip()]


def words(notebook: NotebookNode) -> int:
    # The questions at the end have a source of their own.
    cells = [c for c in notebook.cells if "footer" not in tags(c)]
    prose = " ".join(c.source for c in cells if c.cell_type == "markdown")
    return len(re.sub(r"<[^>]+>|`[^`]*`|!?\[[^]]*\]\([^)]*\)", " ", prose).split())


def text_of(output: NotebookNode) -> str:
    """What a reader sees of an output as text."""
    data = output.get("data", {})
    return "".join(
        [
            output.get("text", ""),
            data.get("text/plain", ""),
            data.get("text/markdown", ""),
        ]
    )


def frame(notebook: NotebookNode) -> Iterator[str]:
    """Header, bootstrap, parameters, Lesson at the top; footer at the end; metadata in between."""
    cells = notebook.cells
    for position, tag in ((0, "header"), (1, "bootstrap"), (-1, "footer")):
        if len(cells) < 3 or tag not in tags(cells[position]):
            yield f"cell {position} is not tagged `{tag}`"
    given = [c for c in cells if "parameters" in tags(c)]
    if len(given) != 1 or not {"PROFILE", "SEED"} <= set(
        re.findall(r"(?m)^(\w+) *=", given[0].source)
    ):
        yield "there is not one cell tagged `parameters` with PROFILE and SEED"
    if not any(
        re.search(r"lesson = Lesson\(", c.source) for c in code_cells(notebook)
    ):
        yield "there is no `lesson = Lesson(…)`"
    about = notebook.metadata.get("course", {})
    if not all(about.get(key) for key in ("title", "summary", "needs")):
        yield "metadata.course wants title, summary and needs"
    if not 0 < about.get("hours", 0) < 10:
        yield "metadata.course wants hours, the time to study it"
    set_up = [c for c in cells if "bootstrap" in tags(c)]
    if not all(c.metadata.get("jupyter", {}).get("source_hidden") for c in set_up):
        yield "the set-up cell is not folded"
    if not 3 <= len(about.get("goals", [])) <= 5:
        yield "metadata.course wants three to five goals"


def lengths(notebook: NotebookNode) -> Iterator[str]:
    """Short cells, short lines, enough prose and not too much."""
    sizes = sorted(len(lines(c)) for c in code_cells(notebook))
    if statistics.median(sizes or [0]) > 6:
        yield f"code cells have {statistics.median(sizes)} lines in the median, over 6"
    if sizes and sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))] > 20:
        yield "more than a tenth of the code cells have over 20 lines"
    for cell in code_cells(notebook):
        for line in lines(cell):
            if len(line) > 88 and "bootstrap" not in tags(cell):
                yield f"a line of {len(line)} columns: {line.strip()[:40]}…"
    ratio = words(notebook) / max(1, sum(sizes))
    if not 6 <= ratio <= 10:
        yield f"{ratio:.2f} words of prose for a line of code, not 6 to 10"


def images(notebook: NotebookNode) -> Iterator[str]:
    """Every image and every plot has a text for those who cannot see it; none is remote."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for alt, tag in IMAGE.findall(cell.source):
                if not alt.strip() and not re.search(r'alt="[^"]+', tag):
                    yield f"an image without alt text: {cell.source[:40]}…"
            if re.search(
                r'!\[[^\]]*\]\(https?:|<img[^>]*src="https?:', cell.source
            ):
                yield "a remote image"
        for output in cell.get("outputs", []):
            # By itself a picture loses its text in JupyterLab, in Colab and in nbconvert.
            for kind in ("image/png", "image/svg+xml", "image/jpeg"):
                if kind in output.get("data", {}):
                    yield "a plot without alt text: use show_figure(figure, alt=…)"
            shown = "".join(output.get("data", {}).get("text/html", ""))
            for tag in re.findall(r"<img\b[^>]*>", shown):
                if not re.search(r'\balt="[^"]+"', tag):
                    yield "a picture without alt text: use show_figure(figure, alt=…)"


def weight(notebook: NotebookNode) -> Iterator[str]:
    """A notebook opens on a phone, and in a viewer that refuses large ones."""
    size = len(nbformat.writes(notebook).encode())
    if size > MOST_BYTES:
        yield f"{size:,} bytes, over {MOST_BYTES:,}"


def outputs(notebook: NotebookNode) -> Iterator[str]:
    """Cells executed 1..n, with outputs, and none of what a reader would stumble on."""
    cells = code_cells(notebook)
    if [c.execution_count for c in cells] != list(range(1, len(cells) + 1)):
        yield "the cells were not executed 1..n"
    for cell in cells:
        start = cell.source[:40].replace("\n", " ")
        at_top = [
            line
            for line in lines(cell)
            if not line.startswith((" ", "#", "def ", "@"))
        ]
        speaks = any(word in line for line in at_top for word in SHOWS)
        if speaks and not cell.outputs and not tags(cell) & QUIET:
            yield f"no output: {start}…"
        for output in cell.outputs:
            if re.search(r"\bhf_[A-Za-z0-9]{20,}", text_of(output)):
                yield f"a hub token in the output of: {start}…"
            if output.output_type == "error":
                yield f"an error in: {start}…"
            if output.output_type == "stream" and output.name == "stderr":
                yield f"something on stderr in: {start}…"
            if NOISE.search(text_of(output)):
                yield f"a warning or a traceback in the output of: {start}…"
            place = PATHS.search(text_of(output))
            if place:
                yield f"an absolute path ({place[0]}…) in the output of: {start}…"


def imported(node: ast.AST) -> set[str]:
    """The packages that a statement imports from."""
    if isinstance(node, ast.ImportFrom) and node.module:
        return {node.module.partition(".")[0]}
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    return set()


def code(notebook: NotebookNode) -> Iterator[str]:
    """All code parses; nothing asks for input, runs remote code or loads a pickle."""
    for cell in code_cells(notebook):
        source = MAGIC.sub("pass", cell.source)
        try:
            tree = ast.parse(source)
        except SyntaxError as error:
            yield f"does not parse: {cell.source[:40]}… ({error.msg})"
            continue
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and getattr(node.func, "id", "") == "input"
            ):
                yield "a cell waits for input()"
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                yield "trust_remote_code is never set"
            for name in OUR_TOOLS & imported(node):
                yield f"a lesson imports from {name}, which a reader need not have"
        if PATHS.search(source):
            yield f"an absolute path in: {cell.source[:40]}…"


def exercises(notebook: NotebookNode) -> Iterator[str]:
    """At least three, each a task, a starter, a check and a folded solution, in this order."""
    order = [
        next(iter(tags(c) & {"exercise", "check", "solution"}), "")
        for c in code_cells(notebook)
    ]
    held = [tag for tag in order if tag]
    if held.count("exercise") < 3:
        yield f"{held.count('exercise')} exercises, fewer than three"
    if held != ["exercise", "check", "solution"] * (len(held) // 3):
        yield "exercises are not starter, check, solution, each time"
    number = "".join(
        re.findall(
            r'Lesson\("(\d\d|A\d)"', "".join(c.source for c in code_cells(notebook))
        )[:1]
    )
    prose = "".join(
        c.source + "\n" for c in notebook.cells if c.cell_type == "markdown"
    )
    for index in range(1, held.count("exercise") + 1):
        if f"### Exercise {number}.{index}" not in prose:
            yield f"no task headed `### Exercise {number}.{index}`"
    for cell in code_cells(notebook):
        if "solution" in tags(cell):
            if not cell.metadata.get("jupyter", {}).get("source_hidden"):
                yield "a solution is not folded"
            if "lesson.solution(" not in cell.source:
                yield "a solution is not checked by lesson.solution"


def sections(notebook: NotebookNode) -> Iterator[str]:
    """The numbered sections count from one, so none was lost or is twice."""
    prose = "\n".join(c.source for c in notebook.cells if c.cell_type == "markdown")
    numbers = [int(number) for number in re.findall(r"(?m)^## (\d+)\. ", prose)]
    if numbers != [*range(1, len(numbers) + 1)]:
        yield f"the sections are numbered {numbers}"


RULES = (frame, lengths, images, weight, outputs, code, exercises, sections)


def problems(notebook: NotebookNode) -> list[str]:
    """Everything that is wrong with the shape of a notebook."""
    return [f"{rule.__name__}: {text}" for rule in RULES for text in rule(notebook)]
