"""Documented functions: taken apart whole, or left out."""
from __future__ import annotations

import ast

import pytest

from utils.finetuning import documented_functions

LONG = "    total = 0\n    for value in values:\n        total += value\n    return total / len(values)\n"


def found(text: str) -> list:
    return list(documented_functions(text))


def test_a_method_is_dedented_and_known_for_one() -> None:
    inner = 'def mean(self, values):\n    """The mean of a list of numbers.\n\n    Longer."""\n' + LONG
    text = "class A:\n" + "".join("    " + line + "\n" for line in inner.splitlines())
    (function,) = found(text)
    assert (function.name, function.top) == ("mean", False)
    assert function.docstring == "The mean of a list of numbers."
    assert function.signature == "def mean(self, values):" and function.body.startswith("total = 0")
    ast.parse(function.code)


@pytest.mark.parametrize("text", [
    "def f(:\n",                                                        # no Python
    "def f(values):\n" + LONG,                                          # no docstring
    'def f(values):\n    """Too few words."""\n' + LONG,
    'def f(values):\n    """A docstring with quite enough words."""\n', # no body
    'def f(v): "A docstring with quite enough words."; return [x * 1 for x in v] + [0] * 40 + [1]\n',
    "x = '\0'\n",
])
def test_what_is_of_no_use_is_left_out(text: str) -> None:
    assert found(text) == []


def test_a_long_signature_and_a_decorator_are_kept_apart() -> None:
    text = ('@cache\ndef mean(\n    values: list,\n) -> float:\n'
            '    """The mean of a list of numbers."""\n' + LONG)
    (function,) = found(text)
    assert function.signature == "def mean(\n    values: list,\n) -> float:" and function.top
    ast.parse(function.code)


def test_every_function_of_the_standard_library_that_is_found_parses() -> None:
    import argparse
    import statistics
    import inspect

    functions = [f for module in (argparse, statistics) for f in found(inspect.getsource(module))]
    assert len(functions) > 10
    for function in functions:
        ast.parse(function.code)
        assert function.docstring.split()[0] not in function.body.splitlines()[0]
