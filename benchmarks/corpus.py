"""The corpus room beside its bars: speed of the build, memory as the input grows, what is found."""
from __future__ import annotations

import functools
import json
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

from stages import corpus, near_duplicates as fingerprints, sources

Row = dict[str, Any]
PROBE = """
import json, sys, tempfile, threading, time
from pathlib import Path
import duckdb
from utils import corpus, sources
from utils.common import process_memory
trees = sources.some_of(sources.environment(), int(sys.argv[1]))
peak, done = [0], threading.Event()
def watch():
    while not done.wait(0.02):
        peak[0] = max(peak[0], process_memory().get("private", 0))
watcher = threading.Thread(target=watch)
with tempfile.TemporaryDirectory() as folder:
    watcher.start()
    cpu, wall = time.process_time(), time.perf_counter()
    corpus.build(trees, Path(folder))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
done.set(); watcher.join()
size = sum(tree.size for tree in trees)
print(json.dumps({"bytes": size, "cpu": cpu, "wall": wall, "peak": peak[0]}))
"""


def probe(most: int) -> Row:
    """Build a corpus in its own process: bytes read, seconds, and the peak of private memory."""
    done = subprocess.run([sys.executable, "-c", PROBE, str(most)], capture_output=True,
                          text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def row(id: str, what: str, unit: str, ours: float, bar: float, least: bool = True,
        **peers: float) -> Row:
    """One line of the table; `least`: the bar is to be reached, else it is not to be passed."""
    ratio = ours / max(peers.values()) if peers else None
    return {"id": id, "what": what, "unit": unit, "ours": ours, "peers": peers, "ratio": ratio,
            "bar": bar, "holds": ours >= bar if least else ours <= bar}


def classic_clean(text: str, seen: set, index: Any, number: int) -> None:
    """One document in the classic script's way: regular expressions, and MinHash word by word."""
    from datasketch import MinHash

    bare = re.sub(r"\s+", "", text)
    key, lengths = hash(bare), [len(line) for line in text.splitlines()]
    np.mean(lengths), max(lengths), np.mean([c.isalnum() for c in text])
    if key in seen:
        return
    seen.add(key)
    sketch = MinHash(num_perm=256)
    for token in {t for t in re.compile("[^A-Za-z_0-9]").split(text) if t.strip()}:
        sketch.update(token.encode())
    index.query(sketch)
    index.insert(number, sketch)


def classic_speed(texts: list[str]) -> float:
    """MB per CPU second of the classic cleaning, tables and writing not counted."""
    from datasketch import MinHashLSH

    seen, index, start = set(), MinHashLSH(threshold=0.85, num_perm=256), time.process_time()
    for number, text in enumerate(texts):
        classic_clean(text, seen, index, number)
    return sum(len(text.encode()) for text in texts) / 1e6 / (time.process_time() - start)


def documents(most: int) -> list[str]:
    """Some documents of this environment."""
    with tempfile.TemporaryDirectory() as folder:
        corpus.build(sources.some_of(sources.environment(), most), Path(folder))
        return [row["content"] for row in corpus.rows_of(Path(folder) / "train-00000.parquet")]


def pairs_of_library(texts: list[str], make: Callable, update: Callable, index: Any) -> set:
    """The pairs a MinHash library reports at a similarity of 0.85."""
    found, kept = set(), []
    for number, text in enumerate(texts):
        kept.append(make())
        update(kept[number], set(re.findall(r"\w+", text)))
        near = index.query(kept[number])
        found |= {(number, n) for n in near if kept[number].jaccard(kept[n]) >= 0.85}
        index.insert(number, kept[number])
    return found


def pairs_of_ours(texts: list[str]) -> set:
    """The pairs the course reports."""
    signs = [fingerprints.signature(fingerprints.word_hashes(text.encode())) for text in texts]
    return {(a, b) for a, b, _ in fingerprints.similar_pairs(np.stack(signs))}


def found_rows(texts: list[str]) -> list[Row]:
    """Recall and precision on planted edits: the median of three plantings."""
    from datasketch import MinHash, MinHashLSH
    from rensa import RMinHash, RMinHashLSH

    scores: dict[str, list] = {"ours": [], "datasketch": [], "rensa": []}
    for seed in range(3):
        planted, hidden = fingerprints.plant(texts[seed::3][:200], seed)
        library = functools.partial(pairs_of_library, planted)
        for name, found in (
                ("ours", pairs_of_ours(planted)),
                ("datasketch", library(lambda: MinHash(128), lambda m, ws: m.update_batch(
                    [w.encode() for w in ws]), MinHashLSH(threshold=0.85, num_perm=128))),
                ("rensa", library(lambda: RMinHash(128, seed), lambda m, ws: m.update(sorted(ws)),
                                  RMinHashLSH(0.85, 128, 16)))):
            right = len(found & hidden)
            scores[name].append((right / len(hidden), right / len(found)))
    recall, precision = ({name: statistics.median(s[i] for s in got)
                          for name, got in scores.items()} for i in (0, 1))
    return [row("near-duplicate-recall", "planted edits found", "share", recall.pop("ours"),
                0.95, **recall),
            row("near-duplicate-precision", "reported pairs that were planted", "share",
                precision.pop("ours"), 0.95, **precision)]


def rows() -> list[Row]:
    """Every bar of the corpus room, measured now."""
    whole = probe(10**11)
    half, texts = probe(whole["bytes"] // 2), documents(30_000_000)
    speed, clock = (whole["bytes"] / 1e6 / whole[kind] for kind in ("cpu", "wall"))
    growth = (whole["peak"] - half["peak"]) / 1e6
    return [row("corpus-speed", "corpus build, end to end", "MB / s", clock, 15),
            row("corpus-speed-core", "the same by processor time, which other work hardly moves",
                "MB / CPU s", speed, 15, classic_cleaning_alone=classic_speed(texts[:150])),
            row("corpus-memory", "peak private memory of the build", "MB", whole["peak"] / 1e6,
                1000, False),
            row("corpus-memory-growth", "what the second half of the input adds to that peak", "MB",
                growth, 60, False),
            *found_rows(texts)]


if __name__ == "__main__":
    for line in rows():
        print(json.dumps(line))
