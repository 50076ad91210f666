"""Tries to break the way from files to a corpus: accounting, query, filters, secrets, split."""

import ast
import collections
import random
import re
import shutil
import subprocess
import time
import warnings
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import LINKS
from stages import corpus, sources
from utils.errors import CourseError

LINES = (
    "\n".join(
        f"value_{i} = compute_something(value_{i - 1}, {i})" for i in range(1, 60)
    )
    + "\n"
)


def code(name: str, lines: int = 60) -> str:
    """A document of its own: most of its words occur in no other."""
    return "".join(
        f"{name}_{i} = {name}_call_{i}({name}, {i})\n" for i in range(lines)
    )


@pytest.fixture
def package(tmp_path):
    """Writes files into a folder and makes a tree of them."""

    def make(
        files: dict[str, str | bytes], licence: str = "MIT", name: str = "thing"
    ):
        root = tmp_path / "root" / name
        for path, content in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            data = content if isinstance(content, bytes) else content.encode()
            (root / path).write_bytes(data)
        return sources.folder_tree(root, name, licence)

    return make


def fates(trees, folder: Path) -> dict[str, str]:
    """What became of every file, read back from the tables; a file has one fate only."""
    folder.mkdir(exist_ok=True)
    report = corpus.build(trees, folder)
    fate = []
    for path in folder.glob("t*-*.parquet"):
        fate += [(row["path"], "kept") for row in corpus.rows_of(path)]
    for row in corpus.rows_of(folder / "rejected.parquet"):
        fate.append((row["path"], row["reason"]))
    assert len(dict(fate)) == len(fate) == report["seen"]
    return dict(fate)


# accidents ----------------------------------------------------------------------------------------


def test_accidents_are_counted_and_never_raise(package, tmp_path):
    files = {
        "good.py": code("good"),
        "empty.py": "",
        "blank.py": " \n\t",
        "nul.py": b"x\0" * 999,
        "latin.py": b"# caf\xe9\n" * 300,
        "line.py": "x = '" + "ab c" * 900 + "'\n",
        "huge.py": b"x = 1\n" * 3_000_000,
        "small.py": "x = 1\n",
        "stub.pyi": code("stub"),
    }
    assert fates([package(files)], tmp_path / "out") == {
        "good.py": "kept",
        "empty.py": "empty",
        "blank.py": "empty",
        "nul.py": "binary",
        "latin.py": "not UTF-8",
        "line.py": "long lines",
        "huge.py": "too large to read",
        "small.py": "size",
        "stub.pyi": "not .py",
    }


@LINKS
def test_links_are_counted_too(package, tmp_path):
    root = package({"good.py": code("good")}).root
    (root / "loop.py").symlink_to("loop.py")
    (root / "dangling.py").symlink_to("nowhere.py")
    (root / "down").symlink_to(root)
    tree = sources.folder_tree(root, "thing", "MIT")
    assert fates([tree], tmp_path / "out") == {
        "good.py": "kept",
        "loop.py": "link in a loop",
        "dangling.py": "unreadable",
        "down": "link to a folder",
    }


def test_a_file_that_goes_before_it_is_read_is_counted(package, tmp_path):
    tree = package({"a.py": code("a"), "b.py": code("b")})
    (tree.root / "b.py").unlink()
    assert fates([tree], tmp_path / "out") == {"a.py": "kept", "b.py": "unreadable"}


def test_reading_a_table_keeps_nothing_of_what_was_read(tmp_path):
    path = tmp_path / "files.parquet"
    # A megabyte a row, so that each chunk of eight million characters is a row group of eight.
    rows = (
        {"repo_name": "r", "path": str(i), "content": f"{i:>01000000}"}
        for i in range(120)
    )
    contents = ({"id": row["path"], "content": row["content"]} for row in rows)
    corpus.write_rows(path, corpus.CONTENTS, contents)
    before = pa.total_allocated_bytes()
    taken = [pa.total_allocated_bytes() - before for _ in corpus.rows_of(path)]
    assert len(taken) == 120
    assert max(taken[60:]) < 30_000_000


def test_tables_are_cut_by_size_and_no_row_is_lost_or_moved():
    texts = [f"{number:>0{number + 1}}" for number in range(300)]
    tables = [pa.table({"content": texts[i : i + 70]}) for i in range(0, 300, 70)]
    parts = list(corpus.cut(tables, 5_000))
    assert [row for part in parts for row in part["content"].to_pylist()] == texts
    sizes = [
        sum(len(text) + 200 for text in part["content"].to_pylist())
        for part in parts
    ]
    assert len(parts) > 10
    assert all(5_000 <= size < 5_500 for size in sizes[:-1])
    assert list(corpus.cut([], 5_000)) == []


