"""Tries to break the way from files to a corpus: accounting, filters, duplicates, split, query."""
import collections
import email
import hashlib
import os
import random
import re
import shutil
import subprocess
import threading
import time
import zipfile
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from stages import corpus, near_duplicates as fingerprints, sources
from utils.errors import CourseError

LINES = "\n".join(f"value_{i} = compute_something(value_{i - 1}, {i})" for i in range(1, 60)) + "\n"


def code(name: str, lines: int = 60) -> str:
    """A document of its own: most of its words occur in no other."""
    return "".join(f"{name}_{i} = {name}_call_{i}({name}, {i})\n" for i in range(lines))


@pytest.fixture
def package(tmp_path):
    """Writes files into a folder and makes a corpus of them."""
    def make(files: dict[str, str | bytes], licence: str = "MIT", name: str = "thing"):
        root = tmp_path / "root" / name
        for path, content in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(content if isinstance(content, bytes) else content.encode())
        return sources.folder_tree(root, name, licence)
    return make


def fates(trees, folder: Path) -> dict[str, str]:
    """What became of every file, read back from the tables; a file has one fate only."""
    folder.mkdir(exist_ok=True)
    report = corpus.build(trees, folder)
    kept = [(row["path"], "kept") for path in folder.glob("t*-*.parquet") for row in corpus.rows_of(path)]
    gone = [(row["path"], row["reason"]) for row in corpus.rows_of(folder / "rejected.parquet")]
    assert len(dict(kept + gone)) == len(kept + gone) == report["seen"]
    return dict(kept + gone)


# reading ----------------------------------------------------------------------------------------


def test_accidents_are_counted_and_never_raise(package, tmp_path):
    tree = package({"good.py": code("good"), "empty.py": "", "blank.py": " \n\t", "nul.py": b"x\0" * 999,
                    "latin.py": b"# caf\xe9\n" * 300, "line.py": "x = '" + "ab c" * 900 + "'\n",
                    "huge.py": b"x = 1\n" * 3_000_000, "small.py": "x = 1\n", "stub.pyi": code("stub")})
    root = tree.root
    (root / "loop.py").symlink_to("loop.py")
    (root / "dangling.py").symlink_to("nowhere.py")
    (root / "down").symlink_to(root)
    os.mkfifo(root / "pipe.py")
    Path(os.fsdecode(os.fsencode(root) + b"/bad\xff.py")).write_text(code("bad"))
    os.mkdir(os.fsencode(root) + b"/dir\xff")
    Path(os.fsdecode(os.fsencode(root) + b"/dir\xff/a.py")).write_text(code("dir"))
    tree = sources.folder_tree(root, "thing", "MIT")
    assert fates([tree], tmp_path / "out") == {
        "good.py": "kept", "empty.py": "empty", "blank.py": "empty", "nul.py": "binary",
        "latin.py": "not UTF-8", "line.py": "long lines", "huge.py": "too large to read",
        "small.py": "size", "stub.pyi": "not .py", "loop.py": "link in a loop",
        "dangling.py": "unreadable", "down": "link to a folder", "pipe.py": "not a plain file",
        "bad\\udcff.py": "name is not plain text", "dir\\udcff/a.py": "name is not plain text"}


@pytest.mark.parametrize("name", ["a\0.py", "\ud800.py", "x" * 5000, "a.py/b.py", ""])
def test_a_path_that_no_file_can_have_is_unreadable(tmp_path, name):
    (tmp_path / "a.py").write_text("x = 1\n")
    assert sources.read_file(tmp_path / name)[1] in ("unreadable", "not a plain file")


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path):
    path, stop = tmp_path / "log.py", threading.Event()
    path.write_bytes(b"x = 1\n" * 1_500_000)

    def write() -> None:
        while not stop.is_set():
            with path.open("r+b") as file:
                file.write(b"y")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        reasons = {sources.read_file(path)[1] for _ in range(40)}
    finally:
        stop.set()
        writer.join()
    assert "changed while read" in reasons and sources.read_file(path)[1] == ""


