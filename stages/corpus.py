"""From source files on a disk to a corpus one may train on.

    trees -> store (three tables) -> documents (one query) -> clean -> near duplicates -> split

`build` goes the whole way; rows from elsewhere join it behind the query, with `build_from_rows`.
No step holds the corpus: some row groups, half a kilobyte of signature a document, and the words
of those that look like another. Every file seen is kept, or listed in `rejected` with the first
reason against it, and `build` counts both.
"""

from __future__ import annotations

import hashlib
import os
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from stages.near_duplicates import (
    Words,
    repeats,
    signature,
    similar_pairs,
    suspects,
    words_of,
)
from stages.sources import Tree, blob_id, opted_out, permissive, read_file
from utils.errors import CourseError

Row = dict[str, Any]
Rows = Iterable[Row]
# Package, path, reason, detail.
Rejected = list[tuple[str, str, str, str]]
SPLITS = ("train", "validation", "test")
VENDORED = re.compile(r"(^|/)(_?vendor(ed)?|_?extern(s|als?)?|third_party)/")

# The columns of each table.
TEXT, NUMBER = pa.string(), pa.int64()
FILES = {"repo_name": TEXT, "path": TEXT, "id": TEXT}
LICENSES = {"repo_name": TEXT, "license": TEXT}
UNCOUNTED = {"id": TEXT, "size": NUMBER, "binary": pa.bool_(), "content": TEXT}
CONTENTS = UNCOUNTED | {"copies": NUMBER}
REJECTED = {"package": TEXT, "path": TEXT, "reason": TEXT, "detail": TEXT}
CORPUS = {"content": TEXT, "path": TEXT, "package": TEXT, "license": TEXT}
CORPUS |= {"size": NUMBER, "hash": TEXT, "copies": NUMBER}
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
    before, after = "`bigquery-public-data.github_repos.", "`"
    if tables is None:
        # GoogleSQL reserves this word.
        template = template.replace(" AS hash", " AS `hash`")
    else:
        folder = tables.as_posix().replace("'", "''")
        before, after = f"'{folder}/", ".parquet'"
    return re.sub("{(.*?)}", lambda table: before + table[1] + after, template)


def bigquery_rows(
    client: Any,
    settings: Any,
    most_dollars: float = 0,
    free_tib: float = 1,
    dollars_per_tib: float = 6.25,
) -> Iterator[Row]:
    """GitHub's public files by our query, priced by a dry run first; never run against Google.

    `client` is a `bigquery.Client()`, `settings` is `bigquery.QueryJobConfig`.
    """
    dry = settings(dry_run=True, use_query_cache=False)
    scanned = client.query(query(), job_config=dry).total_bytes_processed
    # Each of three tables is billed as ten megabytes at least, and rounded up.
    most_billed = scanned + 3 * 10 * 2**20
    dollars = max(0, most_billed / 2**40 - free_tib) * dollars_per_tib
    if dollars > most_dollars:
        what = f"{scanned / 2**40:.2f} TiB: ${dollars:.2f} is over the limit"
        raise CourseError(what, "BigQuery", "allow it by `most_dollars`")
    capped = settings(maximum_bytes_billed=most_billed)
    for row in client.query(query(), job_config=capped).result():
        yield dict(row)


# Characters of content in a row group.
GROUP = 8_000_000


def chunks(rows: Rows, characters: int = GROUP) -> Iterator[list[Row]]:
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


def write_spool(path: Path, columns: Row, rows: Rows) -> None:
    """Write rows that are soon read again: as they lie in memory, which costs least."""
    schema = pa.schema(columns)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as file:
        for chunk in chunks(rows):
            file.write_batch(pa.RecordBatch.from_pylist(chunk, schema))


def tables_of_spool(path: Path) -> Iterator[pa.Table]:
    """The rows of a spool as tables, mapped and not copied: let them go before it is deleted."""
    with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as file:
        for number in range(file.num_record_batches):
            yield pa.Table.from_batches([file.get_batch(number)])