def test_no_file_is_mapped_when_it_is_deleted(package, tmp_path, monkeypatch):
    """Windows refuses to delete what somebody still maps."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("only Linux lists what a process maps")
    deleted = []
    unlink = Path.unlink

    def look_and_unlink(path, *options, **more):
        deleted.append((path.name, str(path) in maps.read_text()))
        unlink(path, *options, **more)

    monkeypatch.setattr(Path, "unlink", look_and_unlink)
    (tmp_path / "out").mkdir()
    corpus.build(
        [package({"a.py": code("a"), "b.py": code("b")})], tmp_path / "out"
    )
    assert deleted == [("contents.part", False), ("clean.part", False)]
    spool = tmp_path / "kept.part"
    corpus.write_spool(spool, {"content": corpus.TEXT}, [{"content": "x"}])
    held = list(corpus.tables_of_spool(spool))
    assert str(spool) in maps.read_text(), "this test would not see a mapping"
    assert held[0]["content"].to_pylist() == ["x"]


def test_an_empty_corpus_says_so(package, tmp_path):
    with pytest.raises(CourseError, match="no document passed"):
        corpus.build([package({"a.py": ""})], tmp_path)


def test_a_used_folder_and_a_package_given_twice_are_refused(package, tmp_path):
    tree, out = package({"a.py": code("a")}), tmp_path / "out"
    assert fates([tree], out) == {"a.py": "kept"}
    with pytest.raises(CourseError, match="a corpus here already"):
        corpus.build([tree], out)
    with pytest.raises(CourseError, match="two trees are called thing"):
        corpus.build([tree, tree], tmp_path)
    assert not list(tmp_path.glob("*.parquet"))


def test_nothing_that_was_taken_out_is_in_what_is_published(
    package, tmp_path, monkeypatch
):
    monkeypatch.setattr(corpus, "opted_out", lambda: ["private/*", "leaver"])
    secrets = ["AKIA" + "Q7" * 8, "marker.ada@" + "example.org", "hunter2marker"]
    keeps = (
        code("keeps")
        + f"# {secrets[0]}, {secrets[1]}, https://ada:{secrets[2]}@host/x\n"
    )
    trees = [
        package(
            {
                "a.py": keeps,
                "private/b.py": code("marker_private"),
                "twin.py": code("marker_twin"),
                "made.py": "# auto-generated\n" + code("marker_made"),
            },
            name="open",
        ),
        package({"c.py": code("marker_refused")}, "GPL", "closed"),
        package({"d.py": code("marker_leaver")}, name="leaver"),
        package({"e.py": code("marker_twin").replace(" ", "  ")}, name="also"),
    ]
    assert set(fates(trees, tmp_path / "out").values()) > {
        "kept",
        "licence",
        "opted out",
        "exact duplicate",
    }
    # Lesson 03 publishes the splits and the list of what was rejected.
    published = [
        *(tmp_path / "out").glob("t*-*.parquet"),
        tmp_path / "out" / "rejected.parquet",
    ]
    public = repr([row for path in published for row in corpus.rows_of(path)])
    raw = repr(list(corpus.rows_of(tmp_path / "out" / "contents.parquet")))
    names = ["private", "made", "refused", "leaver"]
    for text in [*secrets, *(f"marker_{name}_1" for name in names)]:
        assert text in raw
        assert text not in public, text
    assert raw.count("'content': 'marker_twin_0 ") == 2
    assert public.count("'content': 'marker_twin_0 ") == 1
    assert "keeps_1" in public


def test_a_content_is_stored_once_under_gits_name(package, tmp_path):
    tree = package({"a.py": LINES, "b/c.py": LINES, "d.py": code("d")})
    assert corpus.store([tree], tmp_path) == []
    rows = {row["id"]: row for row in corpus.rows_of(tmp_path / "contents.parquet")}
    name = sources.blob_id(LINES.encode())
    assert len(rows) == 2
    assert rows[name]["copies"] == 2
    assert rows[name]["content"] == LINES
    if shutil.which("git"):
        command = ["git", "hash-object", str(tree.root / "a.py")]
        git = subprocess.run(command, capture_output=True, text=True, check=True)
        assert git.stdout.strip() == name


# a reader of the corpus ---------------------------------------------------------------------------


def write_split(folder: Path, texts: list[str], split: str = "train") -> None:
    rows = [{"content": text, "size": len(text.encode())} for text in texts]
    for number in range(2):
        path = folder / f"{split}-{number:05}.parquet"
        corpus.write_rows(path, corpus.CORPUS, rows[number::2])


def test_texts_are_a_fair_sample_and_a_larger_one_contains_the_smaller(tmp_path):
    texts = [code(f"name{i}") for i in range(700)]
    megabytes = sum(map(len, texts)) / 1e6
    write_split(tmp_path, texts)
    small = list(corpus.read_texts(tmp_path, "train", megabytes / 4))
    large = list(corpus.read_texts(tmp_path, "train", megabytes / 2))
    assert small == list(corpus.read_texts(tmp_path, "train", megabytes / 4))
    assert set(small) < set(large) < set(texts)
    assert 0.2 < sum(map(len, small)) / 1e6 / megabytes < 0.3
    assert sorted(corpus.read_texts(tmp_path, "train")) == sorted(texts)
    assert sorted(corpus.read_texts(tmp_path, "train", megabytes)) == sorted(texts)


def test_a_split_that_is_not_there_is_named(tmp_path):
    write_split(tmp_path, [LINES])
    with pytest.raises(CourseError, match="no split 'valid'"):
        next(corpus.read_texts(tmp_path, "valid"))


# the query --------------------------------------------------------------------------------------


def hostile_tables(engine: duckdb.DuckDBPyConnection, prefix: str) -> None:
    """The three tables with rows at every edge of the query."""
    sizes = [0, 1023, 1024, 5000, 1048575, 1048576, None]
    # Every third path is in a repository without a licence, the next one in one with two.
    paths = [
        "a.py",
        "a.PY",
        "b.py",
        "a.pyi",
        ".py",
        None,
        "x/%.py",
        "a.py ",
        "c.py",
        "py",
        None,
    ]
    files = [
        (f"repo{i % 3}", path, f"id{j}")
        for i, path in enumerate(paths)
        for j in range(21)
    ]
    contents = [
        (f"id{j}", sizes[j % 7], [False, True, None][j // 7], "text", j)
        for j in range(21)
    ]
    licences = [
        ("repo0", "mit"),
        ("repo1", "apache-2.0"),
        ("repo1", "gpl-3.0"),
        (None, "mit"),
    ]
    content_columns = (
        'id VARCHAR, size BIGINT, "binary" BOOLEAN, content VARCHAR, copies BIGINT'
    )
    tables = [
        ("files", "repo_name VARCHAR, path VARCHAR, id VARCHAR", files),
        ("contents", content_columns, contents),
        ("licenses", "repo_name VARCHAR, license VARCHAR", licences),
    ]
    for name, columns, rows in tables:
        engine.execute(f"CREATE TABLE {prefix}{name} ({columns})")
        marks = ", ".join("?" * len(rows[0]))
        engine.executemany(f"INSERT INTO {prefix}{name} VALUES ({marks})", rows)


def test_bigquery_and_duckdb_are_asked_the_same_question(tmp_path):
    sqlglot = pytest.importorskip("sqlglot")
    engine = duckdb.connect()
    engine.execute("ATTACH ':memory:' AS \"bigquery-public-data\"")
    engine.execute('CREATE SCHEMA "bigquery-public-data".github_repos')
    hostile_tables(engine, '"bigquery-public-data".github_repos.')
    for name in ("files", "contents", "licenses"):
        table = f'"bigquery-public-data".github_repos.{name}'
        engine.execute(
            f"COPY {table} TO '{tmp_path}/{name}.parquet' (FORMAT parquet)"
        )
    theirs = sqlglot.transpile(corpus.query(), read="bigquery", write="duckdb")[0]
    theirs = sorted(engine.execute(theirs).fetchall(), key=repr)
    ours = sorted(engine.execute(corpus.query(tmp_path)).fetchall(), key=repr)
    assert theirs == ours
    assert {row[4] for row in ours} == {1024, 5000, 1048575}
    assert {row[1] for row in ours} == {"a.py", ".py", "x/%.py"}


class Client:
    """Bills each table rounded up to whole megabytes, ten at least, and refuses over the cap."""

    def __init__(self, *tables: int):
        self.tables = tables
        self.asked: list[dict] = []

    def query(self, sql: str, job_config: dict):
        self.asked.append(job_config)
        self.total_bytes_processed = sum(self.tables)
        return self

    def result(self):
        billed = sum(max(10, -(-size // 2**20)) for size in self.tables) * 2**20
        cap = self.asked[-1]["maximum_bytes_billed"]
        if billed > cap:
            message = f"limit for bytes billed: {cap}. {billed} or higher required"
            raise RuntimeError(message)
        return [{"path": "a.py"}]


@pytest.mark.parametrize(
    "tables",
    [(1, 157 * 2**20 + 1, 9), (0, 0, 0), (2**20 + 1, 2**30 + 1, 11 * 2**20 + 1)],
)
def test_the_cap_of_the_query_lets_it_run(tables):
    client = Client(*tables)
    assert list(corpus.bigquery_rows(client, dict)) == [{"path": "a.py"}]
    # The dry run's own figure, which the lesson once used, is refused.
    client.asked.append({"maximum_bytes_billed": sum(tables)})
    with pytest.raises(RuntimeError, match="or higher required"):
        client.result()


def test_a_query_over_the_limit_is_not_run():
    client = Client(1, 1, int(2.5 * 2**40))
    with pytest.raises(CourseError, match=r"2.50 TiB: \$9.38 is over the limit"):
        next(corpus.bigquery_rows(client, dict))
    assert len(client.asked) == 1
    assert next(corpus.bigquery_rows(client, dict, most_dollars=20)) == {
        "path": "a.py"
    }


def test_no_name_in_the_query_is_a_word_that_bigquery_reserves():
    dialect = pytest.importorskip("sqlglot.dialects.bigquery").BigQuery
    names = re.findall(r"\bAS (\w+)", corpus.query())
    assert names and "hash" in dialect.Generator.RESERVED_KEYWORDS
    assert not set(names) & dialect.Generator.RESERVED_KEYWORDS


def test_the_template_differs_in_table_names_and_quotes_only():
    text = corpus.query().replace("`hash`", "hash")
    for name in ("files", "contents", "licenses"):
        text = text.replace(
            f"`bigquery-public-data.github_repos.{name}`", f"'here/{name}.parquet'"
        )
    assert text == corpus.query(Path("here")) and "`" not in text


def test_a_folder_with_quotes_and_braces_is_no_injection(package, tmp_path):
    assert fates(
        [package({"a.py": code("a")})], tmp_path / "it's {files} here"
    ) == {"a.py": "kept"}


@pytest.mark.parametrize(
    "header",
    [
        "# one\n\n# two\n",
        '"""One line."""\n',
        "'''One line.'''  # noqa\n",
        '#!/bin/sh\n"""\n    pygments\n\n    :license: BSD\n"""\n\n# more\n',
        "'one quote'\n",
        'r"""raw"""\n"another"\n',
    ],
)
def test_a_body_has_no_header(header):
    text = "import os\n\n# this comment stays\nx = '''and this text'''\n"
    assert corpus.body(header + text) == text
    assert corpus.body("x = 1\n" + header) == "x = 1\n" + header


def test_the_body_of_a_real_file_has_no_docstring():
    [python] = [tree for tree in sources.environment() if tree.package == "python"]
    read = [sources.read_file(python.root / path) for path in python.paths[::5]]
    texts = [data.decode() for data, reason in read if not reason]
    documented = [text for text in texts if docstring_of(text)]
    assert len(documented) > 50
    assert not [text[:80] for text in documented if docstring_of(corpus.body(text))]


def docstring_of(text: str) -> str | None:
    """The docstring of a module, if the text is one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.get_docstring(ast.parse(text))
        except SyntaxError:
            return None


