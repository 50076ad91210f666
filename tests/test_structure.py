"""How much one line and one function ask of a reader, counted over each package."""

import ast
import statistics
from collections.abc import Iterator

import pytest

from utils.errors import ROOT

PACKAGES = ["utils", "stages", "course"]


def functions(package: str) -> Iterator[tuple[str, list[int], int]]:
    """Name, numbers of the lines of code, and syntax-tree nodes of every function."""
    for path in sorted((ROOT / package).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            nodes = sum(1 for _ in ast.walk(node))
            numbers = set(range(node.lineno, node.end_lineno + 1))
            if ast.get_docstring(node):
                numbers -= set(
                    range(node.body[0].lineno, node.body[0].end_lineno + 1)
                )
                nodes -= 2
            code = [number for number in numbers if lines[number - 1].strip()]
            code = [
                number
                for number in code
                if not lines[number - 1].strip().startswith("#")
            ]
            yield f"{path.name}:{node.name}", code, nodes


@pytest.mark.parametrize("package", PACKAGES)
def test_a_line_holds_little(package):
    density = sorted(nodes / len(code) for _, code, nodes in functions(package))
    assert statistics.median(density) <= 10
    assert density[int(0.9 * len(density))] <= 16


@pytest.mark.parametrize("package", PACKAGES)
def test_a_function_fits_on_a_screen(package):
    sizes = sorted((len(code), name) for name, code, _ in functions(package))
    assert sizes[len(sizes) // 2][0] <= 13
    assert sizes[int(0.9 * len(sizes))][0] <= 35
    assert sizes[-1][0] <= 60, f"{sizes[-1][1]} has {sizes[-1][0]} lines"


# What trains, plans and makes the data of a large run.
ENGINE = "training run step training_callbacks recipe checkpoints sharding chunked_loss read_ahead"
ENGINE += " tokens order mixture step_memory planner machines published_runs memory launch"
ENGINE += " notebook_launch large large_data large_figures data_job"


@pytest.mark.parametrize("name", ENGINE.split())
def test_a_file_of_the_engine_is_read_in_one_sitting(name):
    text = (ROOT / "stages" / f"{name}.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 400