def new_file(path: Path, columns: Row, codec: str = "zstd") -> pq.ParquetWriter:
    """A Parquet file to be written, without dictionaries: hardly a text comes twice."""
    schema = pa.schema(columns)
    return pq.ParquetWriter(path, schema, compression=codec, use_dictionary=False)


def write_rows(path: Path, columns: Row, rows: Rows) -> None:
    """Write rows as a Parquet file, few of them in memory at a time."""
    with new_file(path, columns) as file:
        for chunk in chunks(rows):
            file.write_batch(pa.RecordBatch.from_pylist(chunk, file.schema))


def tables_of(path: Path) -> Iterator[pa.Table]:
    """The rows of a Parquet file as tables, one of them in memory at a time."""
    with pq.ParquetFile(path) as file:
        # Asked for all row groups at once, Arrow would keep what it has read.
        for group in range(file.num_row_groups):
            yield file.read_row_group(group)


def rows_of(path: Path) -> Iterator[Row]:
    """The rows of a Parquet file, few of them in memory at a time."""
    for table in tables_of(path):
        yield from table.to_pylist()


def cut(tables: Iterable[pa.Table], most: int) -> Iterator[pa.Table]:
    """The rows of tables as tables that hold about so many bytes of content each."""
    parts: list[pa.Table] = []
    size = 0
    for table in tables:
        start = 0
        lengths = pc.binary_length(table["content"]).to_pylist()
        for end, length in enumerate(lengths, 1):
            size += length + 200
            if size >= most:
                yield pa.concat_tables([*parts, table[start:end]])
                parts, size, start = [], 0, end
        parts.append(table[start:])
    if size:
        yield pa.concat_tables(parts)


def rows_of_splits(corpus: Path, *splits: str) -> Iterator[Row]:
    """The rows of some splits, of all three if none is named."""
    wanted = splits or SPLITS
    for split in wanted:
        files = sorted(corpus.glob(f"{split}-*.parquet"))
        for file in files:
            yield from rows_of(file)


# What may open a file: comments and blank lines, and texts that stand alone.
COMMENT = r"\s*#.*\n|\s*\n"
DOCSTRING = r'\s*[rRuU]?(?:"""[\s\S]*?"""|"[^"\n]+"|' + r"'''[\s\S]*?'''|'[^'\n]+')"
HEADER = re.compile(rf"\A(?:{COMMENT}|{DOCSTRING}[ \t]*(?:#.*)?(?:\n|\Z))*")


def body(text: str) -> str:
    """A text without the comments and the docstring that open it.

    >>> body("# (c) Ada\\n'What it does.'\\nx = 1")
    'x = 1'
    """
    return HEADER.sub("", text)


def show_examples(
    rows: list, pattern: str = r"\S.*", count: int = 3, of: int | None = None
) -> None:
    """Print a few removed files: where, on what evidence, and the first line that fits.

    `of` says how many there are, where `rows` has only some of them.

    >>> show_examples([("a.py", "2 lines", "x = 1\\ny = 2")], of=9)
    a.py
        2 lines | x = 1
    ... 9 in all
    """
    for path, detail, text in rows[:count]:
        line = re.search(pattern, text)
        excerpt = line[0].strip() if line else ""
        print(f"{path}\n    {detail} | {excerpt[:64]}")
    print(f"... {of or len(rows)} in all")


def read_texts(corpus: Path, split: str, megabytes: float = 1e9) -> Iterator[str]:
    """Documents of one split, about so many megabytes of it: a fair sample.

    A document is in or out by a checksum of its content: a second pass gives the same documents,
    and a larger sample contains the smaller one.

    >>> texts = list(read_texts(lesson.need("corpus"), "train", 2))    # doctest: +SKIP
    """
    files = sorted(corpus.glob(f"{split}-*.parquet"))
    if not files:
        what = f"the corpus has no split {split!r}"
        raise CourseError(what, corpus, "run lesson 03 again")
    sizes = pq.read_table(files, columns=["size"])["size"].to_numpy()
    limit = megabytes * 1e6 / sizes.sum() * 2**32
    for file in files:
        for row in rows_of(file):
            text = row["content"]
            if zlib.crc32(text.encode()) < limit:
                yield text