def test_reading_a_table_keeps_nothing_of_what_was_read(tmp_path):
    rows = ({"repo_name": "r", "path": str(i), "id": f"{i:>01000000}"} for i in range(60))
    corpus.write(tmp_path / "files.parquet", "files", (
        pa.RecordBatch.from_pylist([row], corpus.schema_of("files")) for row in rows), "none")
    before = pa.total_allocated_bytes()
    held = [pa.total_allocated_bytes() - before for _ in corpus.batches_of(tmp_path / "files.parquet")]
    assert len(held) == 60 and max(held[30:]) < 10_000_000


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


def test_nothing_that_was_taken_out_is_in_what_is_published(package, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "opted_out", lambda: ["private/*", "leaver"])
    secrets = ["AKIA" + "Q7" * 8, "marker.ada@" + "example.org", "hunter2marker"]
    keeps = code("keeps") + f"# {secrets[0]}, {secrets[1]}, https://ada:{secrets[2]}@host/x\n"
    trees = [package({"a.py": keeps, "private/b.py": code("marker_private"), "twin.py": code("marker_twin"),
                      "made.py": "# auto-generated\n" + code("marker_made")}, name="open"),
             package({"c.py": code("marker_refused")}, "GPL", "closed"),
             package({"d.py": code("marker_leaver")}, name="leaver"),
             package({"e.py": code("marker_twin").replace(" ", "  ")}, name="also")]
    assert set(fates(trees, tmp_path / "out").values()) > {"kept", "licence", "opted out", "exact duplicate"}
    given = corpus.publishable(tmp_path / "out")
    assert {path.name for path in given} == {"train-00000.parquet", "rejected.parquet"}
    held = "\n".join(map(repr, (row for path in given for row in corpus.rows_of(path))))
    raw = repr(list(corpus.rows_of(tmp_path / "out" / "contents.parquet")))
    for text in [*secrets, "marker_private_1", "marker_made_1", "marker_refused_1", "marker_leaver_1"]:
        assert text in raw and text not in held, text
    assert (raw.count("'content': 'marker_twin_0 "), held.count("'content': 'marker_twin_0 ")) == (2, 1)
    assert "keeps_1" in held


def test_a_content_is_stored_once_under_gits_name(package, tmp_path):
    tree = package({"a.py": LINES, "b/c.py": LINES, "d.py": code("d")})
    assert corpus.store([tree], tmp_path) == []
    rows = {row["id"]: row for row in corpus.rows_of(tmp_path / "contents.parquet")}
    name = sources.blob_id(LINES.encode())
    assert len(rows) == 2 and rows[name]["copies"] == 2 and rows[name]["content"] == LINES
    if shutil.which("git"):
        said = subprocess.run(["git", "hash-object", tree.root / "a.py"], capture_output=True, text=True)
        assert said.stdout.strip() == name


def test_the_environment_has_a_licence_on_each_package_and_no_path_outside():
    trees = sources.environment()
    assert trees[0].package == "python" and len(trees) > 50
    assert not [p for tree in trees for p in tree.paths if p.startswith(("/", ".."))]
    assert sum(tree.licence == "unknown" for tree in trees) <= len(trees) // 20
    some = sources.some_of(trees, 30_000_000)
    assert some[0] is trees[0] and 20e6 < sum(tree.size for tree in some) <= 30e6


# archives ---------------------------------------------------------------------------------------


def wheel(folder: Path, files: dict[str, str]) -> None:
    """A wheel of the package `tiny`, written by hand."""
    info = {"tiny-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\nLicense: MIT\n",
            "tiny-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            "tiny-1.0.dist-info/RECORD": ""}
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / "tiny-1.0-py3-none-any.whl", "w") as archive:
        for name, content in {**files, **info}.items():
            archive.writestr(name, content)


def test_pip_fetches_an_archive_that_is_unpacked_and_read(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "shelf"))
    wheel(tmp_path / "shelf", {"tiny/a.py": code("a"), "tiny/data.bin": "no"})
    tree = corpus.archive_tree("tiny", tmp_path / "got")
    assert (tree.package, tree.licence, tree.paths) == ("tiny", "MIT", ["tiny/a.py"])
    wheel(tmp_path / "shelf", {"../../outside.py": "x = 1"})
    with pytest.raises(CourseError, match="leaves its folder"):
        corpus.archive_tree("tiny", tmp_path / "again")
    assert not list(tmp_path.rglob("outside.py"))
    with pytest.raises(CourseError, match="could not be fetched"):
        corpus.archive_tree("no-such-package", tmp_path / "none")


