"""The documented functions of a corpus: what each one says, and what it does."""

from __future__ import annotations

import ast
import io
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pyarrow import dataset


@dataclass(frozen=True)
class Function:
    """A documented function in its parts, each without the indentation it had in its file."""

    name: str
    signature: str  # from `def` to the colon, without decorators
    docstring: str  # its first paragraph, on one line
    body: str  # what follows the docstring
    top: bool  # at the top level of its file: no method, not nested

    @property
    def code(self) -> str:
        """The function without its docstring."""
        return f"{self.signature}\n{textwrap.indent(self.body, '    ')}"


def documented_functions(
    code: str, shortest: int = 60, longest: int = 1_500
) -> Iterator[Function]:
    """The functions of a file with a docstring of five words, and a body of so many characters.

    A file that is no Python has no functions.

    >>> text = 'def add(a, b):\\n    "The sum of two numbers, a and b."\\n    return a + b\\n'
    >>> [(f.name, f.docstring, f.body) for f in documented_functions(text, shortest=5)]
    [('add', 'The sum of two numbers, a and b.', 'return a + b')]
    """
    # Python's own idea of a line; `splitlines` would also split at a form feed.
    lines = io.StringIO(code, newline=None).readlines()
    for node in ast.walk(parse(code) or ast.Pass()):
        if isinstance(node, ast.FunctionDef) and has_docstring_apart(node):
            function = take_apart(node, lines)
            wordy = len(function.docstring.split()) >= 5
            # A text that begins left of the code leaves nothing to dedent.
            whole = parse(function.body) and parse(function.code)
            if wordy and whole and shortest <= len(function.body) <= longest:
                yield function


def has_docstring_apart(node: ast.FunctionDef) -> bool:
    """Whether something follows a docstring that has its lines for itself."""
    if not ast.get_docstring(node) or len(node.body) < 2:
        return False
    first, second = node.body[:2]
    return node.lineno < first.lineno and (first.end_lineno or 0) < second.lineno


def take_apart(node: ast.FunctionDef, lines: list[str]) -> Function:
    """The parts of a function with such a docstring."""
    first = node.body[0]
    signature = dedent(lines[node.lineno - 1 : first.lineno - 1])
    body = dedent(lines[first.end_lineno : node.end_lineno])
    paragraph = (ast.get_docstring(node) or "").split("\n\n")[0]
    docstring = " ".join(paragraph.split())
    return Function(node.name, signature, docstring, body, node.col_offset == 0)


def dedent(lines: list[str]) -> str:
    """Lines as one text without common indentation, and without empty lines around it."""
    return textwrap.dedent("".join(lines)).strip("\n").rstrip()


def parse(code: str) -> ast.Module | None:
    """The syntax tree of a text, or None if it is no Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in the text's own strings
            return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


class Pair(NamedTuple):
    """A docstring and the body it belongs to, and where they come from."""

    package: str
    document: int  # a number, the same for all functions of a file
    docstring: str
    body: str


def gather_functions(
    corpus: Path,
    split: str,
    documents: int,
    seed: int,
    of_package: int,
    of_document: int = 6,
) -> list[Pair]:
    """The functions of documents drawn from a split, at most so many of a package and of a file.

    A few large packages would otherwise decide every score.
    """
    paths = sorted(Path(corpus).glob(f"{split}-*.parquet"))
    table = dataset.dataset(paths).to_table(columns=["package", "content"])
    order = np.random.default_rng(seed).permutation(len(table))[:documents]
    found: list[Pair] = []
    taken: Counter[str | int] = Counter()
    for number, row in enumerate(table.take(order).to_pylist()):
        package = row["package"]
        for function in documented_functions(row["content"]):
            if taken[package] < of_package and taken[number] < of_document:
                taken.update([package, number])
                pair = Pair(package, number, function.docstring, function.body)
                found.append(pair)
    return found