# filters ----------------------------------------------------------------------------------------


def test_each_filter_takes_its_own(package, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "opted_out", lambda: ["private/*"])
    monkeypatch.setattr(corpus, "BALLAST_KEPT", 0)
    mean = "\n".join(
        "name_with_a_long_tail = " + "call_it(again) + " * 8 for _ in range(30)
    )
    files = {
        "kept.py": code("kept"),
        "late.py": code("late") + "# auto-generated",
        "made.py": "# This file was AUTO-GENERATED\n" + code("made"),
        "copyleft.py": "# GNU General Public License\n" + code("left"),
        "long.py": code("long") + "x = '" + "word " * 250 + "'",
        "mean.py": mean,
        "table.py": "x = [\n" + "[0, -1], [-2, 3],\n" * 99 + "]",
        "private/a.py": code("private"),
        "keys.py": f"k = '{'aXB1cyDZe2Fw0VguH3iT' * 3}'\n" * 60,
        "tests/test_a.py": code("test"),
        "settings.py": code("settings"),
        "testing_the.py": code("fine"),
    }
    trees = [package(files), package({"b.py": code("b")}, "GPL", "other")]
    assert fates(trees, tmp_path / "out") == {
        "kept.py": "kept",
        "late.py": "kept",
        "testing_the.py": "kept",
        "made.py": "generated",
        "copyleft.py": "copyleft header",
        "long.py": "long lines",
        "mean.py": "long lines",
        "table.py": "few letters",
        "keys.py": "odd tokens",
        "private/a.py": "opted out",
        "tests/test_a.py": "tests",
        "settings.py": "configuration",
        "b.py": "licence",
    }


