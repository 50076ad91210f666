"""Holds what a notebook recorded to what is expected of it: nothing drifts silently."""
from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat

from utils.errors import CourseError, ROOT
from utils.lesson import RECORD_TYPE
from utils.show import format_figure


@dataclass
class Verdict:
    """One recorded figure beside what was expected, and beside the sources' figure."""

    name: str
    value: float | None
    unit: str
    expected: str
    problem: str
    source: float | None = None
    source_name: str = ""


def records(path: Path, kind: str) -> list[dict[str, Any]]:
    """The figures or the exercises that an executed notebook holds in its outputs."""
    outputs = [o for c in nbformat.read(path, as_version=4).cells for o in c.get("outputs", [])]
    found = [o["data"][RECORD_TYPE] for o in outputs if RECORD_TYPE in o.get("data", {})]
    return [record for record in found if record["kind"] == kind]


def expectations(profile: str, number: str) -> dict[str, dict[str, float]]:
    """What a lesson must record at a profile."""
    path = ROOT / "expected" / f"{profile}.toml"
    try:
        return tomllib.loads(path.read_text(encoding="utf-8")).get(number, {}) if path.exists() else {}
    except tomllib.TOMLDecodeError as error:
        raise CourseError(f"this is not TOML: {error}", path, "mend the line it names") from None


def bounds(rule: dict[str, float]) -> tuple[float, float]:
    """Lowest and highest value that a rule allows.

    >>> bounds({"value": 3.5, "tolerance": 0.5}), bounds({"min": 4})
    ((3.0, 4.0), (4, inf))
    """
    if "value" in rule:
        return rule["value"] - rule.get("tolerance", 0), rule["value"] + rule.get("tolerance", 0)
    return rule.get("min", -float("inf")), rule.get("max", float("inf"))


def say_rule(rule: dict[str, float]) -> str:
    """A rule in words.

    >>> say_rule({"value": 3.5, "tolerance": 0.5}), say_rule({"max": 2})
    ('3.5 ± 0.5', 'at most 2')
    """
    if "value" in rule:
        return format_figure(rule["value"]) + f" ± {rule.get('tolerance', 0):g}" * ("tolerance" in rule)
    words = {"min": "at least", "max": "at most"}
    return ", ".join(f"{words[key]} {rule[key]:g}" for key in words if key in rule)


def judge_figures(path: Path, profile: str) -> list[Verdict]:
    """Every figure recorded or expected, with what is wrong about it."""
    rules, verdicts = dict(expectations(profile, path.name[:2])), []
    for record in records(path, "figure"):
        name, value, problem = record["name"], record["value"], ""
        rule = rules.pop(name, {})
        if not rule:
            problem = (f"recorded, not expected: add to expected/{profile}.toml "
                       f'"{name}" = {{ value = {value:g}, tolerance = … }}')
        elif not bounds(rule)[0] <= value <= bounds(rule)[1]:  # NaN is in no range
            problem = f"{value:g} is outside {say_rule(rule)}"
        verdicts.append(Verdict(name, value, record["unit"], say_rule(rule), problem,
                                record["source"], record["source_name"]))
    return verdicts + [Verdict(name, None, "", say_rule(rule), "expected, not recorded")
                       for name, rule in rules.items()]


def judge_exercises(path: Path, strict: bool) -> list[str]:
    """What is wrong with the exercises: every solution passes, every wrong answer is refused.

    Strictly, every starter must be refused too; a reader who solved one in place has done no wrong.
    """
    problems, seen = [], {}
    for record in records(path, "exercise"):
        name, which, verdict = record["name"], record["which"], record["verdict"]
        seen.setdefault(name, set()).add(which)
        right = {"answer": verdict != "pass" or not strict, "solution": verdict == "pass",
                 "wrong answer": verdict == "fail"}[which]
        if not right:
            problems.append(f"exercise {name}: its {which} gets {verdict!r} {record['hint']}".strip())
    return problems + [f"exercise {name} has no {part}" for name, which in seen.items()
                       for part in ("answer", "solution") if part not in which]


def problems_of(path: Path, profile: str, strict: bool = False) -> list[str]:
    """All that is wrong with one executed notebook."""
    figures = [f"figure {v.name}: {v.problem}" for v in judge_figures(path, profile) if v.problem]
    return figures + judge_exercises(path, strict)
