"""Small courses in a temporary folder, whose notebooks import nothing heavy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest

# Before an old IPython puts a folder on the path that has a `tests` of its own.
import tests  # noqa: F401

KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}
PARAMETERS = ('PROFILE = "auto"\nSEED = 42', "parameters")
# Far above what a busy machine needs: it only ends what would never come.
PATIENCE = 120


# What a system lacks keeps a test away from it, and the reason says what that is.
POSIX = pytest.mark.skipif(
    sys.platform == "win32", reason="signals and sessions are POSIX"
)
LINKS = pytest.mark.skipif(
    sys.platform == "win32", reason="links need a right that Windows rarely gives"
)
LINUX = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux adopts orphans and keeps raw names"
)
MOUNTS = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="mounts a small disk"
)


def lesson_cell(number: str) -> str:
    """A `Lesson` that has not asked torch about the machine, which takes seconds."""
    return f"""from utils.lesson import Lesson
from utils.profiles import PROFILES
lesson = Lesson.__new__(Lesson)
lesson.number, lesson.seed, lesson.profile = "{number}", SEED, PROFILES[PROFILE]
lesson._inputs, lesson._checks = {{}}, {{}}"""


def publish_cell(name: str, text: str = "a") -> str:
    return f'with lesson.publish("{name}") as folder:\n    (folder / "a.txt").write_text("{text}")'


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def heed_interrupts() -> None:
    """Let Ctrl-C end this process, whatever the one that started it does about it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Course:
    """A course of its own below a folder; `run` calls the real command line on it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.build = root / "build"
        (root / "notebooks").mkdir(parents=True)
        (root / "expected/refused").mkdir(parents=True)
        (root / "README.md").write_text(
            "<!-- lessons:begin --><!-- lessons:end -->"
        )
        self.env = {
            **os.environ,
            "COURSE_ROOT": str(root),
            "COURSE_BUILD": str(self.build),
        }
        self.env["PYTHONPATH"] = str(Path(__file__).parent.parent)
        for name in ("COURSE_PROFILE", "COURSE_RUN", "JOBS"):
            self.env.pop(name, None)

    def add(self, name: str, *cells: str | tuple[str, ...]) -> Path:
        """Write a notebook; a cell is its code, or its code and its tags."""
        notebook = nbformat.v4.new_notebook(metadata={"kernelspec": KERNEL})
        for number, cell in enumerate(cells):
            source, *tags = (cell,) if isinstance(cell, str) else cell
            made = nbformat.v4.new_code_cell(
                source, metadata={"tags": tags}, id=f"c{number}"
            )
            notebook.cells.append(made)
        path = self.root / "notebooks" / name
        nbformat.write(notebook, path)
        return path

    def expect(self, text: str) -> None:
        (self.root / "expected/smoke.toml").write_text(text)

    def git(self, *arguments: str) -> None:
        """Run git in the course, as somebody."""
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", *who, "-C", str(self.root), *arguments]
        subprocess.run(command, check=True)

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "course", *arguments, "--profile", "smoke"]

    def start(self, *arguments: str, **env: str) -> subprocess.Popen:
        """Start a run and go on at once."""
        return subprocess.Popen(
            self.command(*arguments),
            env={**self.env, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # Whoever starts the tests in the background of a shell has SIGINT ignored, in them too.
            preexec_fn=heed_interrupts if os.name == "posix" else None,
        )

    def run(self, *arguments: str, **env: str) -> subprocess.CompletedProcess:
        done = subprocess.run(
            self.command(*arguments),
            env={**self.env, **env},
            text=True,
            capture_output=True,
            timeout=5 * PATIENCE,
        )
        done.all = done.stdout + done.stderr
        return done


@pytest.fixture
def course(tmp_path: Path) -> Course:
    return Course(tmp_path / "course")