@pytest.mark.parametrize(
    "name", ["General Public", "Mozilla Public", "GPLv3", "GPL-2.0"]
)
def test_each_name_of_a_copyleft_licence_is_seen_in_a_header(name):
    content = f"# {name}\n{LINES}"
    row = {"content": content, "package": "p", "path": "a.py"}
    row |= {"license": "MIT", "hash": "0" * 40}
    reason, evidence = corpus.objection(row, content.encode())
    assert reason == "copyleft header"
    assert evidence in name


def test_ballast_keeps_the_same_share_everywhere():
    data = LINES.encode()
    facts = {
        "content": LINES,
        "package": "p",
        "path": "tests/a.py",
        "license": "MIT",
    }
    rows = [
        {**facts, "hash": sources.blob_id(str(number).encode())}
        for number in range(2000)
    ]
    reasons = [corpus.objection(row, data)[0] for row in rows]
    assert set(reasons) == {"", "tests"}
    assert abs(reasons.count("") / 2000 - 0.3) < 0.03
    assert reasons == [corpus.objection(row, data)[0] for row in rows]


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="abcXYZ019_ \n\t.,()#", min_size=1))
def test_measures_equal_those_by_hand(text):
    lines = text.split("\n")
    form = corpus.measure(text.encode())
    assert form.longest_line == max(map(len, lines))
    assert form.mean_line == pytest.approx(
        sum(map(len, lines)) / len(lines), abs=1e-3
    )
    assert form.letters == pytest.approx(
        sum(c.isalnum() for c in text) / len(text), abs=1e-3
    )
    pieces = re.findall(r"[a-z_]+|[A-Z]+|[0-9]+|([.,()#])\1*", text)
    # Space at the very beginning counts as a piece.
    count = len(pieces) + text[0].isspace()
    assert form.per_piece == pytest.approx(len(text) / count, abs=1e-3)


