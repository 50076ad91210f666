"""The record of a run of the engine, into results/: `python -m benchmarks.record FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from course.checkout import clean_commit, commit
from utils import artifacts
from utils.errors import ROOT, CourseError
from utils.machine import machine_facts

RESULTS = ROOT / "results"
Facts = dict[str, Any]
# Folders of one machine are no part of a record.
PLACES = ("tokens", "tokenizer", "folder")


def read_log(folder: Path) -> dict[str, list[Facts]]:
    """The lines of a run's log by their kind, which each of them then lacks."""
    kinds: dict[str, list[Facts]] = {"step": [], "validation": [], "sample": []}
    text = (folder / "log.jsonl").read_text("utf-8")
    for line in text.splitlines():
        facts = json.loads(line)
        kind = facts.pop("kind")
        if kind in kinds:
            kinds[kind].append(facts)
    return kinds


def middle(lines: list[Facts], name: str) -> float:
    """The median of a figure.

    >>> middle([{"x": 3}, {"x": 1}, {"x": 2}], "x")
    2
    """
    values = sorted(line[name] for line in lines)
    return values[len(values) // 2]


def record(folder: Path, results: Path = RESULTS) -> Path:
    """Keep what a run of the engine logged: its recipe, curve, speed, memory and samples."""
    kinds = read_log(folder)
    steps = kinds["step"]
    checks = kinds["validation"]
    thin = max(1, len(steps) // 500)
    begun = artifacts.read_json(folder / "recipe.json")
    recipe = begun["recipe"]
    begun["recipe"] = {k: v for k, v in recipe.items() if k not in PLACES}
    memory = [line["memory"] for line in checks]
    facts = {
        "command": f"python -m stages.training RECIPE folder={folder.name}",
        "machine": machine_facts(),
        "commit": commit(),
        **begun,
        "tokens_per_second": middle(steps, "tokens_per_second"),
        "utilization": middle(steps, "utilization"),
        "memory": max(memory, default=None),
        "steps": steps[::thin],
        "validation": checks,
        "samples": kinds["sample"],
    }
    path = results / f"pretraining-{folder.name}.json"
    artifacts.write_json(path, facts)
    return path


if __name__ == "__main__":
    try:
        # Before the work, because its record may be of a commit only.
        clean_commit()
    except CourseError as error:
        sys.exit(str(error))
    print(record(Path(sys.argv[1])))
