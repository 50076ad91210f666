"""Opens a lesson in JupyterLab: `python -m course lab`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from course import fetch
from course.notebooks import select
from course.work import WORK
from utils import SURROUNDINGS
from utils.errors import ROOT


def choose_file(only: str | None) -> Path:
    """The notebook to open: lesson 00 or the first that is named, her own copy where there is one."""
    path = select(only or "00")[0]
    hers = WORK / path.name
    return hers if hers.exists() else path


def run(only: str | None) -> int:
    """Fetch what one lesson takes, then hold JupyterLab open on it until it is closed."""
    path = choose_file(only)
    # One that cannot be had is told, and keeps nobody from reading.
    fetch.fetch_all(fetch.taken_by(path))
    file = path.relative_to(ROOT).as_posix()
    command = [sys.executable, "-m", "jupyterlab", "--ServerApp.root_dir=."]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        # In a container, and on a rented machine, there is no other user.
        command.append("--allow-root")
    # Where no browser can be opened, the address that is printed leads to the lesson.
    command.append(f"--LabApp.default_url=/lab/tree/{file}")
    print(f"opening {file} in JupyterLab; Ctrl-C twice ends it", flush=True)
    # A terminal in it can log in at the hub; a lesson goes offline by itself.
    return subprocess.call(command, cwd=ROOT, env=SURROUNDINGS)