@pytest.mark.parametrize(
    "text, kind",
    [
        ("AKIA" + "A1" * 8, "aws-key"),
        ("ghp_" + "a1B2" * 9, "github-token"),
        ("hf_" + "aB" * 17, "hub-token"),
        ("ASIA" + "A1" * 8, "aws-key"),
        ("github_pat_" + "a1B2_" * 9, "github-token"),
        ("sk-" + "aB3d" * 8, "model-key"),
        ("sk-proj-" + "aB3d" * 8, "model-key"),
        ("ADA@EXAMPLE.ORG", "e-mail"),
        ("ada@example.photography", "e-mail"),
        ("redis://:hunter2@host/x", "password"),
        (
            "-----BEGIN PGP PRIVATE KEY BLOCK-----\nVersion: a-b\n\nabc\n"
            "-----END PGP PRIVATE KEY BLOCK-----",
            "private-key",
        ),
        ("xoxb-" + "1" * 12, "slack-token"),
        ("AIza" + "x" * 35, "google-key"),
        ("ada@example.org", "e-mail"),
        ("eyJ" + "a" * 12 + ".eyJ" + "b" * 12 + ".sig", "web-token"),
        ("https://ada:hunter2@host/x", "password"),
        (
            "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----",
            "private-key",
        ),
    ],
)
def test_secrets_are_cut_out_and_counted(text, kind):
    redacted, counts = corpus.redact(f"x = '{text}'\n" * 2)
    assert counts == {kind: 2}
    assert redacted.count(f"<{kind}>") == 2
    # What gives a secret away stays, so that a reader sees what stood there.
    assert kind == "e-mail" or redacted.startswith(f"x = '{text[:2]}")
    body = max(
        re.split(r"://|@host|A[KS]IA|github_pat_|sk-|-----[A-Z ]+-----", text),
        key=len,
    )
    assert body not in redacted


