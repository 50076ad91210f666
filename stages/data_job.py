"""The corpus build as a job of many workers, for text that one process would clean for days.

    pip install -e ".[data]"                          # datatrove
    python -m stages.data_job ROWS CORPUS --workers 16

ROWS is a folder of Parquet files with the columns of a corpus. `datatrove` deals them out to
workers, starts what failed again, and leaves out what is done; what is done to a row, and to a pair of
rows, are the functions of `stages.corpus` and `stages.near_duplicates`, and the result is theirs to
the byte. Cleaning and comparing go over all workers; between them one process looks at signatures.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from stages.corpus import (
    CORPUS,
    NUMBER,
    TEXT,
    Rejected,
    Row,
    clean,
    content_key,
    finish,
    refuse_a_used,
    rows_of,
    words_at,
    write_rows,
    write_spool,
)
from stages.near_duplicates import Pair, repeats, similar_pairs, suspects
from utils.artifacts import read_json, sealed, write_json
from utils.errors import CourseError

# What is known of each row, kept or not: small, so that one process can read it of all.
FACTS = {"package": TEXT, "path": TEXT, "hash": TEXT, "size": NUMBER}
FACTS |= {"key": pa.binary(), "reason": TEXT, "detail": TEXT}
FACTS |= {"redacted": TEXT, "signature": pa.binary()}
# Pairs are compared in so many shares.
SHARES = 32
Task = Callable[[Any, int, int], None]


def clean_rows(rows: Iterator[Row], facts: list[Row]) -> Iterator[Row]:
    """Clean each row by itself; exact duplicates stay, because it takes all files to know them."""
    for row in rows:
        fact = {name: row[name] for name in ("package", "path", "hash", "size")}
        fact["key"] = content_key(row["content"].encode())
        rejected: Rejected = []
        passed: list[Row] = []
        yield from clean([row], rejected, passed)
        for _, _, reason, detail in rejected:
            fact |= {"reason": reason, "detail": detail}
        for known in passed:
            fact["redacted"] = json.dumps(known["redacted"])
            fact["signature"] = known["signature"].tobytes()
        facts.append(fact)


def clean_files(rows: Path, folder: Path, data: Any, rank: int, world: int) -> None:
    """Clean this task's share of the files."""
    files = sorted(rows.glob("*.parquet"))
    mine = files[rank::world]
    for path in mine:
        facts: list[Row] = []
        cleaned = clean_rows(rows_of(path), facts)
        write_rows(folder / f"clean-{path.name}", CORPUS, cleaned)
        write_rows(folder / f"facts-{path.name}", FACTS, iter(facts))


def drop_exact(folder: Path) -> tuple[list[Row], Rejected, set[int]]:
    """What stays when of equal texts the first is kept, what does not, and which cleaned rows do."""
    passed: list[Row] = []
    rejected: Rejected = []
    kept = set()
    cleaned = 0
    first: dict[bytes, str] = {}
    for path in sorted(folder.glob("facts-*.parquet")):
        for fact in rows_of(path):
            reason, detail = fact["reason"], fact["detail"]
            if not reason:
                original = first.get(fact["key"])
                if original is None:
                    first[fact["key"]] = fact["path"]
                    kept.add(cleaned)
                    passed.append(read_fact(fact))
                else:
                    reason, detail = "exact duplicate", original
                cleaned += 1
            if reason:
                rejected.append((fact["package"], fact["path"], reason, detail))
    if not passed:
        what = "no document passed the filters"
        raise CourseError(what, folder, "choose other sources")
    return passed, rejected, kept


def read_fact(fact: Row) -> Row:
    """What `clean` tells of a row that it keeps."""
    row = {name: fact[name] for name in ("package", "path", "hash", "size")}
    row["redacted"] = Counter(json.loads(fact["redacted"]))
    row["signature"] = np.frombuffer(fact["signature"], np.uint32)
    return row


def cleaned_rows(folder: Path, kept: set[int]) -> Iterator[Row]:
    """The cleaned rows of all files that stay, in their order."""
    number = 0
    for path in sorted(folder.glob("clean-*.parquet")):
        for row in rows_of(path):
            if number in kept:
                yield row
            number += 1


