"""A library in an environment of its own: its Python, a program run there, or the run on record.

`python -m course elsewhere simpletransformers` builds the environment. Where it is not there, a lesson
shows what is on record, says so, and names the machine and the day.
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from utils import artifacts
from utils.errors import ROOT, CourseError, build_folder
from utils.machine import machine_facts

Facts = dict[str, Any]
NAME = "simpletransformers"
COMMAND = f"python -m course elsewhere {NAME}"


def interpreter(name: str = NAME) -> Path | None:
    """The Python of an environment, or None where that has not been built."""
    image = build_folder() / "elsewhere" / name / "image"
    parts = (
        ("Scripts", "python.exe") if sys.platform == "win32" else ("bin", "python")
    )
    python = image.joinpath(*parts)
    # Its last file: without it the installation was interrupted.
    return python if (image / "installed").exists() and python.exists() else None


def run_there(python: Path, program: str, task: Facts, model: Path) -> Facts:
    """Run a program with another Python, in a folder of its own; the answer that it leaves.

    The folder holds the model as `start`. The program reads `task.json` and writes `answer.json`.
    """
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(model, Path(folder, "start"))
        Path(folder, "task.json").write_text(json.dumps(task), encoding="utf-8")
        Path(folder, "program.py").write_text(program, encoding="utf-8")
        done = subprocess.run(
            [python, "program.py"], cwd=folder, env=environment(),
            capture_output=True, text=True, encoding="utf-8", errors="replace",
        )  # fmt: skip
        answer = Path(folder, "answer.json")
        if done.returncode or not answer.exists():
            last = (done.stderr.strip() or "no answer").splitlines()[-1]
            way = f"see the whole of it with {python}"
            raise CourseError(f"the program failed: {last}", python, way)
        return json.loads(answer.read_text(encoding="utf-8"))


def environment() -> dict[str, str]:
    """What the other Python may know: nothing of this one's packages, and no network."""
    kept = {}
    for name, text in os.environ.items():
        if not name.startswith(("PYTHON", "VIRTUAL_ENV", "COURSE_")):
            kept[name] = text
    kept["HF_HUB_OFFLINE"] = "1"
    kept["WANDB_MODE"] = "disabled"
    return kept


def ask(program: str, task: Facts, model: Path, profile: str) -> Facts:
    """A fresh answer where the environment is there, otherwise the one on record; says which.

    What was asked goes by its hash, so that a record of another program or task is not shown.
    """
    asked = artifacts.hash_json([program, task])
    record = ROOT / "results" / f"A1_{profile}.json"
    python = interpreter()
    if python:
        answer = run_there(python, program, task, model)
        answer["about"] = {
            "asked": asked,
            "date": f"{datetime.date.today()}",
            "machine": machine_facts(),
        }
        aside = build_folder() / "wrapped" / record.name
        aside.parent.mkdir(parents=True, exist_ok=True)
        artifacts.write_json(aside, answer)
        print(f"run now, in an environment of its own: {versions(answer)}")
        return answer
    answer = artifacts.read_json(record) or {}
    about = answer.get("about", {})
    if about.get("asked") != asked:
        what = "this program has not been recorded with this task"
        raise CourseError(what, record, f"build its environment: {COMMAND}")
    cores = about["machine"]["cores"]
    print(f"NOT run now: its environment is not here ({COMMAND} builds it).")
    print(f"On record, {about['date']}, {cores} cores: {versions(answer)}")
    return answer


def versions(answer: Facts) -> str:
    """The packages of a run, in one line."""
    return " | ".join(f"{name} {text}" for name, text in answer["versions"].items())
