"""The corpus beside its bars: speed of the build, memory as the input grows, what is found."""

from __future__ import annotations

import functools
import hashlib
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import timing
from stages import corpus, near_duplicates, sources
from stages.near_duplicates import jaccard

Row = dict[str, Any]
PROBE = """
import json, sys, tempfile, threading, time
from pathlib import Path
import duckdb
from benchmarks.corpus import packages_within
from stages import corpus
from utils.machine import memory_of

trees = packages_within(int(sys.argv[1]))
peak = 0
done = threading.Event()

def watch():
    global peak
    while not done.wait(0.02):
        peak = max(peak, memory_of()["private"])

watcher = threading.Thread(target=watch)
with tempfile.TemporaryDirectory() as folder:
    watcher.start()
    cpu = time.process_time()
    wall = time.perf_counter()
    corpus.build(trees, Path(folder))
    cpu = time.process_time() - cpu
    wall = time.perf_counter() - wall
done.set()
watcher.join()
size = sum(tree.size for tree in trees)
print(json.dumps({"bytes": size, "cpu": cpu, "wall": wall, "peak": peak}))
"""


def packages_within(most: int) -> list[sources.Tree]:
    """Packages that fit in `most` bytes: the library always, the rest by a hash of their names."""
    library, *packages = sources.environment()
    packages.sort(key=lambda tree: hashlib.sha1(tree.package.encode()).digest())
    trees = [library]
    room = most - library.size
    for tree in packages:
        if tree.size <= room:
            trees.append(tree)
            room -= tree.size
    return trees


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


def documents(most: int) -> list[str]:
    """Some documents of this environment."""
    with tempfile.TemporaryDirectory() as folder:
        corpus.build(packages_within(most), Path(folder))
        return [
            row["content"]
            for row in corpus.rows_of(Path(folder) / "train-00000.parquet")
        ]


# near duplicates ----------------------------------------------------------------------------------


def far_apart(texts: list[str]) -> list[str]:
    """Texts of which no two share half of their words: a pair among them is wrong to report."""
    chosen: dict[str, set[str]] = {}
    for text in texts:
        own = set(re.findall(r"\w+", text))
        if all(jaccard(own, other) < 0.5 for other in chosen.values()):
            chosen[text] = own
    return list(chosen)


def edit(text: str, share: float, strange: list[str], draw: random.Random) -> str:
    """The text with a share of its lines changed, and one name renamed."""
    lines = text.splitlines(True)
    for place in draw.sample(range(len(lines)), max(1, int(share * len(lines)))):
        line = draw.choice(strange)
        lines[place] = draw.choice(["", line, lines[place] + line])
    name = draw.choice(re.findall(r"[a-z_]{4,}", text) or ["x"])
    return re.sub(rf"\b{name}\b", f"{name}_2", "".join(lines))


def plant(texts: list[str], seed: int) -> tuple[list[str], set[tuple[int, int]]]:
    """Texts with a lightly edited copy of each, to be found, and a heavily edited one, a decoy."""
    draw = random.Random(seed)
    originals = far_apart(texts)
    strange = [
        line for text in originals for line in text.splitlines(True) if line.strip()
    ]
    light = [edit(text, 0.02, strange, draw) for text in originals]
    heavy = [edit(text, 0.4, strange, draw) for text in originals]
    count = len(originals)
    return originals + light + heavy, {
        (count + number, number) for number in range(count)
    }


def pairs_of_library(
    texts: list[str], make: Callable, update: Callable, index: Any
) -> set:
    """The pairs a MinHash library reports at a similarity of 0.85."""
    pairs = set()
    sketches: list[Any] = []
    for number, text in enumerate(texts):
        sketch = make()
        update(sketch, set(re.findall(r"\w+", text)))
        for near in index.query(sketch):
            if sketch.jaccard(sketches[near]) >= 0.85:
                pairs.add((number, near))
        index.insert(number, sketch)
        sketches.append(sketch)
    return pairs


def pairs_of_ours(texts: list[str]) -> set:
    """The pairs the course reports."""
    words = []
    for text in texts:
        words.append(frozenset(near_duplicates.words_of(text.encode())))
    signatures = np.stack([near_duplicates.signature(one) for one in words])
    suspects = near_duplicates.suspects(signatures)
    pairs = near_duplicates.similar_pairs(suspects, dict(enumerate(words)))
    return {(later, earlier) for later, earlier, _ in pairs}


def pairs_of_datasketch(texts: list[str]) -> set:
    """The pairs that datasketch reports."""
    from datasketch import MinHash, MinHashLSH

    def update(sketch: Any, words: set[str]) -> None:
        sketch.update_batch([word.encode() for word in words])

    index = MinHashLSH(threshold=0.85, num_perm=128)
    return pairs_of_library(texts, lambda: MinHash(128), update, index)


def pairs_of_rensa(texts: list[str], seed: int) -> set:
    """The pairs that rensa reports."""
    from rensa import RMinHash, RMinHashLSH

    def update(sketch: Any, words: set[str]) -> None:
        sketch.update(sorted(words))

    make = functools.partial(RMinHash, 128, seed)
    return pairs_of_library(texts, make, update, RMinHashLSH(0.85, 128, 16))


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
    full = probe(10**11)
    half = probe(full["bytes"] // 2)
    texts = documents(30_000_000)
    megabytes = full["bytes"] / 1e6
    peak = full["peak"] / 1e6
    growth = peak - half["peak"] / 1e6
    second_half = "what the second half of the input adds to that peak"
    # Fifty documents at a time, and the median: other work comes and goes.
    classic = statistics.median(
        classic_speed(texts[start : start + 50]) for start in range(0, 250, 50)
    )
    return [
        timing.row(
            "corpus-speed",
            "corpus build, end to end, over the classic cleaning alone",
            "MB / CPU s",
            megabytes / full["cpu"],
            {"classic cleaning": classic},
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
