"""Floor 3: from source files on a disk to a corpus one may train on.

    trees -> store (three tables) -> documents (one query) -> clean -> near duplicates -> split

One NumPy pass over a document's bytes gives every measure the filters need. No step holds the
corpus: some row groups, and half a kilobyte of signature a document. Every file seen is kept, or
listed in `rejected` with its reason, and `build` counts both.
"""
from __future__ import annotations

import collections
import email
import hashlib
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from stages import near_duplicates as prints
from utils.archives import unpack
from utils.errors import CourseError
from stages.sources import (blob_id, folder_tree, licence_of, opted_out, permissive,
                            read_file, Tree)

Row = dict[str, Any]
SPLITS = ("train", "validation", "test")
VENDORED = re.compile(r"(^|/)(_?vendor(ed)?|_?extern(s|als?)?|third_party)/")


def archive_tree(name: str, folder: Path, sdist: bool = False) -> Tree:
    """A released archive, fetched by pip and unpacked below `folder`; its code is never run.

    A wheel holds the source of a Python package. With `sdist` pip takes the source archive, and
    runs its build script to learn its metadata: only for packages you trust.
    """
    got, root = folder / "archives" / name, folder / "trees" / name
    got.mkdir(parents=True, exist_ok=True)
    root.mkdir(parents=True, exist_ok=True)
    form = ["--no-binary" if sdist else "--only-binary", ":all:"]
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check",
              "--no-deps", *form, "--", name], cwd=got, check=True)
    unpack(next(got.iterdir()), ["**/*.py", "**/METADATA", "**/PKG-INFO"], root)
    facts = min([*root.rglob("METADATA"), *root.rglob("PKG-INFO")], key=lambda p: len(p.parts))
    return folder_tree(root, name, licence_of(email.message_from_bytes(facts.read_bytes())))


# the tables and the query -----------------------------------------------------------------------

TABLES = {"files": "repo_name path id", "licenses": "repo_name license",
          "contents": "id size:int64 binary:bool content copies:int64",
          "rejected": "package path reason detail",
          "corpus": "content path package license size:int64 hash copies:int64"}
QUERY = """SELECT f.repo_name AS package, f.path, c.content, l.license,
  c.size, c.id AS hash, c.copies
FROM {files} AS f
JOIN {contents} AS c ON c.id = f.id
JOIN {licenses} AS l ON l.repo_name = f.repo_name
WHERE NOT c.binary AND f.path LIKE '%.py' AND c.size BETWEEN 1024 AND 1048575"""
REST = """SELECT f.repo_name, f.path, CASE WHEN c.binary THEN 'binary'
WHEN f.path NOT LIKE '%.py' THEN 'not .py' ELSE 'size' END, c.size::VARCHAR
FROM {files} AS f JOIN {contents} AS c ON c.id = f.id
WHERE (f.repo_name, f.path) NOT IN (SELECT (package, path) FROM (""" + QUERY + "))"


def query(tables: Path | None = None, template: str = QUERY) -> str:
    """The query for DuckDB on a folder of Parquet files, or for BigQuery on GitHub's tables."""
    place = str(tables).replace("'", "''").replace("{", "{{").replace("}", "}}")
    where = f"'{place}/{{}}.parquet'" if tables else "`bigquery-public-data.github_repos.{}`"
    names = ("files", "contents", "licenses")
    return template.format(**{name: where.format(name) for name in names})


def cut(rows: Iterable[Row], most: int = 8_000_000) -> Iterator[list[Row]]:
    """Lists of rows that hold about `most` characters of content each."""
    kept, waiting = [], 0
    for row in rows:
        kept.append(row)
        waiting += len(row.get("content") or "") + 200
        if waiting >= most:
            yield kept
            kept, waiting = [], 0
    if kept:
        yield kept


def schema_of(kind: str) -> pa.Schema:
    """The Arrow schema of one of `TABLES`; a column without a type holds text."""
    columns = [(*name.split(":"), "string")[:2] for name in TABLES[kind].split()]
    return pa.schema([(name, pa.type_for_alias(form)) for name, form in columns])


