"""Holds what a notebook recorded to what is expected of it: nothing drifts silently."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from course.notebooks import Cell, Notebook, cells, read, tags
from utils.errors import ROOT, CourseError
from utils.lesson import RECORD_TYPE
from utils.show import format_figure

Rule = dict[str, float]
MARKED = "nbval-check-output"


@dataclass
class Verdict:
    """One recorded figure beside what was expected, and beside the sources' figure."""

    name: str
    value: Any = None
    kind: str = "figure"
    unit: str = ""
    source: float | None = None
    source_name: str = ""
    expected: str = ""
    # What fails a run; a figure that is merely unusual fails nothing.
    problem: str = ""
    unusual: bool = False


def records(notebook: Notebook, kind: str) -> list[dict[str, Any]]:
    """The figures or the exercises that an executed notebook holds in its outputs."""
    held = []
    for cell in cells(notebook, "code"):
        for output in cell["outputs"]:
            data = output.get("data", {})
            record = data.get(RECORD_TYPE, {})
            if record.get("kind") == kind:
                held.append(record)
    return held


def expectations(profile: str, number: str) -> dict[str, dict[str, Any]] | None:
    """What a lesson must record, in `check` and `typical`; None where a profile expects nothing."""
    path = ROOT / "expected" / f"{profile}.toml"
    if not path.exists():
        return None
    text = path.read_text(encoding="utf-8")
    try:
        lessons = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        what = f"this is not TOML: {error}"
        raise CourseError(what, path, "mend the line it names") from None
    return lessons.get(number, {})


def bounds(rule: Rule) -> tuple[float, float]:
    """Lowest and highest value that a rule allows.

    >>> bounds({"value": 3.5, "tolerance": 0.5}), bounds({"min": 4})
    ((3.0, 4.0), (4, inf))
    """
    if "value" in rule:
        tolerance = rule.get("tolerance", 0)
        return rule["value"] - tolerance, rule["value"] + tolerance
    return rule.get("min", -float("inf")), rule.get("max", float("inf"))


def describe_rule(rule: Rule) -> str:
    """A rule in words.

    >>> describe_rule({"value": 3.5, "tolerance": 0.5}), describe_rule({"max": 2})
    ('3.5 ± 0.5', 'max 2')
    """
    if "value" in rule:
        return f"{format_figure(rule['value'])} ± {rule.get('tolerance', 0):g}"
    return ", ".join(f"{name} {value:g}" for name, value in rule.items())


def judge_figures(
    notebook: Notebook, profile: str, number: str, strict: bool = False
) -> list[Verdict]:
    """Every figure recorded or expected, with what is wrong about it."""
    verdicts = [Verdict(**record) for record in records(notebook, "figure")]
    expected = expectations(profile, number)
    if expected is None:
        return verdicts
    check = expected.get("check", {})
    typical = expected.get("typical", {})
    rules = {**typical, **check}
    for verdict in verdicts:
        name = verdict.name
        value = verdict.value
        if name not in rules:
            line = f'"{name}" = {{ value = {value:g}, tolerance = … }}'
            way = f"recorded, not expected: add to expected/{profile}.toml {line}"
            verdict.problem = way
            continue
        rule = rules[name]
        verdict.expected = describe_rule(rule)
        lowest, highest = bounds(rule)
        # NaN is in no range.
        verdict.unusual = not lowest <= value <= highest
        if verdict.unusual and name in check:
            verdict.problem = f"{value:g} is outside {verdict.expected}"
    wanted = rules if strict else check
    for name in wanted.keys() - {verdict.name for verdict in verdicts}:
        verdict = Verdict(name, problem="expected, not recorded")
        verdict.expected = describe_rule(wanted[name])
        verdicts.append(verdict)
    return verdicts


def refusals(number: str) -> dict[str, str]:
    """The wrong answers of a lesson: the parts `# %% NN.k` of `expected/refused/NN.py`."""
    path = ROOT / "expected" / "refused" / f"{number}.py"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return dict(re.findall(r"(?ms)^# %% (\S+)\n(.*?)(?=^# %% |\Z)", text))


def judge_exercises(
    notebook: Notebook, refused: set[str], strict: bool = False
) -> Iterator[str]:
    """What is wrong with the exercises: every solution passes, every wrong answer is refused.

    `refused` are the exercises of which a wrong answer must have been tried. Strictly, every
    starter must be refused too; a reader who solved one in place has done no wrong.
    """
    seen: dict[str, set[str]] = {name: set() for name in refused}
    for record in records(notebook, "exercise"):
        name = record["name"]
        which = record["which"]
        verdict = record["verdict"]
        seen.setdefault(name, set()).add(which)
        good = {
            "answer": verdict != "pass" or not strict,
            "solution": verdict == "pass",
            "wrong answer": verdict == "fail",
        }
        if not good[which]:
            text = f"its {which} gets {verdict!r} {record['hint']}"
            yield f"exercise {name}: {text}".rstrip()
    for name, tried in seen.items():
        parts = ["answer", "solution"] + ["wrong answer"] * (name in refused)
        missing = [part for part in parts if part not in tried]
        for part in missing:
            yield f"exercise {name} has no {part}"


def output_lines(cell: Cell) -> list[str]:
    """What a cell shows as text, line by line; what it records is judged elsewhere."""
    text = ""
    for output in cell["outputs"]:
        data = output.get("data", {})
        if output.get("name") == "stdout":
            text += "".join(output["text"])
        elif RECORD_TYPE not in data:
            text += "\n" + "".join(data.get("text/plain", "")) + "\n"
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def judge_outputs(notebook: Notebook, committed: Notebook) -> Iterator[str]:
    """Where a marked cell shows something else than the notebook that was run."""
    before = {cell["id"]: cell for cell in cells(committed, "code")}
    for count, cell in enumerate(cells(notebook, "code"), 1):
        source = before.get(cell["id"])
        if MARKED not in tags(cell) or not source or not source["outputs"]:
            continue
        pairs = zip_longest(output_lines(source), output_lines(cell), fillvalue="")
        for old, new in pairs:
            if old != new:
                yield f"cell [{count}] shows {new!r}, not {old!r}"
                break


def problems_of(
    executed: Path,
    profile: str,
    committed: Path | None = None,
    strict: bool = False,
) -> list[str]:
    """All that is wrong with one executed notebook; beside `committed`, the one that was run."""
    notebook, number = read(executed), executed.name[:2]
    verdicts = judge_figures(notebook, profile, number, strict)
    wrong = [verdict for verdict in verdicts if verdict.problem]
    problems = [f"figure {one.name}: {one.problem}" for one in wrong]
    refused = set(refusals(number)) if committed else set()
    problems += judge_exercises(notebook, refused, strict)
    if committed:
        problems += judge_outputs(notebook, read(committed))
    return problems
