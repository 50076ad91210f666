"""The first change that docs/contributing.md walks through, made in a clone as its page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from utils.errors import ROOT

ENTRY = re.compile(r"^`(- \*\*perceptron\*\*: .+?)`", re.M | re.S)
COMMANDS = re.compile(r"^\.venv/bin/python (-m pytest .+)$", re.M)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first") / "course"
    subprocess.run(["git", "clone", "-q", ROOT, folder], check=True)
    return folder


def run(clone: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=clone, capture_output=True, text=True)


@pytest.mark.slow
def test_a_first_change_goes_as_its_page_says(clone: Path) -> None:
    guide = (clone / "docs" / "contributing.md").read_text(encoding="utf-8")
    _, _, change = guide.partition("## A first change")
    (entry,) = ENTRY.findall(change)
    (check,) = COMMANDS.findall(change)
    glossary = clone / "docs" / "glossary.md"
    lines = glossary.read_text(encoding="utf-8").splitlines(keepends=True)
    trade = lines.index("## Words of the trade\n")
    behind = [
        place
        for place, line in enumerate(lines)
        if place > trade and line.startswith("- **") and line.lower() > entry
    ]
    misplaced = [*lines[: trade + 2], entry + "\n", *lines[trade + 2 :]]
    glossary.write_text("".join(misplaced), encoding="utf-8")
    assert run(clone, *check.split()).returncode != 0
    lines.insert(behind[0], entry + "\n")
    glossary.write_text("".join(lines), encoding="utf-8")
    tested = run(clone, *check.split())
    assert tested.returncode == 0, tested.stdout
    synced = run(clone, "-m", "course", "sync")
    assert synced.returncode == 0 and "written: nothing" in synced.stdout
    # Its translators come later; until then the entry stands in English.
    told = run(clone, "-m", "course", "translations")
    assert told.returncode == 0
    assert told.stdout.count("to do: - **perceptron**") == 2
    spelled = run(clone, "-m", "codespell_lib", "docs")
    assert spelled.stdout == ""
