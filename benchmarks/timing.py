"""What every benchmark needs: ways timed in turn, a row of the table, its inputs, the commit."""

from __future__ import annotations

import functools
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from utils.artifacts import read_manifest
from utils.errors import ROOT, CourseError, build_folder
from utils.lesson import PUBLISHED_BY

Row = dict[str, Any]
# Each of these is made from those before it.
ROAD = ("corpus", "tokenizer", "tokens", "pretrained")


def interleaved(
    *works: Callable[[], object],
    repeats: int,
    warm_up: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    summary: Callable[[Sequence[float]], float] = statistics.median,
) -> list[float]:
    """Seconds of each work, all run in turn, so that a busy moment meets them all.

    The first `warm_up` rounds are not counted. `clock=time.process_time` with `summary=min` gives
    processor time, which other programs hardly move.

    >>> quick, slow = interleaved(lambda: None, lambda: sum(range(10**5)), repeats=3)
    >>> slow > quick
    True
    """
    seconds: list[list[float]] = [[] for _ in works]
    for _ in range(warm_up + repeats):
        for work, times in zip(works, seconds):
            start = clock()
            work()
            times.append(clock() - start)
    return [summary(times[warm_up:]) for times in seconds]


def row(
    id: str,
    what: str,
    unit: str,
    ours: float,
    peers: Mapping[str, float],
    bar: float,
    higher_is_better: bool = True,
    measured: str = "now",
    bar_on: str = "ratio",
    valid: bool = True,
) -> Row:
    """One claim: our figure, those of the peers, and whether the bar is reached.

    The ratio is ours over the first peer, the one that the claim names. The bar bounds that ratio,
    or with `bar_on="ours"` (always so without peers) our own figure. A claim whose condition was
    not met, such as identical output, is not `valid` and does not hold. `measured="recorded"` is
    for a figure that was read from a file.

    >>> claim = row("speed", "a pass", "MB/s", 90, {"theirs": 30}, bar=2)
    >>> claim["ratio"], claim["bar"], claim["holds"]
    (3.0, '>= 2 x', True)
    >>> row("memory", "a pass", "MB", 2, {"theirs": 0}, bar=20, bar_on="ours")["ratio"]
    inf
    """
    first = next(iter(peers.values()), None)
    ratio = None
    if first is not None:
        ratio = ours / first if first else math.inf
    judged = ours if ratio is None or bar_on == "ours" else ratio
    reached = judged >= bar if higher_is_better else judged <= bar
    sign = ">=" if higher_is_better else "<="
    bar_unit = unit if ratio is None or bar_on == "ours" else "x"
    return {
        "id": id,
        "what": what,
        "unit": unit,
        "ours": ours,
        "peers": dict(peers),
        "ratio": ratio,
        "bar": f"{sign} {bar:g} {bar_unit}",
        "holds": bool(valid and reached),
        "measured": measured,
    }


@functools.cache
def artifact(name: str, profile: str = "smoke") -> Path:
    """The folder of an artifact; its lessons are run first, where they have not run as they stand."""
    lessons = ",".join(PUBLISHED_BY[step] for step in ROAD[: ROAD.index(name) + 1])
    command = [sys.executable, "-m", "course", "run", "--only", lessons]
    command += ["--profile", profile]
    subprocess.run(command, cwd=ROOT, check=False, stdout=sys.stderr)
    folder = build_folder() / "artifacts" / profile / name
    if read_manifest(folder) is None:
        fix = f"make run ONLY={lessons} PROFILE={profile}"
        raise CourseError(f"the artifact {name!r} could not be made", folder, fix)
    return folder