# the query --------------------------------------------------------------------------------------


def hostile_tables(engine: duckdb.DuckDBPyConnection, prefix: str) -> None:
    """The three tables with rows at every edge of the query."""
    sizes = [0, 1023, 1024, 5000, 1048575, 1048576, None]
    paths = ["a.py", "a.PY", "a.pyi", "py", ".py", "x/%.py", "a.py ", None]
    files = [(f"repo{i % 3}", path, f"id{j}") for i, path in enumerate(paths) for j in range(21)]
    contents = [(f"id{j}", sizes[j % 7], [False, True, None][j // 7], "text", j) for j in range(21)]
    licences = [("repo0", "mit"), ("repo1", "apache-2.0"), ("repo1", "gpl-3.0"), (None, "mit")]
    for name, columns, rows in (("files", "repo_name VARCHAR, path VARCHAR, id VARCHAR", files),
                                ("contents", "id VARCHAR, size BIGINT, \"binary\" BOOLEAN, content VARCHAR, "
                                 "copies BIGINT", contents),
                                ("licenses", "repo_name VARCHAR, license VARCHAR", licences)):
        engine.execute(f"CREATE TABLE {prefix}{name} ({columns})")
        engine.executemany(f"INSERT INTO {prefix}{name} VALUES ({', '.join('?' * len(rows[0]))})", rows)


def test_bigquery_and_duckdb_are_asked_the_same_question(tmp_path):
    sqlglot = pytest.importorskip("sqlglot")
    engine = duckdb.connect()
    engine.execute("ATTACH ':memory:' AS \"bigquery-public-data\"")
    engine.execute('CREATE SCHEMA "bigquery-public-data".github_repos')
    hostile_tables(engine, '"bigquery-public-data".github_repos.')
    for name in ("files", "contents", "licenses"):
        table = f'"bigquery-public-data".github_repos.{name}'
        engine.execute(f"COPY {table} TO '{tmp_path}/{name}.parquet' (FORMAT parquet)")
    theirs = sqlglot.transpile(corpus.query(), read="bigquery", write="duckdb")[0]
    answers = [sorted(engine.execute(sql).fetchall(), key=repr) for sql in (theirs, corpus.query(tmp_path))]
    assert answers[0] == answers[1] and {row[4] for row in answers[0]} == {1024, 5000, 1048575}
    assert {row[1] for row in answers[0]} <= {"a.py", ".py", "x/%.py"}


def test_the_template_differs_in_table_names_only():
    text = corpus.query()
    for name in ("files", "contents", "licenses"):
        text = text.replace(f"`bigquery-public-data.github_repos.{name}`", f"'here/{name}.parquet'")
    assert text == corpus.query(Path("here")) and "`" not in text


def test_a_folder_with_quotes_and_braces_is_no_injection(package, tmp_path):
    assert fates([package({"a.py": code("a")})], tmp_path / "it's {files} here") == {"a.py": "kept"}


# filters ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("expression, allowed", [
    ("MIT", True), ("mit", True), ("GPL-3.0", False), ("MIT OR GPL-3.0", True), ("MIT AND GPL-3.0", False),
    ("(MIT OR GPL-2.0) AND Apache-2.0", True), ("Apache-2.0 WITH LLVM-exception AND MIT", True),
    ("unknown", False), ("", False), (None, False), ("MIT WITH Commons-Clause", False),
    ("CC-BY-NC-4.0 AND MIT", False), ("GPL-2.0 AND MIT OR LGPL-2.1", False), ("MITRE", False)])
def test_permissive(expression, allowed):
    assert sources.permissive(expression) is allowed


@pytest.mark.parametrize("metadata, licence", [
    ("License-Expression: MIT AND 0BSD\nLicense: GPL", "MIT AND 0BSD"), ("License: Apache 2.0 License", "Apache-2.0"),
    ("Classifier: License :: OSI Approved :: BSD License\nLicense: Copyright (c) me", "BSD"),
    ("Classifier: License :: OSI Approved :: MIT License\nClassifier: License :: OSI Approved :: "
     "GNU Lesser General Public License v3 (LGPLv3)", "MIT AND GPL"),
    ("Classifier: License :: OSI Approved :: Eclipse Public License 2.0 (EPL-2.0)\n"
     "Classifier: License :: OSI Approved :: MIT License", "unknown AND MIT"),
    ("Classifier: License :: Free for non-commercial use\nLicense: MIT", "unknown"),
    ("License: Copyright Mitsubishi Electric", "unknown"), ("License: Not MIT: proprietary", "unknown"),
    ("License: CC-BY-NC-4.0 and MIT", "unknown"), ("License: BSD with Commons Clause, non-commercial", "unknown"),
    ("License: MIT AND CC-BY-NC-4.0", "unknown"), ("License: MITigated", "unknown"), ("License: MIT-NC", "unknown"),
    ("License: MIT License\n with the Commons Clause", "unknown"), ("License: MPL-2.0 AND MIT", "MPL-2.0 AND MIT"),
    ("License: MIT License\n Copyright (c) me\n Permission is hereby granted", "MIT"),
    ("License: Apache License, Version 2.0", "Apache-2.0"), ("License: The MIT License", "MIT"),
    ("License: Permitted use only", "unknown"), ("License: LGPLv3", "GPL"), ("Name: x", "unknown")])
def test_licence_from_metadata(metadata, licence):
    assert sources.licence_of(email.message_from_string(metadata)) == licence


def test_each_filter_takes_its_own(package, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "opted_out", lambda: ["private/*"])
    monkeypatch.setattr(corpus, "BALLAST_KEPT", 0)
    mean = "\n".join("name_with_a_long_tail = " + "call_it(again) + " * 8 for _ in range(30))
    files = {"kept.py": code("kept"), "late.py": code("late") + "# auto-generated",
             "made.py": "# This file was AUTO-GENERATED\n" + code("made"),
             "copyleft.py": "# GNU General Public License\n" + code("left"),
             "long.py": code("long") + "x = '" + "word " * 250 + "'", "mean.py": mean,
             "table.py": "x = [\n" + "[0, -1], [-2, 3],\n" * 99 + "]", "private/a.py": code("private"),
             "keys.py": "".join(f"k = '{hashlib.md5(bytes([i])).hexdigest() * 0}"
                                f"{''.join(a + b for a, b in zip('aBcDeF0gHi' * 3, 'X1yZ2wVu3T' * 3))}'\n"
                                for i in range(60)),
             "tests/test_a.py": code("test"), "settings.py": code("settings"), "testing_the.py": code("fine")}
    assert fates([package(files), package({"b.py": code("b")}, "GPL", "other")], tmp_path / "out") == {
        "kept.py": "kept", "late.py": "kept", "testing_the.py": "kept", "made.py": "generated",
        "copyleft.py": "copyleft header", "long.py": "long lines", "mean.py": "long lines",
        "table.py": "few letters", "keys.py": "odd tokens", "private/a.py": "opted out",
        "tests/test_a.py": "tests", "settings.py": "configuration", "b.py": "licence"}


def test_ballast_keeps_the_same_share_everywhere():
    seen = fingerprints.measure(LINES.encode())
    rows = [{"content": LINES, "package": "p", "path": "tests/a.py", "license": "MIT",
             "hash": sources.blob_id(str(i).encode())} for i in range(2000)]
    kept = [not corpus.objection(row, seen)[0] for row in rows]
    assert abs(sum(kept) / 2000 - 0.3) < 0.03
    assert kept == [not corpus.objection(row, seen)[0] for row in rows]


def test_measures_equal_those_by_hand():
    draw = random.Random(1)
    for _ in range(200):
        text = "".join(draw.choices("abcXYZ019_ \n\t.,()#", k=draw.randrange(1, 400)))
        lines, seen = text.split("\n"), fingerprints.measure(text.encode())
        assert seen.longest == max(map(len, lines))
        assert seen.mean == pytest.approx(sum(map(len, lines)) / len(lines), abs=1e-3)
        assert seen.letters == pytest.approx(sum(c.isalnum() for c in text) / len(text), abs=1e-3)
        pieces = re.findall(r"[a-z_]+|[A-Z]+|[0-9]+|([.,()#])\1*", text)
        first_is_space = text[0].isspace()
        assert seen.per_piece == pytest.approx(len(text) / (len(pieces) + first_is_space), abs=1e-3)


@pytest.mark.parametrize("text, kind", [
    ("AKIA" + "A1" * 8, "aws-key"), ("ghp_" + "a1B2" * 9, "github-token"), ("hf_" + "aB" * 17, "hub-token"),
    ("ASIA" + "A1" * 8, "aws-key"), ("github_pat_" + "a1B2_" * 9, "github-token"), ("sk-" + "aB3d" * 8, "model-key"),
    ("sk-proj-" + "aB3d" * 8, "model-key"), ("ADA@EXAMPLE.ORG", "e-mail"), ("ada@example.photography", "e-mail"),
    ("redis://:hunter2@host/x", "password"), ("-----BEGIN PGP PRIVATE KEY BLOCK-----\nVersion: a-b\n\nabc\n"
                                              "-----END PGP PRIVATE KEY BLOCK-----", "private-key"),
    ("xoxb-" + "1" * 12, "slack-token"), ("AIza" + "x" * 35, "google-key"), ("ada@example.org", "e-mail"),
    ("eyJ" + "a" * 12 + ".eyJ" + "b" * 12 + ".sig", "web-token"), ("https://ada:hunter2@host/x", "password"),
    ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----", "private-key")])
def test_secrets_are_cut_out_and_counted(text, kind):
    redacted, found = corpus.redact(f"x = '{text}'\n" * 2)
    assert found == {kind: 2} and redacted.count(f"<{kind}>") == 2
    body = max(re.split(r"://|@host|A[KS]IA|github_pat_|sk-|-----[A-Z ]+-----", text), key=len)
    assert body not in redacted


@pytest.mark.parametrize("text", ["@functools.cache\ndef f(): ...", "y = q@k.mT", "y = a@b.to(device)",
                                  "ghost = hf_model", "y = q@self.weight",
                                  "css = 'sk-toggleable__label-arrow'", "task-A1b2C3d4E5f6G7h8I9j0K1", "url = 'https://host/a:b@c'", "x = 'AKIA'"])
def test_code_that_only_looks_like_a_secret_stays(text):
    assert corpus.redact(text) == (text, collections.Counter())


@pytest.mark.parametrize("text", [
    "-----BEGIN PRIVATE KEY-----\n", "-----BEGIN " + "A" * 30, "eyJ", "eyJaaaaaaaaaa.", "a@b.", "a@", "@b.",
    "https://a:", "://a", "gh", "ghp_", "github_pat_", "sk-", "sk-a", "AKIA", "xoxb-", "AIza", "hf_"])
def test_redacting_takes_time_in_proportion_to_the_text(text):
    hostile, start = text * (1_500_000 // len(text)), time.process_time()
    corpus.redact(hostile)  # a tenth of a second; with a pattern that starts over, minutes
    assert time.process_time() - start < 8


# duplicates -------------------------------------------------------------------------------------


def test_the_original_stays_and_the_vendored_copy_goes(package, tmp_path):
    trees = [package({"_vendor/z/a.py": code("a"), "_vendor/z/d.py": code("d").replace(" ", "  "),
                      "b.py": code("b")}, name="apex"),
             package({"z/a.py": code("a"), "z/c.py": code("b").replace("\n", "\r\n\n"),
                      "z/d.py": code("d")}, name="z")]
    assert fates(trees, tmp_path / "out") == {"z/a.py": "kept", "_vendor/z/a.py": "exact duplicate",
                                              "z/d.py": "kept", "_vendor/z/d.py": "exact duplicate",
                                              "b.py": "kept", "z/c.py": "exact duplicate"}


def test_a_copy_under_a_licence_we_may_use_is_found_behind_one_we_may_not(package, tmp_path):
    trees = [package({"a.py": code("a")}, "GPL", "first"), package({"b.py": code("a")}, "MIT", "second"),
             package({"c.py": code("a")}, "GPL", "third")]
    assert fates(trees, tmp_path / "out") == {"a.py": "licence", "b.py": "kept", "c.py": "licence"}


def test_words_have_equal_hashes_exactly_when_they_are_equal():
    draw = random.Random(2)
    text = "".join(draw.choices("aB1_é", k=1)[0] if draw.random() < 0.7 else draw.choice(" .\n(")
                   for _ in range(1_500_000))
    cut = re.findall(rb"[a-zA-Z0-9_\x80-\xff]+", text.encode())
    hashes = fingerprints.word_hashes(text.encode()).tolist()
    assert len(cut) == len(hashes) and len(set(cut)) == len(set(zip(cut, hashes))) == len(set(hashes))
    assert len(fingerprints.word_hashes(b"...")) == 0


def test_signatures_estimate_jaccard_and_do_not_rank_words_alike():
    rng, errors = np.random.default_rng(3), []
    for share in np.linspace(0, 1, 41):
        one = rng.integers(0, 2**64, 400, np.uint64)
        two = np.concatenate([one[: int(400 * share)], rng.integers(0, 2**64, 400 - int(400 * share), np.uint64)])
        truth = fingerprints.jaccard(set(one.tolist()), set(two.tolist()))
        estimate = (fingerprints.signature(one) == fingerprints.signature(two)).mean()
        errors.append(abs(truth - estimate))
    assert np.mean(errors) < 0.035
    assert (fingerprints.signature(np.zeros(0, np.uint64)) == 2**32 - 1).all()


def test_planted_edits_are_found_and_decoys_are_not():
    texts, hidden = fingerprints.plant([code(f"name{i}", 40 + i) for i in range(80)], 5)
    assert len(hidden) == 80
    signs = np.stack([fingerprints.signature(fingerprints.word_hashes(t.encode())) for t in texts])
    found = {(a, b) for a, b, _ in fingerprints.similar_pairs(signs)}
    assert len(found & hidden) / 80 >= 0.95 and len(found & hidden) / len(found) >= 0.95
    near = np.array([[(a == b).mean() for b in signs] for a in signs])
    every = {(a, b) for a, b in zip(*np.nonzero(np.tril(near >= 0.85, -1)))}
    assert found <= every and len(found) >= 0.98 * len(every)


def test_near_duplicates_leave_no_chain_and_no_pair(package, tmp_path):
    def version(start: int) -> str:
        return "".join(f"name_{i} = call_{i}(other_{i})\n" for i in range(start, start + 200))
    got = fates([package({"a.py": version(0), "b.py": version(12), "c.py": version(24)})], tmp_path / "out")
    assert got == {"a.py": "kept", "b.py": "near duplicate", "c.py": "kept"}


# split and whole --------------------------------------------------------------------------------


def test_split_keeps_packages_and_families_whole():
    draw = random.Random(4)
    sizes = {f"{chr(97 + i % 26)}{chr(97 + i // 26)}{tail}": draw.randrange(1, 100)
             for i in range(200) for tail in ("", "-core")} | {"giant": 9000}
    parts = corpus.split_packages(sizes)
    assert set(parts) == set(sizes) and parts["giant"] == "train"
    assert all(parts[name] == parts[name.removesuffix("-core")] for name in sizes)
    for split in ("test", "validation"):
        share = sum(sizes[n] for n in sizes if parts[n] == split) / sum(sizes.values())
        assert 0.04 < share <= 0.05
    assert corpus.split_packages(dict(reversed(sizes.items()))) == parts


def test_the_same_files_give_the_same_bytes(package, tmp_path):
    trees = [package({f"m{i}.py": code(f"{name}{i}") for i in range(20)}, name=name) for name in ("aa", "bb", "cc")]
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        corpus.build(trees if name == "one" else trees[::-1], tmp_path / name, shard=20_000)
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "two").iterdir()) and "train-00001.parquet" in names
    for name in names:
        if not name.startswith(("rejected", "licenses")):
            assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
