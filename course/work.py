"""A learner's own copies of the lessons: `python -m course work`.

They lie in `work/`, which git ignores and which is as deep as `notebooks/`, so that pictures, links and
lessons work there as they do at home. An update never overwrites what she has written.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from course.notebooks import Cell, edited, read, select, source
from utils import artifacts
from utils.errors import ROOT

WORK = ROOT / "work"
# Of each lesson: the edition that her copy began as, and the last one that she was given.
STATE = WORK / ".editions.json"
Editions = dict[str, dict[str, str]]


def edition(path: Path) -> str:
    """A hash of what is written in a notebook; to run it changes nothing of that."""
    cells: list[Cell] = read(path)["cells"]
    words = [[cell["cell_type"], source(cell)] for cell in cells]
    return artifacts.hash_json(words)


def run() -> int:
    """Copy what is new, renew what is untouched, put a new edition beside what she has changed."""
    WORK.mkdir(exist_ok=True)
    state: Editions = artifacts.read_json(STATE) or {}
    shutil.copytree(
        ROOT / "notebooks" / "images", WORK / "images", dirs_exist_ok=True
    )
    counts = {"copied": 0, "renewed": 0, "as it was": 0}
    for path in select():
        done = bring(path, state.setdefault(path.name, {}))
        if done in counts:
            counts[done] += 1
        else:
            print(f"· {path.name}: you have changed yours, the new one is {done}")
    artifacts.write_json(STATE, state)
    told = [f"{count} {what}" for what, count in counts.items() if count]
    print(f"work/: {', '.join(told) or 'all as it was'}")
    return 0


def bring(path: Path, known: dict[str, str]) -> str:
    """Bring one lesson up to date: what was done, or the name of the file put beside hers."""
    new = edition(path)
    # What she has written into notebooks/ is hers as well, and no copy of it is ever renewed.
    ours = "" if edited(path) else new
    hers = WORK / path.name
    there = hers.exists()
    written = edition(hers) if there else ""
    if not there or written == known.get("began") != new:
        shutil.copy(path, hers)
        known.update(began=ours, given=new)
        return "renewed" if there else "copied"
    if written == new:
        known.update(began=ours, given=new)
    if known.get("given") == new:
        return "as it was"
    known["given"] = new
    beside = free_name(path)
    shutil.copy(path, beside)
    return beside.name


def free_name(path: Path) -> Path:
    """A name beside her copy that nothing has yet: `05_x-new.ipynb`, then `05_x-new2.ipynb`."""
    number = 1
    while True:
        mark = str(number) if number > 1 else ""
        beside = WORK / f"{path.stem}-new{mark}.ipynb"
        if not beside.exists():
            return beside
        number += 1