def write(path: Path, kind: str, batches: Iterable[pa.RecordBatch], packed: str = "zstd") -> None:
    """Write Arrow batches as a Parquet file, one row group each."""
    with pq.ParquetWriter(path, schema_of(kind), compression=packed, use_dictionary=False) as file:
        for batch in batches:
            file.write_batch(batch)


def write_rows(path: Path, kind: str, rows: Iterable[Row], packed: str = "zstd") -> None:
    """Write rows, few in memory at a time."""
    schema = schema_of(kind)
    write(path, kind, (pa.RecordBatch.from_pylist(some, schema) for some in cut(rows)), packed)


def batches_of(path: Path, by: str = "", keep: Iterable[str] = ()) -> Iterator[pa.RecordBatch]:
    """A Parquet file in pieces; with `by`, only the rows whose value is in `keep`."""
    names = pa.array(list(keep), pa.string())
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):  # over all at once, Arrow would keep what it read
            for batch in file.iter_batches(256, row_groups=[group]):
                yield batch.filter(pc.is_in(batch[by], names)) if by else batch


def rows_of(path: Path, by: str = "", keep: Iterable[str] = ()) -> Iterator[Row]:
    """The same, row by row."""
    for batch in batches_of(path, by, keep):
        yield from batch.to_pylist()


def rejections(*rows: tuple) -> list[Row]:
    """Rows for the table `rejected`."""
    return [dict(zip(TABLES["rejected"].split(), row)) for row in rows]


def store(trees: list[Tree], folder: Path) -> list[Row]:
    """Write `files`, `contents` and `licenses`, each content once; return what was unreadable."""
    twice = [name for name, n in collections.Counter(t.package for t in trees).items() if n > 1]
    if twice:  # the query would give each of its files twice
        raise CourseError(f"two trees are called {twice[0]}", folder, "give each tree its own name")
    names = sorted((bool(VENDORED.search(path)), tree.package, path, tree.root)
                   for tree in trees for path in tree.paths)
    files, copies = [], collections.Counter()
    bad = [(t.package, path, reason, "") for t in trees for path, reason in t.rejected.items()]

    def contents() -> Iterator[Row]:
        for _, package, path, root in names:
            data, reason = read_file(root / path)
            if reason:
                bad.append((package, path, reason, ""))
                continue
            id, binary = blob_id(data), b"\0" in data
            files.append({"repo_name": package, "path": path, "id": id})
            copies[id] += 1
            if copies[id] == 1:
                yield {"id": id, "size": len(data), "binary": binary,
                       "content": None if binary else data.decode()}

    def counted() -> Iterator[pa.RecordBatch]:
        for batch in batches_of(folder / "contents.part"):
            counts = [copies[id] for id in batch["id"].to_pylist()]
            yield batch.set_column(4, "copies", pa.array(counts, pa.int64()))

    write_rows(folder / "contents.part", "contents", contents(), "none")
    write(folder / "contents.parquet", "contents", counted())
    (folder / "contents.part").unlink()
    write_rows(folder / "files.parquet", "files", files)
    write_rows(folder / "licenses.parquet", "licenses",
               ({"repo_name": tree.package, "license": tree.licence} for tree in trees))
    return rejections(*bad)


def documents(tables: Path, rejected: list[Row]) -> Iterator[Row]:
    """The rows of the query in the order of `contents`, which is streamed and never joined."""
    import duckdb

    columns = schema_of("corpus").names
    with duckdb.connect() as engine:
        found = engine.sql(f"SELECT {', '.join(columns[1:])} FROM ({query(tables)})").fetchall()
        rejected += rejections(*engine.sql(query(tables, REST)).fetchall())
    wanted = collections.defaultdict(list)
    for row in sorted(found, key=lambda row: (bool(VENDORED.search(row[0])), row[1], row[0])):
        wanted[row[4]].append(row)
    for content in rows_of(tables / "contents.parquet", "id", list(wanted)):
        for row in wanted.pop(content["id"]):
            yield dict(zip(columns, (content["content"], *row)))


# cleaning ---------------------------------------------------------------------------------------

COPYLEFT = ("General Public", "Mozilla Public", "GPLv", "GPL-")
GENERATED = re.compile(r"(?i)auto-?generated|automatically[ -]generated|do not edit|"
                       r"generated (by|from|automatically)")
