"""The house: floors only look down, functions are small, typed and said."""
import ast
from pathlib import Path

import pytest

from utils.errors import PACKAGE

FLOORS = {"__init__": 0, "common": 0, "bootstrap": 0, "profiles": 1, "folders": 1, "notebooks": 1, "memory": 1, "fingerprints": 1,
          "sources": 1, "assets": 2, "lesson": 2, "packing": 4, "finetuning": 4, "pretraining": 5, "course": 6}  # 3: the other rooms
FILES = sorted(PACKAGE.rglob("*.py"))


def floor(module: str) -> int:
    return FLOORS.get((module.split(".") + ["__init__"])[1], 3)


def module_name(path: Path) -> str:
    return ".".join(("utils", *path.relative_to(PACKAGE).with_suffix("").parts))


def imports(path: Path) -> set[str]:
    """The modules of `utils` that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "utils":
            whole = node.module in ("utils", "course")
            found |= {f"{node.module}.{a.name}" for a in node.names} if whole else {node.module}
        elif isinstance(node, ast.Import):
            found |= {a.name for a in node.names if a.name.split(".")[0] == "utils"}
    return found


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_a_room_imports_only_from_floors_below(path):
    own = module_name(path)
    for other in imports(path):
        same_house = floor(own) == floor(other) == 6
        assert floor(other) < floor(own) or same_house, f"{own} imports {other}"


def test_there_is_no_circle():
    graph = {module_name(p): imports(p) for p in FILES}

    def visit(module, above):
        assert module not in above, f"circle: {' -> '.join([*above, module])}"
        for other in graph.get(module, ()):
            visit(other, [*above, module])
    for module in graph:
        visit(module, [])


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_functions_are_small_typed_and_said(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inner = {d for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)
             for d in ast.walk(n) if d is not n}
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        own = f"{path.name}:{node.name}"
        assert node.end_lineno - node.lineno < 60, f"{own} is over 60 lines"
        assert node.returns is not None, f"{own} has no return type"
        given = [a for a in node.args.args + node.args.kwonlyargs if a.arg not in ("self", "cls")]
        assert all(a.annotation for a in given), f"{own} has an untyped parameter"
        private = node in inner or node.name.startswith("_") or node.end_lineno - node.lineno < 3
        assert private or ast.get_docstring(node), f"{own} has no docstring"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_lines_are_at_most_110_columns(path):
    assert max(map(len, path.read_text(encoding="utf-8").splitlines() or [""])) <= 110
