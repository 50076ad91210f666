"""What a maintainer does besides running lessons: `python -m course test | style | bench | …`."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from argparse import Namespace
from pathlib import Path

from course import setup
from course.setup import CHECKOUT

# On all cores; what took longest is named, so that it can be seen to grow.
AT_ONCE = ["-n", "auto", "--durations", "25"]
# Each is a program of the environment and its arguments; all run, also when one has failed.
COMMANDS: dict[str, list[list[str]]] = {
    "test": [
        ["python", "-m", "course", "fetch"],
        ["pytest", *AT_ONCE, "-m", "not slow and not release"],
    ],
    "slow-tests": [
        ["python", "-m", "course", "fetch"],
        ["pytest", *AT_ONCE, "-m", "slow and not release"],
    ],
    "style": [
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        ["mypy"],
        ["lint-imports"],
        [
            "codespell",
            "README.md",
            "CHANGELOG.md",
            "CITATION.cff",
            "docs",
            "notebooks/questions",
        ],
    ],
    "bench": [["python", "-m", "benchmarks"]],
    "faults": [
        ["python", "-m", "tests.faults.planted"],
        ["python", "-m", "tests.faults.kills"],
    ],
    "release-check": [
        ["python", "-m", "course", "check", "--strict"],
        ["pytest", "-m", "release"],
    ],
}
MADE_BY_RUNS = ["build", ".pytest_cache", ".mypy_cache", ".ruff_cache"]
MADE_BY_RUNS += [".hypothesis", ".import_linter_cache"]


def run(options: Namespace) -> int:
    """Do a chore; 0 if all of its programs end well."""
    if options.action == "clean":
        return clean()
    if options.action != "bench" and Path(sys.prefix) == setup.VENV:
        setup.run(tests=True)
    codes = []
    for name, *arguments in COMMANDS[options.action]:
        if "--strict" in arguments:
            arguments += ["--profile", options.profile]
        codes.append(call(name, arguments))
    return max(codes)


def call(name: str, arguments: list[str]) -> int:
    """Run a program of this environment in the checkout; its exit status."""
    path = sys.executable
    if name != "python":
        path = str(Path(sysconfig.get_path("scripts")) / name)
    return abs(subprocess.call([path, *arguments], cwd=CHECKOUT))


def clean() -> int:
    """Remove everything that a run made; the assets stay in COURSE_HOME."""
    for name in MADE_BY_RUNS:
        shutil.rmtree(CHECKOUT / name, ignore_errors=True)
    for folder in CHECKOUT.glob("[a-z]*/**/__pycache__"):
        shutil.rmtree(folder, ignore_errors=True)
    return 0