TESTS = re.compile(r"(^|/)(tests?|testing)/|(^|/)(test_[^/]*|conftest)\.py$|_test\.py$")
SETTINGS = re.compile(r"(^|/)(conf|configs?|settings|setup|configuration_\w*)\.py$")
BALLAST_KEPT = 0.3
SECRETS = [  # each pattern starts with the text that gives it away, which is found fast and stays
    ("aws-key", "AKIA", r"[0-9A-Z]{16}\b"),
    ("aws-key", "ASIA", r"[0-9A-Z]{16}\b"),
    ("github-token", "gh", r"[pousr]_[A-Za-z0-9]{36,}"),
    ("github-token", "github_pat_", r"\w{40,}"),
    ("hub-token", "hf_", r"[A-Za-z0-9]{30,}"),
    ("model-key", "sk-", r"(?<![\w-]sk-)(?=[\w-]{0,80}[0-9])(?=[\w-]{0,80}[A-Z])[\w-]{20,}"),
    ("slack-token", "xox", r"[abprs]-[A-Za-z0-9-]{10,}"),
    ("google-key", "AIza", r"[\w-]{35}"),
    ("web-token", "eyJ", r"(?<![\w-]eyJ)[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+"),
    ("private-key", "-----BEGIN ", r"[A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----(?:(?!-----).)*"
                                   r"-----END [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----"),
    ("password", "://", r"[\w.%+-]*:[^\s:/@'\"{}<>]+(?=@[\w.])")]
MAYBE_EMAIL = re.compile(r"@(?<=\w@)[\w-]+\.")  # starts with a literal, so it is found fast
EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]+@(?!self\.)(?:[\w-]+\.)+"  # `q@k.mT` is a matrix product
                   r"(?:[A-Za-z][a-z]{1,23}|[A-Z]{2,24})\b(?![(\[])")


def objection(row: Row, seen: prints.Measures) -> tuple[str, str]:
    """The first reason to leave a document out, and what it rests on; two empty texts for none."""
    start, names = row["content"][:2000], (row["package"], row["path"])
    asked = [p for p in opted_out() for name in names if fnmatchcase(name, p)]
    copyleft = [sign for sign in COPYLEFT if sign in start]
    generated = GENERATED.search("\n".join(start.split("\n")[:5]))
    spare = int(row["hash"][:8], 16) / 16**8 >= BALLAST_KEPT  # the same share on every machine
    checks = [("licence", not permissive(row["license"]), row["license"]),
              ("opted out", asked, ", ".join(asked)),
              ("copyleft header", copyleft, ", ".join(copyleft)),
              ("generated", generated, generated and generated[0]),
              ("long lines", seen.longest > 1000 or seen.mean > 100, f"longest {seen.longest}"),
              ("few letters", seen.letters < 0.25, f"{seen.letters:.0%} letters and digits"),
              ("odd tokens", seen.per_piece < 1.8, f"{seen.per_piece} bytes a piece"),
              ("tests", spare and TESTS.search(row["path"]), "by its path"),
              ("configuration", spare and SETTINGS.search(row["path"]), "by its path")]
    return next(((reason, detail) for reason, holds, detail in checks if holds), ("", ""))


def redact(text: str) -> tuple[str, collections.Counter]:
    """The text without e-mail addresses and secrets, and how many of each there were.

    >>> redact("ask me@example.org")
    ('ask <e-mail>', Counter({'e-mail': 1}))
    """
    found = collections.Counter()
    for kind, sign, rest in SECRETS:
        if sign in text:
            text, count = re.subn(sign + rest, f"{sign}<{kind}>", text, flags=re.DOTALL)
            found[kind] += count
    if MAYBE_EMAIL.search(text):
        text, found["e-mail"] = EMAIL.subn("<e-mail>", text)
    return text, +found


