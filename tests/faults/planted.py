"""A check is worth as much as the faults it refuses: plant some, one at a time, and see.

    python -m tests.faults.planted [ID…]

Each entry of `planted.toml` changes one line in a copy of the checkout; the tests that it names
must pass without it and fail with it. A run of all entries is written to `results/faults.json`.
"""

from __future__ import annotations

import ast
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from course.checkout import clean_commit
from utils.artifacts import write_json
from utils.errors import ROOT, CourseError
from utils.machine import machine_facts

LIST = Path(__file__).with_name("planted.toml")
AT_ONCE = 2
# Far above what a busy machine needs: it only ends what a fault has made endless.
PATIENCE = 900
FAILED = 1


@dataclass(frozen=True)
class Fault:
    """One changed line, and the tests (or the lesson) that must refuse it."""

    id: str
    file: str
    find: str
    put: str
    refused_by: list[str]

    def apply(self, text: str) -> str:
        """The text of the file with the fault in it."""
        if text.count(self.find) != 1:
            what = f"{self.find!r} is {text.count(self.find)} times in {self.file}, not once"
            raise CourseError(
                f"the fault {self.id} no longer fits: {what}",
                LIST,
                "mend the entry",
            )
        return text.replace(self.find, self.put)

    def problem(self, root: Path) -> str:
        """Why this entry is no fault of today's files; nothing if it is one."""
        text = (root / self.file).read_text(encoding="utf-8")
        try:
            changed = self.apply(text)
            ast.parse(changed)
        except (CourseError, SyntaxError) as error:
            return str(error)
        before = text.splitlines()
        after = changed.splitlines()
        different = [
            old for old, new in zip(before, after, strict=False) if old != new
        ]
        if len(before) != len(after) or len(different) != 1:
            return "it changes more or less than one line"
        missing = [name for name in self.refused_by if not is_there(name, root)]
        return f"there is no {missing[0]}" if missing else ""


def is_there(name: str, root: Path) -> bool:
    """Whether a test, a file with doctests, or a lesson is in the checkout."""
    if name.startswith("lesson "):
        return any(
            (root / "notebooks").glob(f"{name.removeprefix('lesson ')}_*.ipynb")
        )
    file, _, test = name.partition("::")
    if not (root / file).is_file():
        return False
    text = (root / file).read_text(encoding="utf-8")
    plain = test.partition("[")[0].rpartition("::")[2]
    return not test or re.search(rf"def {re.escape(plain)}\b", text) is not None


def read_faults(path: Path = LIST) -> list[Fault]:
    """The entries of a list."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["fault"]
    return [Fault(**entry) for entry in entries]


def copy_checkout(root: Path, folder: Path) -> Path:
    """A copy of what git knows or would know of a checkout."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    listing = subprocess.run(
        command, cwd=root, capture_output=True, check=True
    ).stdout
    for name in listing.decode().split("\0"):
        source = root / name
        if name and source.is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    return folder


def environment(copy: Path) -> dict[str, str]:
    """Everything is imported from the copy, and no bytecode of a fault outlives it."""
    own = {
        "PYTHONPATH": str(copy),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    own |= {"COURSE_BUILD": str(copy / "build"), "COURSE_ROOT": str(copy)}
    return {**os.environ, **own}


def run(names: list[str], copy: Path) -> tuple[int, str]:
    """Run some tests, or one lesson, in a copy: the exit status and the last words."""
    if names[0].startswith("lesson "):
        number = names[0].removeprefix("lesson ")
        command = [
            "-m",
            "course",
            "run",
            "--only",
            number,
            "--profile",
            "smoke",
            "--fresh",
        ]
    else:
        command = ["-m", "pytest", "-x", "-q", "--no-header", *names]
    try:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=copy,
            env=environment(copy),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
    except subprocess.TimeoutExpired:
        return FAILED, f"it did not end within {PATIENCE} s"
    lines = [
        line for line in (done.stdout + done.stderr).splitlines() if line.strip()
    ]
    return done.returncode, lines[-1] if lines else ""


def plant(fault: Fault, copy: Path) -> dict[str, Any]:
    """Try one fault in a copy, which is afterwards as it was."""
    path = copy / fault.file
    original = path.read_text(encoding="utf-8")
    start = time.perf_counter()
    path.write_text(fault.apply(original), encoding="utf-8")
    try:
        status, words = run(fault.refused_by, copy)
    finally:
        path.write_text(original, encoding="utf-8")
    seconds = round(time.perf_counter() - start, 1)
    # Another status says that nothing was tested: a wrong name, or a file that cannot be imported.
    refused = status == FAILED
    return {"id": fault.id, "refused": refused, "seconds": seconds, "words": words}


def try_all(faults: list[Fault], root: Path = ROOT) -> list[dict[str, Any]]:
    """Try faults, some at once, each in a copy of its own; those without a sound test come first."""
    copies: queue.Queue[Path] = queue.Queue()
    with (
        tempfile.TemporaryDirectory() as scratch,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        for number in range(AT_ONCE):
            copies.put(copy_checkout(root, Path(scratch, str(number))))

        def work(task: Any, argument: Any) -> Any:
            copy = copies.get()
            try:
                return task(argument, copy)
            finally:
                copies.put(copy)

        sets = list(dict.fromkeys(tuple(fault.refused_by) for fault in faults))
        calm = dict(
            zip(
                sets,
                pool.map(lambda names: work(run, list(names)), sets),
                strict=True,
            )
        )
        sound = []
        results = []
        for fault in faults:
            status, words = calm[tuple(fault.refused_by)]
            if status:
                words = f"its test fails without it: {words}"
                results.append(
                    {"id": fault.id, "refused": False, "seconds": 0, "words": words}
                )
            else:
                sound.append(fault)
        for result in pool.map(lambda fault: work(plant, fault), sound):
            mark = "✓ refused    " if result["refused"] else "✘ NOT REFUSED"
            print(f"{mark} {result['seconds']:6.1f} s  {result['id']}", flush=True)
            results.append(result)
    return results


def main(arguments: list[str]) -> int:
    """Try the faults of some ids, or all and write them down; 1 if one was not refused."""
    faults = read_faults()
    chosen = [fault for fault in faults if not arguments or fault.id in arguments]
    unknown = set(arguments) - {fault.id for fault in faults}
    if unknown:
        print(f"there is no fault {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    made_from = ""
    if not arguments:
        try:
            made_from = clean_commit()
        except CourseError as error:
            print(error, file=sys.stderr)
            return 2
    start = time.perf_counter()
    results = try_all(chosen)
    missed = [result for result in results if not result["refused"]]
    seconds = time.perf_counter() - start
    print(
        f"{len(results) - len(missed)} of {len(results)} faults refused, {seconds:.0f} s"
    )
    for result in missed:
        print(f"✘ {result['id']}: {result['words']}", file=sys.stderr)
    if not arguments:
        record = {
            "commit": made_from,
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "command": "python -m tests.faults.planted",
            "machine": machine_facts(),
            "seconds": round(seconds),
            "faults": [
                {key: r[key] for key in ("id", "refused", "seconds")}
                for r in results
            ],
        }
        write_json(ROOT / "results" / "faults.json", record)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
