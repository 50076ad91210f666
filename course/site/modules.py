"""The pages of `utils` and `stages`, from their docstrings; their code is read and never imported."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from course.site.links import in_repository
from utils.errors import ROOT

PACKAGES = {
    "utils": "What a lesson imports.",
    "stages": "The finished form of what the lessons build.",
}
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def modules_of(package: str) -> list[Path]:
    """The files of a package that say something of themselves."""
    paths = sorted((ROOT / package).rglob("[a-z]*.py"))
    return [path for path in paths if path.name != "__init__.py"]


def name_of(path: Path) -> str:
    """A module's name, as one imports it."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def page_of(path: Path) -> str:
    """A module's page in Markdown."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    name = name_of(path)
    parts = [f"({name})=\n# `{name}`", paragraphs(ast.get_docstring(tree) or "")]
    place = path.relative_to(ROOT).as_posix()
    parts.append(f"[The code]({in_repository(place)})")
    for node in public(tree.body):
        parts += describe(node, name, "##")
    return "\n\n".join(parts) + "\n"


def describe(node: Definition, owner: str, heading: str) -> list[str]:
    """What a page says of a function, or of a class and its methods."""
    name = f"{owner}.{node.name}"
    # Addresses know no capitals: `Plan` and `plan` need two.
    mark = "class." if isinstance(node, ast.ClassDef) else ""
    parts = [f"({mark}{name})=\n{heading} {escape(node.name)}"]
    parts.append(f"```python\n{signature(node)}\n```")
    parts.append(paragraphs(ast.get_docstring(node) or ""))
    if isinstance(node, ast.ClassDef):
        for inner in public(node.body):
            parts += describe(inner, name, heading + "#")
    return parts


def public(body: list[ast.stmt]) -> list[Definition]:
    """What others may call; of several definitions of one name the last, which holds."""
    found = {}
    for node in body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            found[node.name] = node
    return list(found.values())


def signature(node: Definition) -> str:
    """A definition's first lines, its body left out.

    >>> signature(ast.parse("def f(a: int = 1) -> str: return ''").body[0])
    'def f(a: int=1) -> str'
    """
    decorators = [f"@{ast.unparse(one)}\n" for one in node.decorator_list]
    if isinstance(node, ast.ClassDef):
        return "".join(decorators) + class_line(node)
    kind = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    end = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"{kind} {node.name}({ast.unparse(node.args)}){end}"
    if len(line) > 80:
        line = in_lines(line)
    return "".join(decorators) + line


def in_lines(line: str) -> str:
    """A long signature, one argument a line.

    >>> in_lines("def f(a: dict[str, int], b=(1, 2)) -> int")
    'def f(\\n    a: dict[str, int],\\n    b=(1, 2),\\n) -> int'
    """
    start, _, rest = line.partition("(")
    depth = 0
    text = "\n    "
    for place, letter in enumerate(rest):
        if letter == ")" and not depth:
            return f"{start}({text},\n{rest[place:]}"
        depth += (letter in "([{") - (letter in ")]}")
        text += letter
        if letter == "," and not depth:
            text += "\n   "
    return line


def class_line(node: ast.ClassDef) -> str:
    """A class with its bases and, below it, the fields that it declares."""
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    lines = [f"class {node.name}({bases})" if bases else f"class {node.name}"]
    for inner in node.body:
        if isinstance(inner, ast.AnnAssign):
            lines.append(f"    {ast.unparse(inner)}")
    return "\n".join(lines)


def paragraphs(docstring: str) -> str:
    """A docstring as Markdown: prose as prose, examples and what is indented as code."""
    blocks = []
    for block in re.split(r"\n\s*\n", docstring):
        if block.lstrip().startswith(">>>"):
            blocks.append(f"```python\n{block}\n```")
        elif block.startswith("    "):
            blocks.append(f"```text\n{block}\n```")
        else:
            blocks.append(escape(block))
    return "\n\n".join(blocks)


def escape(text: str) -> str:
    """Prose in which nothing but `code` is markup.

    >>> escape("`*a*` and *b* of <c>, $1")
    '`*a*` and \\\\*b\\\\* of \\\\<c>, \\\\$1'
    """
    parts = re.split(r"(`+[^`]*`+)", text)
    for place in range(0, len(parts), 2):
        parts[place] = re.sub(r"([*_<\[\]$#|{}\\])", r"\\\1", parts[place])
    return "".join(parts)


def package_page(package: str) -> str:
    """A package's page: what it is, and its modules with the first line of each."""
    lines = [f"# {package}", PACKAGES[package], ""]
    rows = []
    for path in modules_of(package):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        first = (ast.get_docstring(tree) or "").split("\n\n")[0]
        name = name_of(path)
        said = escape(" ".join(first.split()))
        rows.append(f"- [`{name}`]({name}.md): {said}")
    toctree = ["```{toctree}", ":hidden:", ""]
    toctree += [name_of(path) for path in modules_of(package)]
    return "\n".join([*lines, *rows, "", *toctree, "```", ""])
