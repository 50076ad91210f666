"""From source files on a disk to a corpus one may train on.

    trees -> store (three tables) -> documents (one query) -> clean -> near duplicates -> split

No step holds the corpus: some row groups, and half a kilobyte of signature a document. Every file
seen is kept, or listed in `rejected` with its reason, and `build` counts both.
"""

from __future__ import annotations

import collections
import hashlib
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from stages.near_duplicates import repeats, signature, similar_pairs, word_hashes
from stages.sources import Tree, blob_id, opted_out, permissive, read_file
from utils.errors import CourseError

Row = dict[str, Any]
SPLITS = ("train", "validation", "test")
VENDORED = re.compile(r"(^|/)(_?vendor(ed)?|_?extern(s|als?)?|third_party)/")

# The columns of each table; one without a type holds text.
TABLES = {
    "files": "repo_name path id",
    "licenses": "repo_name license",
    "contents": "id size:int64 binary:bool content copies:int64",
    "rejected": "package path reason detail",
    "corpus": "content path package license size:int64 hash copies:int64",
}
QUERY = """SELECT f.repo_name AS package, f.path, c.content, l.license,
  c.size, c.id AS hash, c.copies
FROM {files} AS f
JOIN {contents} AS c ON c.id = f.id
JOIN {licenses} AS l ON l.repo_name = f.repo_name
WHERE NOT c.binary AND f.path LIKE '%.py' AND c.size BETWEEN 1024 AND 1048575"""
NOT_SELECTED = f"""SELECT f.repo_name AS package, f.path, CASE WHEN c.binary THEN 'binary'
  WHEN f.path NOT LIKE '%.py' THEN 'not .py' ELSE 'size' END AS reason, c.size::VARCHAR AS detail
FROM {{files}} AS f JOIN {{contents}} AS c ON c.id = f.id
WHERE (f.repo_name, f.path) NOT IN (SELECT (package, path) FROM ({QUERY}))"""


def query(tables: Path | None = None, template: str = QUERY) -> str:
    """The query for DuckDB on a folder of Parquet files, or for BigQuery on GitHub's tables.

    >>> query(Path("here")).splitlines()[2]
    "FROM 'here/files.parquet' AS f"
    """
    places = {}
    for name in ("files", "contents", "licenses"):
        places[name] = f"`bigquery-public-data.github_repos.{name}`"
        if tables is not None:
            path = (tables / f"{name}.parquet").as_posix().replace("'", "''")
            places[name] = f"'{path}'"
    return template.format(**places)


def schema_of(table: str) -> pa.Schema:
    """The Arrow schema of one of `TABLES`."""
    columns = [column.partition(":") for column in TABLES[table].split()]
    return pa.schema(
        [(name, pa.type_for_alias(kind or "string")) for name, _, kind in columns]
    )


def chunks(rows: Iterable[Row], characters: int = 8_000_000) -> Iterator[list[Row]]:
    """Lists of rows that hold about so many characters of content each."""
    chunk: list[Row] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += len(row.get("content") or "") + 200
        if size >= characters:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def write_rows(
    path: Path, table: str, rows: Iterable[Row], codec: str = "zstd"
) -> None:
    """Write rows as a Parquet file, few of them in memory at a time."""
    schema = schema_of(table)
    with pq.ParquetWriter(
        path, schema, compression=codec, use_dictionary=False
    ) as file:
        for chunk in chunks(rows):
            file.write_batch(pa.RecordBatch.from_pylist(chunk, schema))


def rows_of(
    path: Path, column: str = "", values: Iterable[str] = ()
) -> Iterator[Row]:
    """The rows of a Parquet file, or those whose `column` has one of some values."""
    wanted = pa.array(list(values), pa.string())
    with pq.ParquetFile(path) as file:
        # Asked for all row groups at once, Arrow would keep what it has read.
        for group in range(file.num_row_groups):
            for batch in file.iter_batches(256, row_groups=[group]):
                if column:
                    batch = batch.filter(pc.is_in(batch[column], wanted))
                yield from batch.to_pylist()


def read_texts(
    corpus: Path, split: str, megabytes: float = float("inf")
) -> Iterator[str]:
    """Documents of one split, about so many megabytes of it: a fair sample.

    A document is in or out by a checksum of its content: nothing is shuffled or held in memory, a
    second pass gives the same documents, and a larger sample contains the smaller one.

    >>> texts = list(read_texts(lesson.need("corpus"), "train", 2))    # doctest: +SKIP
    """
    files = sorted(corpus.glob(f"{split}-*.parquet"))
    if not files:
        raise CourseError(
            f"the corpus has no split {split!r}", corpus, "run lesson 03 again"
        )
    sizes = pq.read_table(files, columns=["size"])["size"].to_numpy()
    limit = min(megabytes * 1e6 / sizes.sum(), 1) * 2**32
    for file in files:
        for batch in pq.ParquetFile(file).iter_batches(256, columns=["content"]):
            for text in batch["content"].to_pylist():
                if zlib.crc32(text.encode()) < limit:
                    yield text


