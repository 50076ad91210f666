"""The first change that docs/contributing.md walks through, made in a clone as its page says."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from utils.errors import ROOT

ENTRY = re.compile(r"^`(- \*\*perceptron\*\*: .+?)`", re.M | re.S)
COMMANDS = re.compile(r"^\.venv/bin/python (-m pytest .+)$", re.M)
COMMIT = re.compile(r"^make sync && (git add -A) && (git commit -m .+)$", re.M)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first") / "course"
    subprocess.run(["git", "clone", "-q", ROOT, folder], check=True)
    # What the set-up of the first lines would make; git ignores such a folder, but not a link.
    (folder / ".venv").symlink_to(sys.prefix)
    ignored = folder / ".git" / "info" / "exclude"
    ignored.parent.mkdir(exist_ok=True)
    ignored.write_text(".venv\n", encoding="utf-8")
    return folder


def run(clone: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=clone, capture_output=True, text=True)


def git(clone: Path, *words: str) -> str:
    who = ["-c", "user.name=Kim", "-c", "user.email=kim@example.org"]
    command = ["git", *who, *words]
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def is_for(hook: dict[str, Any], name: str) -> bool:
    """Whether a hook looks at a file, as pre-commit decides it."""
    return bool(
        ("python" not in hook["types"] or name.endswith(".py"))
        and re.search(hook.get("files", ""), name)
    )


def refused_by(clone: Path) -> list[str]:
    """The hooks that refuse a commit of what is staged, run as pre-commit runs them; it is not installed."""
    names = git(clone, "diff", "--cached", "--name-only").splitlines()
    text = (clone / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    (repository,) = yaml.safe_load(text)["repos"]
    refused = []
    for hook in repository["hooks"]:
        files = [name for name in names if is_for(hook, name)]
        if not files:
            continue
        command = shlex.split(hook["entry"])
        command += files if hook.get("pass_filenames", True) else []
        done = subprocess.run(command, cwd=clone, capture_output=True, text=True)
        if done.returncode:
            refused.append(hook["id"])
    return refused


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
    (words,) = COMMIT.findall(change)
    add, commit = [shlex.split(line)[1:] for line in words]
    slips = {"docs/slip.md": "A lenght.\n", "tests/slip.py": "import os\nx =  1\n"}
    for name, text in slips.items():
        (clone / name).write_text(text, encoding="utf-8")
    git(clone, *add)
    assert refused_by(clone) == ["ruff", "ruff-format", "spelling"]
    for name in slips:
        (clone / name).unlink()
    git(clone, *add)
    assert refused_by(clone) == []
    git(clone, *commit)
    assert git(clone, "show", "--name-only", "--format=").split() == [
        "docs/glossary.md"
    ]