def find_suspects(folder: Path, data: Any, rank: int, world: int) -> None:
    """One task: drop exact duplicates, and pair the texts whose signatures look alike."""
    passed, _, kept = drop_exact(folder)
    signatures = [row["signature"] for row in passed]
    pairs = suspects(np.stack(signatures))
    rows = cleaned_rows(folder, kept)
    write_spool(folder / "spool.part", CORPUS, rows)
    write_pairs(folder / "pairs.npy", pairs)


def compare_pairs(folder: Path, data: Any, rank: int, world: int) -> None:
    """Compare this task's share of the pairs exactly."""
    pairs = read_pairs(folder / "pairs.npy")
    mine = pairs[rank::world]
    places = set()
    for later, earlier, _ in mine:
        places |= {later, earlier}
    words = words_at(folder / "spool.part", places)
    near = similar_pairs(mine, words)
    write_pairs(folder / f"near-{rank:05}.npy", near)


def write_pairs(path: Path, pairs: list[Pair]) -> None:
    """Save pairs of rows, of which there may be none."""
    table = np.array(pairs, float)
    np.save(path, table.reshape(-1, 3))


def read_pairs(path: Path) -> list[Pair]:
    """Pairs of rows (later, earlier) with their similarity."""
    pairs = []
    for later, earlier, like in np.load(path):
        later_row = int(later)
        earlier_row = int(earlier)
        pair = (later_row, earlier_row, float(like))
        pairs.append(pair)
    return pairs


def write_corpus(
    folder: Path, corpus: Path, data: Any, rank: int, world: int
) -> None:
    """One task: leave out the repeats, split, and write the corpus with its report."""
    passed, rejected, _ = drop_exact(folder)
    near = []
    for path in sorted(folder.glob("near-*.npy")):
        near += read_pairs(path)
    with sealed(corpus, {}) as aside:
        spool = aside / "spool.part"
        shutil.copyfile(folder / "spool.part", spool)
        report = finish(aside, spool, passed, repeats(near), rejected)
        write_json(aside / "report.json", report)


def steps_of(rows: Path, corpus: Path, folder: Path) -> list[tuple[str, Task, int]]:
    """The steps of a job: each has a name, what a task does, and how many tasks there are."""
    files = len(list(rows.glob("*.parquet")))
    if not files:
        raise CourseError(
            "there are no Parquet files", rows, "give a folder of rows"
        )
    return [
        ("clean", partial(clean_files, rows, folder), files),
        ("suspects", partial(find_suspects, folder), 1),
        ("compare", partial(compare_pairs, folder), SHARES),
        ("corpus", partial(write_corpus, folder, corpus), 1),
    ]


def check_same_rows(rows: Path, folder: Path) -> None:
    """Refuse to go on with a job whose rows have changed: its tasks would be other files."""
    folder.mkdir(parents=True, exist_ok=True)
    today = {
        path.name: path.stat().st_size for path in sorted(rows.glob("*.parquet"))
    }
    known = read_json(folder / "rows.json")
    if known not in (None, today):
        what = "a job that was begun here had other rows"
        raise CourseError(what, folder, "delete this folder, and begin again")
    write_json(folder / "rows.json", today)


def run(rows: Path, corpus: Path, workers: int) -> Row:
    """Build a corpus of the rows with so many workers; a job that was killed goes on."""
    try:
        from datatrove.executor import LocalPipelineExecutor
    except ImportError as error:
        what = "datatrove, which deals out the work, is not installed"
        raise CourseError(
            what, "this Python", 'pip install -e ".[data]"'
        ) from error
    refuse_a_used(corpus)
    folder = corpus.with_name(f".{corpus.name}.job")
    steps = steps_of(rows, corpus, folder)
    check_same_rows(rows, folder)
    for name, task, tasks in steps:
        LocalPipelineExecutor(
            pipeline=[task],
            tasks=tasks,
            workers=min(workers, tasks),
            logging_dir=str(folder / "log" / name),
        ).run()
    shutil.rmtree(folder)
    return read_json(corpus / "report.json")


def main(arguments: list[str]) -> int:
    """`ROWS CORPUS [--workers N]`."""
    parser = argparse.ArgumentParser("python -m stages.data_job")
    parser.add_argument("rows", type=Path, help="a folder of Parquet files")
    parser.add_argument("corpus", type=Path, help="the folder of the corpus to be")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args(arguments)
    try:
        report = run(options.rows, options.corpus, options.workers)
    except CourseError as error:
        print(error, file=sys.stderr)
        return 1
    print(
        f"{report['kept']:,} of {report['seen']:,} rows kept; {report['reasons']}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
