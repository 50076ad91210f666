"""What the runner costs: an empty notebook by us, by plain papermill, by `jupyter execute`."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat

BAR_SECONDS = 3.5
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}


def seconds_of(command: list[str], env: dict[str, str]) -> float:
    """Seconds of a whole process."""
    start = time.perf_counter()
    subprocess.run(
        command,
        env=env,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return time.perf_counter() - start


def write_empty_course(root: Path) -> Path:
    """A course of one notebook that does nothing; its path."""
    (root / "notebooks").mkdir()
    source = 'PROFILE = "auto"\nSEED = 42'
    cell = nbformat.v4.new_code_cell(source, metadata={"tags": ["parameters"]})
    path = root / "notebooks" / "00_empty.ipynb"
    nbformat.write(
        nbformat.v4.new_notebook(cells=[cell], metadata={"kernelspec": KERNEL}),
        path,
    )
    return path


def rows(repeats: int = 5) -> list[dict[str, Any]]:
    """Medians of interleaved runs of one empty notebook."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        path = write_empty_course(root)
        checkout = str(Path(__file__).resolve().parent.parent)
        env = {
            **os.environ,
            "COURSE_ROOT": scratch,
            "COURSE_BUILD": str(root / "build"),
        }
        env["PYTHONPATH"] = os.pathsep.join(
            filter(None, [checkout, env.get("PYTHONPATH", "")])
        )
        python = [sys.executable, "-m"]
        output = str(root / "out.ipynb")
        commands = {
            "ours": [*python, "course", "run", "--profile", "smoke", "--fresh"],
            "papermill": [*python, "papermill", str(path), output, "-k", "python3"],
            "jupyter execute": [*python, "jupyter", "execute", str(path)],
        }
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(repeats):
            for name, command in commands.items():
                seconds[name].append(seconds_of(command, env))
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    ours = middle.pop("ours")
    return [
        {
            "id": "runner-empty",
            "what": "an empty notebook, whole process",
            "unit": "s",
            "ours": ours,
            "peers": middle,
            "ratio": ours / min(middle.values()),
            "bar": f"<= {BAR_SECONDS} s",
            "holds": ours <= BAR_SECONDS,
            "measured": "now",
        }
    ]
