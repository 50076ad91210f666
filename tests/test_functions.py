"""Documented functions are taken apart cleanly, whatever the text they are searched in."""

from __future__ import annotations

import ast
import inspect
import shutil
import statistics
import textwrap
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stages.functions import Function, documented_functions, gather_functions

BODY = """\
    total = 0
    for value in values:
        total += value
    return total / len(values)
"""
MEAN = f'def mean(values):\n    """The mean of a list of numbers.\n\n    Longer."""\n{BODY}'


def functions_of(text: str) -> list[Function]:
    return list(documented_functions(text))


def test_a_method_is_dedented_and_known_for_one() -> None:
    (function,) = functions_of("class A:\n" + textwrap.indent(MEAN, "    "))
    assert function.name == "mean"
    assert not function.top
    assert function.docstring == "The mean of a list of numbers."
    assert function.signature == "def mean(values):"
    assert function.body.startswith("total = 0")
    ast.parse(function.code)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("def f(:\n", id="no Python"),
        pytest.param("x = '\0'\n", id="a null byte"),
        pytest.param("x = '\ud800'\n", id="half a character"),
        pytest.param("(" * 100_000, id="too deep"),
        pytest.param("def f(values):\n" + BODY, id="no docstring"),
        pytest.param(
            'def f(values):\n    """Too few words."""\n' + BODY, id="few words"
        ),
        pytest.param(
            'def f():\n    """A docstring with quite enough words."""\n',
            id="no body",
        ),
        pytest.param(
            'def f(v): "A docstring with quite enough words."; return [x for x in v] + [0] * 40\n',
            id="all on one line",
        ),
    ],
)
def test_what_is_of_no_use_is_left_out(text: str) -> None:
    assert functions_of(text) == []


def test_a_long_signature_and_a_decorator_are_told_apart() -> None:
    signature = "def mean(\n    values: list,\n) -> float:"
    text = f'@cache\n{signature}\n    """The mean of a list of numbers."""\n{BODY}'
    (function,) = functions_of(text)
    assert function.signature == signature
    assert function.top
    ast.parse(function.code)


def test_a_text_that_begins_left_of_the_code_cannot_be_dedented() -> None:
    text = MEAN.replace(
        "total = 0", 'total = len("""\nlines at the left margin\n""")'
    )
    ast.parse(text)
    assert functions_of(text) == []


@pytest.mark.parametrize("mark", ["\x0c", "\x1c", "\u2028", "\x85"])
def test_a_mark_that_is_no_line_end_for_python_moves_nothing(mark: str) -> None:
    (function,) = functions_of(f"# a comment {mark} goes on\n{MEAN}")
    assert function.signature == "def mean(values):"


@pytest.mark.parametrize("end", ["\r\n", "\r"])
def test_other_line_ends_are_line_ends(end: str) -> None:
    (function,) = functions_of(MEAN.replace("\n", end))
    assert function.signature == "def mean(values):"
    ast.parse(function.code)


@pytest.mark.parametrize("module", [shutil, statistics, textwrap])
def test_the_functions_of_the_standard_library_parse(module: object) -> None:
    functions = functions_of(inspect.getsource(module))
    assert functions
    for function in functions:
        ast.parse(function.code)
        assert function.docstring.split()[0] not in function.body.splitlines()[0]


# A loaded machine draws slowly; that is no fault.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

# Pieces that make functions, broken functions, and things that only look like one.
PIECES = st.sampled_from(
    [
        "def f(a, b):",
        "async def g():",
        "class C:",
        "@cache",
        '"""Five words are needed here."""',
        "'''Five words are needed\n  here, on two lines.'''",
        'text = """\nleft of the code\n"""',
        "return a + b",
        "if a: return",
        "# a comment with words",
        "x = 1; y = 2",
        "x = (1,\n2)",
        "\\",
        "\x0c",
        "\u2028",
        "(",
        ")",
        "",
    ]
)
INDENTS = st.sampled_from(["", "    ", "        ", "\t", "  "])
ENDS = st.sampled_from(["\n", "\r\n", "\r", ";", " "])
LINES = st.tuples(INDENTS, PIECES, ENDS)
SOURCES = st.lists(LINES, max_size=12).map(
    lambda lines: "".join(map("".join, lines))
)


@settings(unhurried, max_examples=400)
@given(st.one_of(SOURCES, st.text(max_size=80)), st.booleans())
def test_any_text_gives_functions_that_parse_or_none(
    text: str, in_function: bool
) -> None:
    if in_function:
        text = (
            'def f(a):\n    """Five words are needed here."""\n'
            + textwrap.indent(text, "    ")
        )
    for function in documented_functions(text, shortest=0):
        assert len(ast.parse(function.code).body) == 1
        ast.parse(function.body)
        assert "\n" not in function.docstring


@settings(unhurried, max_examples=100)
@given(st.integers(0, 60), st.integers(0, 60), st.text(max_size=5))
def test_real_code_with_a_hole_in_it_is_no_danger(
    start: int, length: int, patch: str
) -> None:
    source = inspect.getsource(textwrap)
    at = start * len(source) // 60
    broken = source[:at] + patch + source[at + length :]
    for function in documented_functions(broken):
        ast.parse(function.body)
        ast.parse(function.code)


def test_no_package_and_no_file_speaks_for_all(tmp_path: Path) -> None:
    functions = [f"def f{k}(x):\n" + MEAN.split("\n", 1)[1] for k in range(9)]
    content = ["\n\n".join(functions)] * 8
    packages = ["large"] * 6 + ["small"] * 2
    table = pa.table({"package": packages, "content": content})
    pq.write_table(table, tmp_path / "test-00000.parquet")
    found = gather_functions(tmp_path, "test", 8, seed=0, of_package=15)
    of_package = Counter(pair.package for pair in found)
    of_document = Counter(pair.document for pair in found)
    assert of_package == {"large": 15, "small": 12}
    assert max(of_document.values()) == 6
    assert found[0].body.startswith("total = 0")


def test_the_documents_are_drawn_from_the_whole_split(tmp_path: Path) -> None:
    for shard in range(2):
        names = [f"{shard}-{k}" for k in range(10)]
        table = pa.table({"package": names, "content": [MEAN] * 10})
        pq.write_table(table, tmp_path / f"train-{shard}.parquet")
    drawn = [
        gather_functions(tmp_path, "train", 6, seed, of_package=9)
        for seed in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(drawn[0]) == 6
    assert {pair.package[0] for pair in drawn[0]} == {"0", "1"}