def test_the_report_counts_what_was_replaced_in_what_is_published(
    package, tmp_path
):
    keys = f"# AKIA{'Q7' * 8}, ASIA{'Q7' * 8}, AKIA{'Z9' * 8}\n"
    # Two ways in which one kind of key begins.
    tokens = f"# ghp_{'a1B2' * 9}, github_pat_{'a1B2' * 10}\n"
    address = "# ada@example.org\n"
    files = {
        "keys.py": code("keys") + keys + tokens + address,
        "url.py": code("url") + "# https://ada:hunter2@host/x\n" + address * 2,
        # Near duplicates of which one goes, and its address is counted with it.
        "one.py": code("same") + address,
        "two.py": code("same") + address + "x = 1\n",
    }
    report = corpus.build([package(files)], tmp_path)
    assert report["reasons"] == {"near duplicate": 1}
    published = "".join(row["content"] for row in corpus.rows_of_splits(tmp_path))
    marks = collections.Counter(re.findall(r"<([a-z-]+)>", published))
    expected = {"aws-key": 3, "github-token": 2, "password": 1, "e-mail": 4}
    assert report["redacted"] == marks == expected


def test_an_address_that_touches_another_goes_too():
    redacted, _ = corpus.redact(
        "to ada@example.org-bob@example.org, eve@example.org."
    )
    assert redacted == "to <e-mail>, <e-mail>."


# What secrets are made of, so that random texts hold whole ones, halves and neighbours.
SIGNS = "AKIA ASIA ghp_ github_pat_ hf_ sk- xoxb- AIza eyJ -----BEGIN_ ://"
PARTS = [sign.replace("N_", "N ") for sign in SIGNS.split()] + [
    "ada@example.org",
    "ada:hunter2@host",
    "-----END PRIVATE KEY-----",
    "PRIVATE KEY-----",
    "A1b2" * 10,
    "A1" * 8,
    ".eyJ",
    "ghp_",
    "<e-mail>",
    "@",
    ".",
    ":",
    "\n",
    " ",
]


@settings(max_examples=1000, deadline=None)
@given(st.text() | st.lists(st.sampled_from(PARTS)).map("".join))
def test_redacting_twice_is_redacting_once(text):
    once, counts = corpus.redact(text)
    twice, again = corpus.redact(once)
    assert twice == once
    assert not again
    assert bool(counts) == (once != text)


@pytest.mark.parametrize(
    "text",
    [
        "@functools.cache\ndef f(): ...",
        "y = q@k.mT",
        "y = a@b.to(device)",
        "ghost = hf_model",
        "y = q@self.weight",
        "css = 'sk-toggleable__label-arrow'",
        "task-A1b2C3d4E5f6G7h8I9j0K1",
        "url = 'https://host/a:b@c'",
        "x = 'AKIA'",
    ],
)
def test_code_that_only_looks_like_a_secret_stays(text):
    assert corpus.redact(text) == (text, collections.Counter())