def store(trees: list[Tree], folder: Path) -> Rejected:
    """Write `files`, `contents` and `licenses`, each content once; return what was unreadable."""
    packages = Counter(tree.package for tree in trees)
    for package, count in packages.items():
        if count > 1:  # the query would give each of its files twice
            what = f"two trees are called {package}"
            raise CourseError(what, folder, "give each tree its own name")
    files: list[Row] = []
    rejected: Rejected = []
    copies: Counter[str] = Counter()

    def contents() -> Iterator[Row]:
        places = []
        for tree in trees:
            for path in tree.paths:
                # Vendored copies last: of two equal files the original is the first.
                vendored = bool(VENDORED.search(path))
                place = (vendored, tree.package, path, tree.root)
                places.append(place)
        for _, package, path, root in sorted(places):
            data, reason = read_file(os.path.join(root, path))
            if reason:
                rejected.append((package, path, reason, ""))
                continue
            blob = blob_id(data)
            file = {"repo_name": package, "path": path, "id": blob}
            files.append(file)
            copies[blob] += 1
            if copies[blob] == 1:
                row: Row = {"id": blob, "size": len(data)}
                binary = b"\0" in data
                row["binary"] = binary
                # Arrow takes the bytes of a text as they are; `read_file` has decoded them.
                row["content"] = None if binary else data
                yield row

    for tree in trees:
        for path, reason in tree.rejected.items():
            refusal = (tree.package, path, reason, "")
            rejected.append(refusal)
    # How often a content occurs is known when all files are read, so contents are written twice.
    spool = folder / "contents.part"
    write_spool(spool, UNCOUNTED, contents())
    write_counted(folder / "contents.parquet", spool, copies)
    spool.unlink()
    write_rows(folder / "files.parquet", FILES, files)
    licences = []
    for tree in trees:
        row = {"repo_name": tree.package, "license": tree.licence}
        licences.append(row)
    write_rows(folder / "licenses.parquet", LICENSES, licences)
    return rejected


def write_counted(path: Path, spool: Path, copies: Counter[str]) -> None:
    """Write the contents of a spool again, with how often each occurs.

    Most of them go no further, so the codec is the faster one.
    """
    with new_file(path, CONTENTS, "lz4") as file:
        for table in tables_of_spool(spool):
            counts = [copies[blob] for blob in table["id"].to_pylist()]
            file.write_table(table.append_column("copies", [counts]))


def documents(tables: Path, rejected: Rejected) -> Iterator[Row]:
    """The rows of the query in the order of `contents`, which is streamed and never joined.

    What the query does not select is added to `rejected`.
    """
    import duckdb

    order = f"ORDER BY regexp_matches(path, '{VENDORED.pattern}'), package, path"
    facts = f"SELECT * EXCLUDE content FROM ({query(tables)}) {order}"
    with duckdb.connect() as engine:
        places = engine.sql(facts).to_arrow_table().to_pylist()
        rejected += engine.sql(query(tables, NOT_SELECTED)).fetchall()
    places_of = defaultdict(list)
    for place in places:
        places_of[place["hash"]].append(place)
    for content in rows_of(tables / "contents.parquet"):
        for place in places_of.pop(content["id"], []):
            yield {"content": content["content"], **place}


COPYLEFT = re.compile(r"General Public|Mozilla Public|GPLv|GPL-")
GENERATED = re.compile(
    r"(?i)auto-?generated|automatically[ -]generated|do not edit|generated (by|from|automatically)"
)
TESTS = re.compile(
    r"(^|/)((tests?|testing)/|(test_[^/]*|conftest)\.py$)|_test\.py$"
)
SETTINGS = re.compile(r"(^|/)(conf|configs?|settings|setup|configuration_\w*)\.py$")
BALLAST_KEPT = 0.3
SPACE, LOWER, UPPER, DIGIT, SIGN = 0, 1, 2, 3, 128