def rejection(package: str, path: str, reason: str, detail: str = "") -> Row:
    """A row of the table `rejected`."""
    return {"package": package, "path": path, "reason": reason, "detail": detail}


def store(trees: list[Tree], folder: Path) -> list[Row]:
    """Write `files`, `contents` and `licenses`, each content once; return what was unreadable."""
    repeated = collections.Counter(tree.package for tree in trees).most_common(1)
    if (
        repeated and repeated[0][1] > 1
    ):  # the query would give each of its files twice
        what = f"two trees are called {repeated[0][0]}"
        raise CourseError(what, folder, "give each tree its own name")
    files: list[Row] = []
    rejected: list[Row] = []
    copies: collections.Counter[str] = collections.Counter()
    for tree in trees:
        rejected += [
            rejection(tree.package, path, why)
            for path, why in tree.rejected.items()
        ]

    def contents() -> Iterator[Row]:
        places = [
            (tree.package, path, tree.root) for tree in trees for path in tree.paths
        ]
        # Vendored copies last: of two equal files the original is the first.
        places.sort(key=lambda place: (bool(VENDORED.search(place[1])), place))
        for package, path, root in places:
            data, reason = read_file(root / path)
            if reason:
                rejected.append(rejection(package, path, reason))
                continue
            blob = blob_id(data)
            binary = b"\0" in data
            files.append({"repo_name": package, "path": path, "id": blob})
            copies[blob] += 1
            if copies[blob] == 1:
                text = None if binary else data.decode()
                yield {
                    "id": blob,
                    "size": len(data),
                    "binary": binary,
                    "content": text,
                }

    def counted(path: Path) -> Iterator[Row]:
        for row in rows_of(path):
            row["copies"] = copies[row["id"]]
            yield row

    # How often a content occurs is known when all files are read, so contents are written twice.
    spool = folder / "contents.part"
    write_rows(spool, "contents", contents(), "none")
    write_rows(folder / "contents.parquet", "contents", counted(spool))
    spool.unlink()
    licences = [
        {"repo_name": tree.package, "license": tree.licence} for tree in trees
    ]
    write_rows(folder / "files.parquet", "files", files)
    write_rows(folder / "licenses.parquet", "licenses", licences)
    return rejected


def documents(tables: Path, rejected: list[Row]) -> Iterator[Row]:
    """The rows of the query in the order of `contents`, which is streamed and never joined.

    What the query does not select is added to `rejected`.
    """
    import duckdb

    columns = schema_of("corpus").names[1:]
    with duckdb.connect() as engine:
        selected = engine.sql(
            f"SELECT {', '.join(columns)} FROM ({query(tables)})"
        ).fetchall()
        for facts in engine.sql(query(tables, NOT_SELECTED)).fetchall():
            rejected.append(rejection(*facts))
    places = [dict(zip(columns, values)) for values in selected]
    places.sort(
        key=lambda row: (
            bool(VENDORED.search(row["path"])),
            row["package"],
            row["path"],
        )
    )
    places_of = collections.defaultdict(list)
    for row in places:
        places_of[row["hash"]].append(row)
    for content in rows_of(tables / "contents.parquet", "id", list(places_of)):
        for row in places_of.pop(content["id"]):
            yield {"content": content["content"], **row}


