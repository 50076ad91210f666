"""The documented functions of a corpus: what each one says, and what it does."""

from __future__ import annotations

import ast
import io
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass


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
    code: str, least_words: int = 5, shortest: int = 60, longest: int = 1_500
) -> Iterator[Function]:
    """The functions of a file whose docstring has enough words and whose body has a useful length.

    Lengths are in characters. A file that is no Python has no functions.

    >>> text = 'def add(a, b):\\n    "The sum of two numbers, a and b."\\n    return a + b\\n'
    >>> [(f.name, f.docstring, f.body) for f in documented_functions(text, shortest=5)]
    [('add', 'The sum of two numbers, a and b.', 'return a + b')]
    """
    tree = parse(code)
    if tree is None:
        return
    # Python's own idea of a line; `splitlines` would also split at a form feed.
    lines = io.StringIO(code, newline=None).readlines()
    outer = set(tree.body)
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or len(node.body) < 2:
            continue
        function = take_apart(node, lines, top=node in outer)
        if function is None or len(function.docstring.split()) < least_words:
            continue
        if not shortest <= len(function.body) <= longest:
            continue
        # A text in triple quotes may begin left of the code, and then nothing can be dedented.
        if parse(function.body) and parse(function.code):
            yield function


def take_apart(
    node: ast.FunctionDef, lines: list[str], top: bool
) -> Function | None:
    """The parts of one function, or None if it has no docstring or shares a line with it."""
    docstring = ast.get_docstring(node)
    first, second = node.body[:2]
    docstring_end = first.end_lineno or first.lineno
    if (
        not docstring
        or first.lineno <= node.lineno
        or second.lineno <= docstring_end
    ):
        return None
    signature = dedent(lines[node.lineno - 1 : first.lineno - 1])
    body = dedent(lines[docstring_end : node.end_lineno])
    paragraph = docstring.split("\n\n")[0]
    return Function(node.name, signature, " ".join(paragraph.split()), body, top)


def dedent(lines: list[str]) -> str:
    """Lines as one text without common indentation, and without empty lines around it."""
    text = textwrap.dedent("".join(lines))
    return text.strip("\n").rstrip()


def parse(code: str) -> ast.Module | None:
    """The syntax tree of a text, or None if it is no Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in the text's own strings
            return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