def kind_of(byte: int) -> int:
    """What a byte is for the filters; `_` and the bytes of other alphabets are small letters.

    Each sign is a kind of its own, from `SIGN` on.
    """
    character = chr(byte)
    if character in " \t\n\r\f\v":
        return SPACE
    if byte >= 128 or character == "_" or character.islower():
        return LOWER
    if character.isupper():
        return UPPER
    return DIGIT if character.isdigit() else SIGN + byte


KINDS = bytes(map(kind_of, range(256)))


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
    kinds = np.frombuffer(data.translate(KINDS), np.uint8)
    breaks = np.flatnonzero(codes == ord("\n"))
    edges = np.concatenate(([-1], breaks, [len(codes)]))
    lines = edges[1:] - edges[:-1] - 1
    spaces = kinds == SPACE
    others = [spaces, kinds >= SIGN, codes == ord("_")]
    letters = len(codes) - sum(map(int, map(np.count_nonzero, others)))
    # A piece begins where the kind changes, and not with a space.
    begins = (kinds[1:] != kinds[:-1]) & ~spaces[1:]
    pieces = 1 + int(np.count_nonzero(begins))
    longest = int(lines.max())
    mean = round((len(codes) - len(breaks)) / len(lines), 3)
    share = round(letters / len(codes), 3)
    return Measures(longest, mean, share, round(len(codes) / pieces, 3))


def form_objection(form: Measures) -> tuple[str, str]:
    """What the form of a document has against it, and the evidence; two empty texts for nothing."""
    if form.longest_line > 1000 or form.mean_line > 100:
        return "long lines", f"longest {form.longest_line}"
    if form.letters < 0.25:
        return "few letters", f"{form.letters:.0%} letters and digits"
    per_piece = form.per_piece
    if per_piece < 1.8:
        evidence = f"{per_piece} bytes a piece"
        return "odd tokens", evidence
    return "", ""


def objection(row: Row, data: bytes) -> tuple[str, str]:
    """The first reason to leave a document out, and its evidence; two empty texts for none.

    `data` is its content as bytes, measured only if nothing that costs less is against it.
    """
    if not permissive(row["license"]):
        return "licence", row["license"]
    for pattern in opted_out():
        if any(fnmatchcase(row[name], pattern) for name in ("package", "path")):
            return "opted out", pattern
    head = row["content"][:2000]
    # Most heads name neither, and two words are found faster than a pattern.
    named = "Public" in head or "GPL" in head
    copyleft = COPYLEFT.search(head) if named else None
    if copyleft:
        return "copyleft header", copyleft[0]
    first_lines = head.split("\n", 5)[:5]
    generated = GENERATED.search("\n".join(first_lines))
    if generated:
        return "generated", generated[0]
    about_form = form_objection(measure(data))
    if about_form[0]:
        return about_form
    # By the hash of its content a document is ballast on every machine or on none.
    if int(row["hash"][:8], 16) / 16**8 >= BALLAST_KEPT:
        if TESTS.search(row["path"]):
            return "tests", "by its path"
        if SETTINGS.search(row["path"]):
            return "configuration", "by its path"
    return "", ""


PRIVATE_KEY = (
    r"[A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----(?:(?!-----).)*"
    r"-----END [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
)
MODEL_KEY = r"(?<![\w-]sk-)(?=[\w-]{0,80}[0-9])(?=[\w-]{0,80}[A-Z])[\w-]{20,}"
# What gives a secret away, which stays, and what goes. Each begins with a letter that is rare in
# code, because one letter is what Python finds fastest.
SECRETS = [
    ("aws-key", "A[KS]IA", r"[0-9A-Z]{16}\b"),
    ("github-token", "gh", r"[pousr]_[A-Za-z0-9]{36,}"),
    ("github-token", "b(?<=github)_pat_", r"\w{40,}"),
    ("hub-token", "f(?<=hf)_", r"[A-Za-z0-9]{30,}"),
    ("model-key", "k(?<=sk)-", MODEL_KEY),
    ("slack-token", "xox", r"[abprs]-[A-Za-z0-9-]{10,}"),
    ("google-key", "AIza", r"[\w-]{35}"),
    ("web-token", "J(?<=eyJ)", r"(?<![\w-]eyJ)[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+"),
    ("private-key", "B(?<=-----B)EGIN ", PRIVATE_KEY),
    ("password", "://", r"[\w.%+-]*:[^\s:/@'\"{}<>]+(?=@[\w.])"),
]
SIGNS = [re.compile(sign) for _, sign, _ in SECRETS]
# Starts with a literal, so it is found fast.
MAYBE_EMAIL = re.compile(r"@(?<=\w@)[\w-]+\.")
# `q@k.mT` is a matrix product. Addresses with nothing but a sign between them are taken as one.
EMAIL = re.compile(
    r"(?<![\w.+-])(?:[\w.+-]+@(?!self\.)(?:[\w-]+\.)+"
    r"(?:[A-Za-z][a-z]{1,23}|[A-Z]{2,24})\b(?![(\[]))+"
)


