"""The documented functions of a corpus: what each says, and what it does."""
from __future__ import annotations

import ast
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Function:
    """A documented function, taken apart: what it says, and what it does."""

    name: str
    signature: str  # from `def` to the colon, dedented, without decorators
    docstring: str  # its first paragraph, on one line
    body: str       # dedented, without the docstring
    top: bool       # at the top level of its file: no method, not nested

    @property
    def code(self) -> str:
        """The function without its docstring."""
        return f"{self.signature}\n{textwrap.indent(self.body, '    ')}"


def documented_functions(code: str, least_words: int = 5, shortest: int = 60,
                         longest: int = 1_500) -> Iterator[Function]:
    """The functions of a document whose docstring has words enough and whose body is of use.

    >>> text = 'def add(a, b):\\n    "The sum of two numbers, a and b."\\n    return a + b\\n'
    >>> [(f.name, f.docstring, f.body) for f in documented_functions(text, shortest=5)]
    [('add', 'The sum of two numbers, a and b.', 'return a + b')]
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the document's own strings
            tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    lines, outer = code.splitlines(keepends=True), set(map(id, tree.body))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and len(node.body) > 1:
            found = take_apart(node, lines, id(node) in outer)
            if found and len(found.docstring.split()) >= least_words \
                    and shortest <= len(found.body) <= longest:
                yield found


def take_apart(node: ast.FunctionDef, lines: list[str], top: bool) -> Function | None:
    """One function of a parsed document, or None if it has no docstring or shares its lines."""
    words, first, second = ast.get_docstring(node), node.body[0], node.body[1]
    if not words or first.lineno <= node.lineno or second.lineno <= (first.end_lineno or 0):
        return None
    signature = textwrap.dedent("".join(lines[node.lineno - 1:first.lineno - 1])).rstrip()
    body = textwrap.dedent("".join(lines[first.end_lineno:node.end_lineno])).strip("\n").rstrip()
    return Function(node.name, signature, " ".join(words.split("\n\n")[0].split()), body, top)