COPYLEFT = re.compile(r"General Public|Mozilla Public|GPLv|GPL-")
GENERATED = re.compile(
    r"(?i)auto-?generated|automatically[ -]generated|do not edit|generated (by|from|automatically)"
)
TESTS = re.compile(
    r"(^|/)(tests?|testing)/|(^|/)(test_[^/]*|conftest)\.py$|_test\.py$"
)
SETTINGS = re.compile(r"(^|/)(conf|configs?|settings|setup|configuration_\w*)\.py$")
BALLAST_KEPT = 0.3
SPACE, LOWER, UPPER, DIGIT, SIGN = range(5)
KINDS = np.full(256, SIGN, np.uint8)
KINDS[list(b" \t\n\r\f\v")] = SPACE
KINDS[list(b"abcdefghijklmnopqrstuvwxyz_") + list(range(128, 256))] = LOWER
KINDS[list(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ")] = UPPER
KINDS[list(b"0123456789")] = DIGIT


class Measures(NamedTuple):
    """What the filters ask of a document's form: two lengths, a share, and bytes a piece.

    A piece is a run of small letters, of capitals, of digits or of one sign; space is no piece.
    """

    longest_line: int
    mean_line: float
    letters: float
    per_piece: float


def measure(data: bytes) -> Measures:
    """Measure a document that is not empty, in one pass over its bytes.

    >>> measure(b"x = 1\\nyes()")
    Measures(longest_line=5, mean_line=5.0, letters=0.455, per_piece=1.833)
    """
    codes = np.frombuffer(data, np.uint8)
    breaks = np.flatnonzero(codes == ord("\n"))
    lines = np.diff(breaks, prepend=-1, append=len(codes)) - 1
    kinds = KINDS[codes]
    counts = np.bincount(kinds, minlength=5)
    letters = (
        counts[LOWER]
        + counts[UPPER]
        + counts[DIGIT]
        - np.count_nonzero(codes == ord("_"))
    )
    other_kind = kinds[1:] != kinds[:-1]
    other_sign = (kinds[1:] == SIGN) & (codes[1:] != codes[:-1])
    begins = (other_kind | other_sign) & (kinds[1:] != SPACE)
    pieces = 1 + int(np.count_nonzero(begins))
    mean_line = round(float(lines.mean()), 3)
    share = round(float(letters / len(codes)), 3)
    return Measures(
        int(lines.max()), mean_line, share, round(len(codes) / pieces, 3)
    )


def form_objection(form: Measures) -> tuple[str, str]:
    """What the form of a document has against it, and the evidence; two empty texts for nothing."""
    if form.longest_line > 1000 or form.mean_line > 100:
        return "long lines", f"longest {form.longest_line}"
    if form.letters < 0.25:
        return "few letters", f"{form.letters:.0%} letters and digits"
    if form.per_piece < 1.8:
        return "odd tokens", f"{form.per_piece} bytes a piece"
    return "", ""


def objection(row: Row, form: Measures) -> tuple[str, str]:
    """The first reason to leave a document out, and its evidence; two empty texts for none."""
    if not permissive(row["license"]):
        return "licence", row["license"]
    for pattern in opted_out():
        if fnmatchcase(row["package"], pattern) or fnmatchcase(
            row["path"], pattern
        ):
            return "opted out", pattern
    copyleft = COPYLEFT.search(row["content"][:2000])
    if copyleft:
        return "copyleft header", copyleft[0]
    first_lines = row["content"][:2000].split("\n")[:5]
    generated = GENERATED.search("\n".join(first_lines))
    if generated:
        return "generated", generated[0]
    if any(form_objection(form)):
        return form_objection(form)
    # By the hash of its content a document is ballast on every machine or on none.
    if int(row["hash"][:8], 16) / 16**8 >= BALLAST_KEPT:
        if TESTS.search(row["path"]):
            return "tests", "by its path"
        if SETTINGS.search(row["path"]):
            return "configuration", "by its path"
    return "", ""


# Each pattern goes on from the text that gives the secret away, which is found fast and stays.
PRIVATE_KEY = (
    r"[A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----(?:(?!-----).)*"
    r"-----END [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
)
SECRETS = [
    ("aws-key", "AKIA", r"[0-9A-Z]{16}\b"),
    ("aws-key", "ASIA", r"[0-9A-Z]{16}\b"),
    ("github-token", "gh", r"[pousr]_[A-Za-z0-9]{36,}"),
    ("github-token", "github_pat_", r"\w{40,}"),
    ("hub-token", "hf_", r"[A-Za-z0-9]{30,}"),
    (
        "model-key",
        "sk-",
        r"(?<![\w-]sk-)(?=[\w-]{0,80}[0-9])(?=[\w-]{0,80}[A-Z])[\w-]{20,}",
    ),
    ("slack-token", "xox", r"[abprs]-[A-Za-z0-9-]{10,}"),
    ("google-key", "AIza", r"[\w-]{35}"),
    ("web-token", "eyJ", r"(?<![\w-]eyJ)[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+"),
    ("private-key", "-----BEGIN ", PRIVATE_KEY),
    ("password", "://", r"[\w.%+-]*:[^\s:/@'\"{}<>]+(?=@[\w.])"),
]
# Starts with a literal, so it is found fast.
MAYBE_EMAIL = re.compile(r"@(?<=\w@)[\w-]+\.")
# `q@k.mT` is a matrix product. Addresses with nothing but a sign between them are taken as one.
EMAIL = re.compile(
    r"(?<![\w.+-])(?:[\w.+-]+@(?!self\.)(?:[\w-]+\.)+"
    r"(?:[A-Za-z][a-z]{1,23}|[A-Z]{2,24})\b(?![(\[]))+"
)


def redact(text: str) -> tuple[str, collections.Counter[str]]:
    """The text without e-mail addresses and secrets, and how many of each there were.

    >>> redact("ask me@example.org")
    ('ask <e-mail>', Counter({'e-mail': 1}))
    """
    counts: collections.Counter[str] = collections.Counter()
    for kind, sign, rest in SECRETS:
        if sign in text:
            text, count = re.subn(
                sign + rest, f"{sign}<{kind}>", text, flags=re.DOTALL
            )
            counts[kind] += count
    if MAYBE_EMAIL.search(text):
        text, counts["e-mail"] = EMAIL.subn("<e-mail>", text)
    return text, +counts


@dataclass
class Cleaner:
    """Takes documents, gives those that stay; remembers the signature and the names of each."""

    rejected: list[Row]
    signatures: list[np.ndarray] = field(default_factory=list)
    names: list[Row] = field(default_factory=list)
    redacted: collections.Counter[str] = field(default_factory=collections.Counter)
    first_paths: dict[bytes, str] = field(default_factory=dict)

    def clean(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Filter, drop exact duplicates (whitespace aside), redact."""
        for row in rows:
            data = row["content"].encode()
            bare = data.translate(None, b" \t\n\r\f\v")
            key = hashlib.blake2b(bare, digest_size=12).digest()
            reason, detail = objection(row, measure(data))
            if not reason and key in self.first_paths:
                reason, detail = "exact duplicate", self.first_paths[key]
            if reason:
                self.rejected.append(
                    rejection(row["package"], row["path"], reason, detail)
                )
                continue
            self.first_paths[key] = row["path"]
            self.signatures.append(signature(word_hashes(data)))
            self.names.append(
                {name: row[name] for name in ("package", "path", "hash", "size")}
            )
            row["content"], counts = redact(row["content"])
            self.redacted += counts
            yield row

    def without_repeats(self) -> list[Row]:
        """The names of the documents that stay when near duplicates go."""
        gone = repeats(similar_pairs(np.stack(self.signatures)))
        for later, earlier in gone.items():
            row = self.names[later]
            path = self.names[earlier]["path"]
            self.rejected.append(
                rejection(row["package"], row["path"], "near duplicate", path)
            )
        return [row for index, row in enumerate(self.names) if index not in gone]


def split_packages(sizes: dict[str, int], share: float = 0.05) -> dict[str, str]:
    """The split of each package: families by a hash of their name; large ones always train.

    >>> sorted(split_packages({"a": 90, "b": 4, "b-two": 1, "c": 5}).items())
    [('a', 'train'), ('b', 'validation'), ('b-two', 'validation'), ('c', 'test')]
    """
    families = collections.defaultdict(list)
    for name in sizes:
        family = re.sub("[^a-z].*", "", name)
        families[family].append(name)
    order = sorted(
        families, key=lambda family: hashlib.sha1(family.encode()).digest()
    )
    splits = dict.fromkeys(sizes, "train")
    for split in ("test", "validation"):
        room = share * sum(sizes.values())
        for family in order:
            names = families[family]
            size = sum(sizes[name] for name in names)
            if size <= room and splits[names[0]] == "train":
                splits.update(dict.fromkeys(names, split))
                room -= size
    return splits


def build(trees: list[Tree], folder: Path, shard: int = 16_000_000) -> Row:
    """Make the whole corpus in an empty `folder`; returns what was seen, kept, rejected and why."""
    if any(
        folder.glob("*.parquet")
    ):  # old shards would be taken for a part of this corpus
        raise CourseError(
            "there is a corpus here already", folder, "build in an empty folder"
        )
    rejected = store(trees, folder)
    cleaner = Cleaner(rejected)
    spool = folder / "clean.part"
    write_rows(spool, "corpus", cleaner.clean(documents(folder, rejected)), "none")
    if not cleaner.names:
        raise CourseError(
            "no document passed the filters", folder, "choose other sources"
        )
    kept = cleaner.without_repeats()
    sizes: collections.Counter[str] = collections.Counter()
    for row in kept:
        sizes[row["package"]] += row["size"]
    splits = split_packages(sizes)
    for split in SPLITS:
        hashes = [row["hash"] for row in kept if splits[row["package"]] == split]
        for number, rows in enumerate(
            chunks(rows_of(spool, "hash", hashes), shard)
        ):
            write_rows(folder / f"{split}-{number:05}.parquet", "corpus", rows)
    spool.unlink()
    write_rows(folder / "rejected.parquet", "rejected", rejected)
    seen = sum(len(tree.paths) + len(tree.rejected) for tree in trees)
    if seen != len(kept) + len(rejected):
        what = (
            f"{seen} files seen, but {len(kept)} kept and {len(rejected)} rejected"
        )
        raise CourseError(
            what, folder, "report this: a file has been lost or counted twice"
        )
    reasons = collections.Counter(row["reason"] for row in rejected)
    return {
        "seen": seen,
        "kept": len(kept),
        "bytes": sum(sizes.values()),
        "splits": splits,
        "reasons": dict(reasons.most_common()),
        "redacted": dict(cleaner.redacted),
    }