def redact(text: str) -> tuple[str, Counter[str]]:
    """The text without e-mail addresses and secrets, and how many of each there were.

    >>> redact("ask me@example.org")
    ('ask <e-mail>', Counter({'e-mail': 1}))
    """
    counts: Counter[str] = Counter()
    for (kind, sign, rest), found in zip(SECRETS, SIGNS):
        if found.search(text):
            secret = re.compile(f"({sign}){rest}", re.DOTALL)
            text, count = secret.subn(rf"\1<{kind}>", text)
            counts[kind] += count
    if "@" in text and MAYBE_EMAIL.search(text):
        # The pattern is slow, and an address stays within its line.
        lines = text.split("\n")
        for number, line in enumerate(lines):
            if "@" in line:
                lines[number], count = EMAIL.subn("<e-mail>", line)
                counts["e-mail"] += count
        text = "\n".join(lines)
    return text, +counts


def content_key(data: bytes) -> bytes:
    """What two texts share if they are equal, white space aside.

    >>> content_key(b"x = 1") == content_key(b"x=1\\n")
    True
    """
    bare = data.translate(None, b" \t\n\r\f\v")
    return hashlib.blake2b(bare, digest_size=12).digest()


def clean(rows: Rows, rejected: Rejected, passed: list[Row]) -> Iterator[Row]:
    """Filter, drop exact duplicates (whitespace aside), redact; `passed` gets facts of the rest."""
    first_paths: dict[bytes, str] = {}
    for row in rows:
        data = row["content"].encode()
        reason, detail = objection(row, data)
        key = b"" if reason else content_key(data)
        if key in first_paths:
            reason, detail = "exact duplicate", first_paths[key]
        if reason:
            rejected.append((row["package"], row["path"], reason, detail))
            continue
        first_paths[key] = row["path"]
        facts = {name: row[name] for name in ("package", "path", "hash", "size")}
        row["content"], counts = redact(row["content"])
        if counts:
            data = row["content"].encode()
        facts["redacted"] = counts
        facts["signature"] = signature(frozenset(words_of(data)))
        passed.append(facts)
        yield row


def split_packages(sizes: dict[str, int]) -> dict[str, str]:
    """The split of each package: families by a hash of their name; large ones always train.

    >>> sorted(split_packages({"a": 90, "b": 4, "b-two": 1, "c": 5}).items())
    [('a', 'train'), ('b', 'validation'), ('b-two', 'validation'), ('c', 'test')]
    """
    families = defaultdict(list)
    for name in sizes:
        family = re.sub("[^a-z].*", "", name)
        families[family].append(name)
    order = sorted(families, key=lambda name: hashlib.sha1(name.encode()).digest())
    splits = dict.fromkeys(sizes, "train")
    for split in ("test", "validation"):
        room = sum(sizes.values()) / 20
        for family in order:
            names = families[family]
            size = sum(sizes[name] for name in names)
            if size <= room and splits[names[0]] == "train":
                splits.update(dict.fromkeys(names, split))
                room -= size
    return splits


def words_at(spool: Path, places: set[int]) -> dict[int, Words]:
    """The sets of words of some rows of a file."""
    words = {}
    first = 0
    for table in tables_of_spool(spool):
        mine = np.array(sorted(places & set(range(first, first + len(table)))), int)
        texts = table["content"].take(mine - first)
        for place, text in zip(mine.tolist(), texts.to_pylist()):
            words[place] = frozenset(words_of(text.encode()))
        first += len(table)
    return words