@dataclass
class Cleaner:
    """Takes documents, gives those that stay; remembers a signature and the names of each."""

    rejected: list[Row]
    signatures: list[np.ndarray] = field(default_factory=list)
    names: list[Row] = field(default_factory=list)
    redacted: collections.Counter = field(default_factory=collections.Counter)

    def run(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Filter, drop exact duplicates (whitespace aside), redact."""
        first: dict[bytes, str] = {}
        for row in rows:
            data = row["content"].encode()
            reason, detail = objection(row, prints.measure(data))
            key = hashlib.blake2b(data.translate(None, b" \t\n\r\f\v"), digest_size=12).digest()
            if not reason and key in first:
                reason, detail = "exact duplicate", first[key]
            if reason:
                self.rejected += rejections((row["package"], row["path"], reason, detail))
                continue
            first[key] = row["path"]
            row["content"], found = redact(row["content"])
            self.redacted += found
            self.signatures.append(prints.signature(prints.word_hashes(data)))
            self.names.append({name: row[name] for name in ("package", "path", "hash", "size")})
            yield row

    def without_repeats(self) -> list[Row]:
        """The names of the documents that stay when near duplicates go."""
        gone = prints.repeats(prints.similar_pairs(np.stack(self.signatures)))
        for later, earlier in gone.items():
            row = self.names[later]
            why = ("near duplicate", self.names[earlier]["path"])
            self.rejected += rejections((row["package"], row["path"], *why))
        return [row for index, row in enumerate(self.names) if index not in gone]


def split_packages(sizes: dict[str, int], share: float = 0.05) -> dict[str, str]:
    """The split of each package: families by a hash of their name; large ones always train.

    >>> sorted(split_packages({"a": 90, "b": 4, "b-two": 1, "c": 5}).items())
    [('a', 'train'), ('b', 'validation'), ('b-two', 'validation'), ('c', 'test')]
    """
    families = collections.defaultdict(list)
    for name in sizes:
        families[re.match(r"[a-z]*", name)[0]].append(name)
    parts, budget = dict.fromkeys(sizes, "train"), share * sum(sizes.values())
    order = sorted(families, key=lambda name: hashlib.sha1(name.encode()).digest())
    for split in ("test", "validation"):
        room = budget
        for names in map(families.get, order):
            weight = sum(sizes[name] for name in names)
            if weight <= room and parts[names[0]] == "train":
                parts |= dict.fromkeys(names, split)
                room -= weight
    return parts


def publishable(folder: Path) -> list[Path]:
    """What others may have of a build: the splits, and the names of what was rejected.

    Not the three tables: `contents` holds every file as it was, refused ones and secrets included.
    """
    return sorted(path for split in (*SPLITS, "rejected") for path in folder.glob(f"{split}*.parquet"))


def build(trees: list[Tree], folder: Path, shard: int = 16_000_000) -> Row:
    """Make the whole corpus in an empty `folder`; returns what was seen, kept, refused and why."""
    start, spool = time.perf_counter(), folder / "clean.part"
    if any(folder.glob("*.parquet")):  # old shards would be taken for a part of this corpus
        raise CourseError("there is a corpus here already", folder, "build in an empty folder")
    rejected = store(trees, folder)
    cleaner = Cleaner(rejected)
    write_rows(spool, "corpus", cleaner.run(documents(folder, rejected)), "none")
    if not cleaner.names:
        raise CourseError("no document passed the filters", folder, "choose other sources")
    kept, sizes = cleaner.without_repeats(), collections.Counter()
    for row in kept:
        sizes[row["package"]] += row["size"]
    parts = split_packages(sizes)
    for split in SPLITS:
        hashes = [row["hash"] for row in kept if parts[row["package"]] == split]
        for number, some in enumerate(cut(rows_of(spool, "hash", hashes), shard)):
            write_rows(folder / f"{split}-{number:05}.parquet", "corpus", some)
    spool.unlink()
    write_rows(folder / "rejected.parquet", "rejected", rejected)
    seen = sum(len(tree.paths) + len(tree.rejected) for tree in trees)
    if seen != len(kept) + len(rejected):
        raise CourseError(f"{seen} seen, {len(kept)} kept, {len(rejected)} rejected", folder)
    return {"seen": seen, "kept": len(kept), "bytes": sum(sizes.values()), "splits": parts,
            "reasons": dict(collections.Counter(row["reason"] for row in rejected).most_common()),
            "redacted": dict(cleaner.redacted), "seconds": time.perf_counter() - start}
