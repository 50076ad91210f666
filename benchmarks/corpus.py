"""The corpus beside its bars: speed of the build, memory as the input grows, what is found."""

from __future__ import annotations

import itertools
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import timing
from stages import corpus
from stages.planted import (
    pairs_of_datasketch,
    pairs_of_ours,
    pairs_of_rensa,
    plant,
)
from stages.sources import environment, packages_within

Row = dict[str, Any]
# All packages of this environment, and how often each way is measured.
MOST = 10**11
TURNS = 3
PROBE = """
import json, sys, tempfile, threading, time
from pathlib import Path
import duckdb
import pandas  # pyarrow imports it with its first array
from stages import corpus
from stages.sources import environment, packages_within
from utils.machine import memory_of

trees = packages_within(environment(), int(sys.argv[1]))
peak = 0
watching = 0.0  # the watcher's own CPU seconds are not the build's
done = threading.Event()

def watch():
    global peak, watching
    while not done.wait(0.02):
        peak = max(peak, memory_of()["private"])
        watching = time.thread_time()

watcher = threading.Thread(target=watch)
with tempfile.TemporaryDirectory() as folder:
    watcher.start()
    cpu = time.process_time()
    wall = time.perf_counter()
    corpus.build(trees, Path(folder))
    cpu = time.process_time() - cpu - watching
    wall = time.perf_counter() - wall
done.set()
watcher.join()
size = sum(tree.size for tree in trees)
row = {"bytes": size, "cpu": cpu, "wall": wall, "peak": peak, "watching": watching}
print(json.dumps(row))
"""


def probe(most: int) -> Row:
    """Build a corpus in its own process: bytes read, seconds, and the peak of private memory."""
    command = [sys.executable, "-c", PROBE, str(most)]
    done = subprocess.run(
        command, capture_output=True, encoding="utf-8", check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def row(
    name: str,
    what: str,
    unit: str,
    ours: float,
    bar: float,
    least: bool = True,
    **peers: float,
) -> Row:
    """One line of the table; `least`: the bar is to be reached, else it is not to be passed."""
    return {
        "id": name,
        "what": what,
        "unit": unit,
        "ours": ours,
        "peers": peers,
        "ratio": ours / max(peers.values()) if peers else None,
        "bar": bar,
        "holds": ours >= bar if least else ours <= bar,
        "measured": "now",
    }


def classic_clean(text: str, seen: set[int], index: Any, number: int) -> None:
    """One document in the classic script's way: regular expressions, and MinHash word by word."""
    from datasketch import MinHash

    bare = hash(re.sub(r"\s+", "", text))
    lengths = [len(line) for line in text.splitlines()]
    np.mean(lengths)
    max(lengths)
    np.mean([character.isalnum() for character in text])
    if bare in seen:
        return
    seen.add(bare)
    sketch = MinHash(num_perm=256)
    words = re.compile("[^A-Za-z_0-9]").split(text)
    for word in {word for word in words if word.strip()}:
        sketch.update(word.encode())
    index.query(sketch)
    index.insert(number, sketch)


def classic_speed(texts: list[str]) -> float:
    """MB per CPU second of the classic cleaning, tables and writing not counted."""
    from datasketch import MinHashLSH

    seen: set[int] = set()
    index = MinHashLSH(threshold=0.85, num_perm=256)
    start = time.process_time()
    for number, text in enumerate(texts):
        classic_clean(text, seen, index, number)
    seconds = time.process_time() - start
    return sum(len(text.encode()) for text in texts) / 1e6 / seconds


def documents(step: int = 20) -> list[str]:
    """One document in `step` of the corpus that the build makes of this environment."""
    with tempfile.TemporaryDirectory() as folder:
        trees = packages_within(environment(), MOST)
        corpus.build(trees, Path(folder))
        rows = corpus.rows_of_splits(Path(folder))
        return [row["content"] for row in itertools.islice(rows, 0, None, step)]


def duplicate_rows(texts: list[str]) -> list[Row]:
    """Recall and precision on planted edits: the median of three plantings."""
    recalls: dict[str, list[float]] = {"ours": [], "datasketch": [], "rensa": []}
    precisions: dict[str, list[float]] = {name: [] for name in recalls}
    for seed in range(3):
        planted, hidden = plant(texts[seed::3][:200], seed)
        reports = {
            "ours": pairs_of_ours(planted),
            "datasketch": pairs_of_datasketch(planted),
            "rensa": pairs_of_rensa(planted, seed),
        }
        for name, pairs in reports.items():
            right = len(pairs & hidden)
            recalls[name].append(right / len(hidden))
            precisions[name].append(right / len(pairs))
    recall = {name: statistics.median(values) for name, values in recalls.items()}
    precision = {
        name: statistics.median(values) for name, values in precisions.items()
    }
    ours = recall.pop("ours"), precision.pop("ours")
    return [
        row(
            "near-duplicate-recall",
            "planted edits found",
            "share",
            ours[0],
            0.95,
            **recall,
        ),
        row(
            "near-duplicate-precision",
            "reported pairs that were planted",
            "share",
            ours[1],
            0.98,
            **precision,
        ),
    ]


def rows() -> list[Row]:
    """Every bar of the corpus, measured now."""
    texts = documents()
    builds = []
    classics = []
    # In turn, and the median of each: other work comes and goes.
    for _ in range(TURNS):
        builds.append(probe(MOST))
        classics.append(classic_speed(texts))
    megabytes = builds[0]["bytes"] / 1e6
    seconds = statistics.median(build["cpu"] for build in builds)
    peak = max(build["peak"] for build in builds) / 1e6
    half = probe(builds[0]["bytes"] // 2)
    growth = peak - half["peak"] / 1e6
    second_half = "what the second half of the input adds to that peak"
    return [
        timing.row(
            "corpus-speed",
            "corpus build, end to end, over the classic cleaning alone",
            "MB / CPU s",
            megabytes / seconds,
            {"classic cleaning": statistics.median(classics)},
            bar=8,
        ),
        row(
            "corpus-memory",
            "peak private memory of the build",
            "MB",
            peak,
            1000,
            False,
        ),
        row("corpus-memory-growth", second_half, "MB", growth, 60, False),
        *duplicate_rows(texts),
    ]


if __name__ == "__main__":
    for line in rows():
        print(json.dumps(line))