def near_repeats(passed: list[Row], spool: Path) -> dict[int, int]:
    """Which cleaned rows repeat an earlier one that stays: suspected by signature, then compared."""
    pairs = suspects(np.stack([row["signature"] for row in passed]))
    places = {place for later, earlier, _ in pairs for place in (later, earlier)}
    return repeats(similar_pairs(pairs, words_at(spool, places)))


def build(trees: list[Tree], folder: Path, shard: int = 16_000_000) -> Row:
    """Make the whole corpus in an empty `folder`; returns what was seen, kept, rejected and why."""
    refuse_a_used(folder)
    rejected = store(trees, folder)
    seen = sum(len(tree.paths) + len(tree.rejected) for tree in trees)
    report = build_from_rows(documents(folder, rejected), folder, shard, rejected)
    if seen != report["seen"]:
        what = f"{seen} files seen, {report['seen']} kept or rejected"
        raise CourseError(
            what, folder, "report this: one was lost or counted twice"
        )
    return report


def refuse_a_used(folder: Path) -> None:
    """Old shards would be taken for a part of the new corpus."""
    if any(folder.glob("*.parquet")):
        what = "there is a corpus here already"
        raise CourseError(what, folder, "build in an empty folder")


def build_from_rows(
    rows: Rows,
    folder: Path,
    shard: int = 16_000_000,
    rejected: Rejected | None = None,
) -> Row:
    """Clean, deduplicate, split and write rows with the columns of `CORPUS`, from any source.

    `rejected` is what an earlier step has left out already.
    """
    if rejected is None:
        refuse_a_used(folder)
        rejected = []
    passed: list[Row] = []
    spool = folder / "clean.part"
    write_spool(spool, CORPUS, clean(rows, rejected, passed))
    if not passed:
        what = "no document passed the filters"
        raise CourseError(what, folder, "choose other sources")
    return finish(
        folder, spool, passed, near_repeats(passed, spool), rejected, shard
    )


def finish(
    folder: Path,
    spool: Path,
    passed: list[Row],
    gone: dict[int, int],
    rejected: Rejected,
    shard: int = 16_000_000,
) -> Row:
    """Leave out near duplicates, split what is kept, write it; returns what `build` reports."""
    for later, earlier in gone.items():
        row = passed[later]
        original = passed[earlier]["path"]
        rejected.append((row["package"], row["path"], "near duplicate", original))
    kept = [row for index, row in enumerate(passed) if index not in gone]
    sizes: Counter[str] = Counter()
    for row in kept:
        sizes[row["package"]] += row["size"]
    splits = split_packages(sizes)
    write_splits(spool, kept, splits, folder, shard)
    spool.unlink()
    reasons = [dict(zip(REJECTED, facts)) for facts in rejected]
    write_rows(folder / "rejected.parquet", REJECTED, reasons)
    redacted: Counter[str] = Counter()
    for row in kept:
        redacted += row["redacted"]
    return {
        "seen": len(kept) + len(rejected),
        "kept": len(kept),
        "bytes": sum(sizes.values()),
        "splits": splits,
        "reasons": dict(Counter(row["reason"] for row in reasons).most_common()),
        "redacted": dict(redacted),
    }


def write_splits(
    spool: Path, kept: list[Row], splits: dict[str, str], folder: Path, shard: int
) -> None:
    """Write each split as files of about `shard` characters."""
    for split in SPLITS:
        wanted = [row["hash"] for row in kept if splits[row["package"]] == split]
        hashes = pa.array(wanted, TEXT)
        # No row becomes an object of Python.
        tables = (
            table.filter(pc.is_in(table["hash"], hashes))
            for table in tables_of_spool(spool)
        )
        for number, part in enumerate(cut(tables, shard)):
            path = folder / f"{split}-{number:05}.parquet"
            with new_file(path, CORPUS) as file:
                for group in cut([part], GROUP):
                    file.write_table(group)
