"""Small courses in a temporary folder, for tests of the engine."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}
PARAMETERS = ('PROFILE = "auto"\nSEED = 42', "parameters")


def lesson_cell(number: str) -> str:
    return f'from utils.lesson import Lesson\nlesson = Lesson("{number}", PROFILE, SEED)'


class Course:
    """A course of its own below a folder; `run` calls the real command line on it."""

    def __init__(self, root: Path) -> None:
        self.root, self.build = root, root / "build"
        (root / "notebooks").mkdir(parents=True)
        (root / "expected").mkdir()
        (root / "README.md").write_text("<!-- lessons:begin --><!-- lessons:end -->")
        self.env = {**os.environ, "COURSE_ROOT": str(root), "COURSE_BUILD": str(self.build)}
        self.env.pop("COURSE_PROFILE", None)

    def add(self, name: str, *cells: str | tuple[str, str]) -> Path:
        notebook = nbformat.v4.new_notebook(metadata={"kernelspec": KERNEL})
        for source, *tags in ((c,) if isinstance(c, str) else c for c in cells):
            notebook.cells.append(nbformat.v4.new_code_cell(source, metadata={"tags": tags}))
        path = self.root / "notebooks" / name
        nbformat.write(notebook, path)
        return path

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "course", *arguments, "--profile", "smoke"]

    def run(self, *arguments: str, **env: str) -> subprocess.CompletedProcess:
        done = subprocess.run(self.command(*arguments), env={**self.env, **env}, text=True,
                              capture_output=True, timeout=300)
        done.all = done.stdout + done.stderr
        return done


@pytest.fixture
def course(tmp_path: Path) -> Course:
    return Course(tmp_path / "course")