@pytest.mark.parametrize(
    "text",
    [
        "-----BEGIN PRIVATE KEY-----\n",
        "-----BEGIN " + "A" * 30,
        "eyJ",
        "eyJaaaaaaaaaa.",
        "a@b.",
        "a@b.cc.",
        "a@b.cc",
        "a@",
        "@b.",
        "https://a:",
        "://a:b@c.dd",
        "://a",
        "gh",
        "ghp_",
        "github_pat_",
        "sk-",
        "sk-a",
        "AKIA",
        "xoxb-",
        "AIza",
        "hf_",
    ],
)
def test_redacting_takes_time_in_proportion_to_the_text(text):
    hostile = text * (1_500_000 // len(text))
    start = time.process_time()
    # A tenth of a processor second; with a pattern that starts over, minutes.
    corpus.redact(hostile)
    assert time.process_time() - start < 8


# duplicates -------------------------------------------------------------------------------------


def test_the_original_stays_and_the_vendored_copy_goes(package, tmp_path):
    trees = [
        package(
            {
                "_vendor/z/a.py": code("a"),
                "_vendor/z/d.py": code("d").replace(" ", "  "),
                "b.py": code("b"),
            },
            name="apex",
        ),
        package(
            {
                "z/a.py": code("a"),
                "z/c.py": code("b").replace("\n", "\r\n\n"),
                "z/d.py": code("d"),
            },
            name="z",
        ),
    ]
    assert fates(trees, tmp_path / "out") == {
        "z/a.py": "kept",
        "_vendor/z/a.py": "exact duplicate",
        "z/d.py": "kept",
        "_vendor/z/d.py": "exact duplicate",
        "b.py": "kept",
        "z/c.py": "exact duplicate",
    }


def test_a_copy_under_a_licence_we_may_use_is_found_behind_one_we_may_not(
    package, tmp_path
):
    trees = [
        package({"a.py": code("a")}, "GPL", "first"),
        package({"b.py": code("a")}, "MIT", "second"),
        package({"c.py": code("a")}, "GPL", "third"),
    ]
    assert fates(trees, tmp_path / "out") == {
        "a.py": "licence",
        "b.py": "kept",
        "c.py": "licence",
    }


def test_near_duplicates_leave_no_chain_and_no_pair(package, tmp_path):
    def version(start: int) -> str:
        return "".join(
            f"name_{i} = call_{i}(other_{i})\n" for i in range(start, start + 200)
        )

    files = {"a.py": version(0), "b.py": version(12), "c.py": version(24)}
    assert fates([package(files)], tmp_path / "out") == {
        "a.py": "kept",
        "b.py": "near duplicate",
        "c.py": "kept",
    }


def test_what_looks_alike_but_is_not_stays(package, tmp_path):
    """Documents that share 82 words of 100: an estimate takes some of them for near duplicates."""
    shared = "".join(f"name_{i} = call_{i}\n" for i in range(410))
    files = {}
    for number in range(60):
        own = "".join(f"own_{number}_{i} = 1\n" for i in range(89))
        files[f"m{number:02}.py"] = shared + own
    assert set(fates([package(files)], tmp_path / "out").values()) == {"kept"}


def test_rows_from_elsewhere_become_the_same_corpus(package, tmp_path):
    trees = []
    for name in ("aa", "bb", "cc"):
        files = {f"m{number}.py": code(f"{name}{number}") for number in range(9)}
        files["made.py"] = "# auto-generated\n" + code(name)
        trees.append(package(files, name=name))
    one = tmp_path / "one"
    two = tmp_path / "two"
    one.mkdir()
    two.mkdir()
    whole = corpus.build(trees, one)
    by_rows = corpus.build_from_rows(corpus.documents(one, []), two)
    assert whole == by_rows
    for path in two.iterdir():
        assert path.read_bytes() == (one / path.name).read_bytes()
    with pytest.raises(CourseError, match="a corpus here already"):
        corpus.build_from_rows([], two)


# split and whole --------------------------------------------------------------------------------


def test_split_keeps_packages_and_families_whole():
    draw = random.Random(4)
    sizes = {"giant": 9000}
    for number in range(200):
        name = chr(97 + number % 26) + chr(97 + number // 26)
        sizes[name] = draw.randrange(1, 100)
        sizes[f"{name}-core"] = draw.randrange(1, 100)
    parts = corpus.split_packages(sizes)
    assert set(parts) == set(sizes)
    assert parts["giant"] == "train"
    assert all(parts[name] == parts[name.removesuffix("-core")] for name in sizes)
    for split in ("test", "validation"):
        share = sum(sizes[n] for n in sizes if parts[n] == split) / sum(
            sizes.values()
        )
        assert 0.04 < share <= 0.05
    assert corpus.split_packages(dict(reversed(sizes.items()))) == parts


def test_the_same_files_give_the_same_bytes(package, tmp_path):
    trees = []
    for name in ("aa", "bb", "cc"):
        files = {f"m{number}.py": code(f"{name}{number}") for number in range(20)}
        trees.append(package(files, name=name))
    one = tmp_path / "one"
    two = tmp_path / "two"
    for folder, order in ((one, trees), (two, trees[::-1])):
        folder.mkdir()
        corpus.build(order, folder, shard=20_000)
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in two.iterdir())
    assert "train-00001.parquet" in names
    for name in names:
        if not name.startswith(("rejected", "licenses")):
            assert (one / name).read_bytes() == (two / name).read_bytes(), name
