"""Tries to break the reading of source files and of licences."""

import email
import importlib.metadata
import io
import os
import subprocess
import sys
import sysconfig
import tarfile
import threading
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import LINKS, LINUX
from stages import corpus, sources
from utils.errors import CourseError

SOURCE = "".join(f"value_{i} = compute(value_{i - 1}, {i})\n" for i in range(1, 60))
pipes = pytest.mark.skipif(
    not hasattr(os, "mkfifo"), reason="this system has no named pipes"
)


# folders and files --------------------------------------------------------------------------------


def test_a_folder_gives_its_source_files_sorted(tmp_path):
    for name in ("b.py", "a/c.pyi", "a/data.txt", "skipped/d.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(SOURCE)
    tree = sources.folder_tree(tmp_path, "thing", "MIT", skip=["skipped"])
    assert tree.paths == ["a/c.pyi", "b.py"]
    assert tree.rejected == {}
    assert tree.size == 2 * len(SOURCE)


@LINKS
def test_a_link_to_a_folder_is_listed_and_not_followed(tmp_path):
    (tmp_path / "a.py").write_text(SOURCE)
    (tmp_path / "down").symlink_to(tmp_path)
    tree = sources.folder_tree(tmp_path, "thing", "MIT")
    assert tree.paths == ["a.py"]
    assert tree.rejected == {"down": "link to a folder"}


@LINUX
def test_a_name_that_is_no_text_is_listed(tmp_path):
    root = os.fsencode(tmp_path)
    Path(os.fsdecode(root + b"/bad\xff.py")).write_text(SOURCE)
    os.mkdir(root + b"/dir\xff")
    Path(os.fsdecode(root + b"/dir\xff/a.py")).write_text(SOURCE)
    tree = sources.folder_tree(tmp_path, "thing", "MIT")
    assert tree.paths == []
    assert set(tree.rejected) == {"bad\\udcff.py", "dir\\udcff/a.py"}
    assert set(tree.rejected.values()) == {"name is not plain text"}


@pytest.mark.parametrize(
    "content, reason",
    [
        (SOURCE.encode(), ""),
        (b"", "empty"),
        (b" \n\t", "empty"),
        (b"x\0" * 99, ""),
        (b"\xff\0" * 99, ""),
        (b"# caf\xe9\n", "not UTF-8"),
        (b"x = 1\n" * 3_000_000, "too large to read"),
    ],
)
def test_what_is_in_a_file_decides(tmp_path, content, reason):
    (tmp_path / "a.py").write_bytes(content)
    data, why = sources.read_file(tmp_path / "a.py")
    assert why == reason
    assert data == (
        b"" if reason in ("too large to read", "not UTF-8") else content
    )


@pytest.mark.parametrize(
    "name", ["a\0.py", "\ud800.py", "x" * 5000, "a.py/b.py", ""]
)
def test_a_path_that_no_file_can_have_is_unreadable(tmp_path, name):
    (tmp_path / "a.py").write_text("x = 1\n")
    assert sources.read_file(tmp_path / name)[1] in (
        "unreadable",
        "not a plain file",
    )


@LINKS
def test_links_that_lead_nowhere_are_unreadable(tmp_path):
    (tmp_path / "loop.py").symlink_to("loop.py")
    (tmp_path / "dangling.py").symlink_to("nowhere.py")
    assert sources.read_file(tmp_path / "loop.py")[1] == "link in a loop"
    assert sources.read_file(tmp_path / "dangling.py")[1] == "unreadable"


@pipes
def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.py")
    assert sources.read_file(tmp_path / "pipe.py")[1] == "not a plain file"


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path):
    path = tmp_path / "log.py"
    path.write_bytes(b"x = 1\n" * 1_500_000)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            with path.open("r+b") as file:
                file.write(b"y")

    writer = threading.Thread(target=write)
    writer.start()
    reasons: set[str] = set()
    try:
        # A slow machine may need many tries to meet the writer.
        for _ in range(2000):
            reasons.add(sources.read_file(path)[1])
            if "changed while read" in reasons:
                break
    finally:
        stop.set()
        writer.join()
    assert "changed while read" in reasons
    assert sources.read_file(path)[1] == ""


def test_the_environment_has_a_licence_on_each_package_and_no_path_outside():
    trees = sources.environment()
    assert trees[0].package == "python"
    assert len(trees) > 50
    assert not [
        p for tree in trees for p in tree.paths if p.startswith(("/", ".."))
    ]
    assert sum(tree.licence == "unknown" for tree in trees) <= len(trees) // 20
    stdlib = Path(sysconfig.get_path("stdlib"))
    assert trees[0].root == stdlib
    assert "json/decoder.py" in trees[0].paths


def test_a_file_outside_its_folder_is_listed_and_counted(tmp_path):
    info = tmp_path / "site" / "tiny-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\nLicense: MIT\n"
    )
    site = info.parent
    elsewhere = (tmp_path / "b.py").as_posix()
    names = [
        "tiny/a.py",
        "../outside.py",
        elsewhere,
        "tiny/data.bin",
        "tiny/\x07.py",
    ]
    (info / "RECORD").write_text(
        "".join(f"{name},,\n" for name in names), encoding="utf-8"
    )
    # From Python 3.12 on only files that are there are told.
    for name in names:
        (site / name).parent.mkdir(exist_ok=True)
        (site / name).write_text(SOURCE)
    package = importlib.metadata.Distribution.at(info)
    tree = sources.distribution_tree("tiny", package)
    assert (tree.licence, tree.paths) == ("MIT", ["tiny/a.py"])
    assert tree.rejected == {
        "../outside.py": "outside its folder",
        elsewhere: "outside its folder",
        "tiny/\x07.py": "name is not plain text",
    }
    (tmp_path / "built").mkdir()
    report = corpus.build([tree], tmp_path / "built")
    assert report["seen"] == 4
    assert report["reasons"]["outside its folder"] == 2


def test_the_list_of_those_who_opted_out_is_read_without_its_comments():
    patterns = sources.opted_out()
    assert "transformers-end-to-end" in patterns
    assert not [
        pattern
        for pattern in patterns
        if "#" in pattern or pattern != pattern.strip()
    ]


# licences -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "expression, allowed",
    [
        ("MIT", True),
        ("mit", True),
        ("BSD", True),
        ("((MIT))", True),
        ("GPL-3.0", False),
        ("MIT OR GPL-3.0", True),
        ("MIT AND GPL-3.0", False),
        ("(MIT OR GPL-2.0) AND Apache-2.0", True),
        ("MIT OR GPL-2.0 AND LGPL-2.1", True),
        ("(MIT OR GPL-2.0) AND LGPL-2.1", False),
        ("GPL-2.0 AND MIT OR LGPL-2.1", False),
        ("Apache-2.0 WITH LLVM-exception AND MIT", True),
        ("GPL-2.0 WITH Classpath-exception-2.0", False),
        ("MIT WITH Commons-Clause", False),
        ("MIT WITH LicenseRef-scancode-commons-clause", False),
        ("MIT WITH some-exception-of-ours", False),
        ("Apache-2.0 WITH MIT", False),
        ("LLVM-exception", False),
        ("CC-BY-NC-4.0 AND MIT", False),
        ("MIT, but not for war", False),
        ("NOT MIT", False),
        ("MIT OR", False),
        ("()", False),
        ("MITRE", False),
        ("MIT+", False),
        ("LicenseRef-Proprietary", False),
        ("unknown", False),
        ("unknown AND MIT", False),
        ("", False),
        (None, False),
    ],
)
def test_permissive(expression, allowed):
    assert sources.permissive(expression) is allowed


# A licence, or (operator, left, right).
NAMES = [
    *sorted(sources.PERMISSIVE),
    "GPL-3.0-only",
    "CC-BY-NC-4.0",
    "unknown",
    "SSPL-1.0",
    "MITRE",
]
TREES = st.recursive(
    st.sampled_from(NAMES),
    lambda tree: st.tuples(st.sampled_from(["AND", "OR"]), tree, tree),
    max_leaves=12,
)


def written(tree, draw, inside_and: bool = False) -> str:
    """The expression of a tree, with no more brackets than it needs, or with many."""
    if isinstance(tree, str):
        # SPDX names are the same in small letters; BSD is a name of ours.
        return tree.lower() if tree != "BSD" and draw(st.booleans()) else tree
    operator, left, right = tree
    both = [written(part, draw, operator == "AND") for part in (left, right)]
    text = f" {operator} ".join(both)
    needed = operator == "OR" and inside_and
    return f"({text})" if needed or draw(st.booleans()) else text


def true_by_force(tree) -> bool:
    """Is some choice among its ORs permissive in every licence that it binds us to?"""

    def choices(tree) -> list[frozenset]:
        if isinstance(tree, str):
            return [frozenset([tree])]
        operator, left, right = tree
        if operator == "OR":
            return choices(left) + choices(right)
        return [one | two for one in choices(left) for two in choices(right)]

    return any(choice <= sources.PERMISSIVE for choice in choices(tree))


@settings(max_examples=300, deadline=None)
@given(TREES, st.data())
def test_permissive_agrees_with_every_choice_tried(tree, data):
    expression = written(tree, data.draw)
    assert sources.permissive(expression) is true_by_force(tree), expression


@settings(max_examples=300, deadline=None)
@given(st.text() | st.text(alphabet="MITGPL andORWH()+-.,;/\n"))
def test_any_text_is_a_licence_or_unknown_and_never_raises(text):
    assert sources.permissive(text) in (True, False)
    named = sources.licence_named(text)
    assert named and named == " ".join(named.split())
    # A text that is no expression of known names allows nothing.
    if sources.parse_licence(text, strict=True) is None and named == "unknown":
        assert not sources.permissive(named)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(
        sorted(sources.SPDX_OF) + ["mit license", "the mit license", "isc"]
    ),
    st.text(alphabet="abcdefghij ,.()\n", min_size=2),
)
def test_a_known_name_with_other_words_is_not_that_licence(name, more):
    text = f"{name} x{more}"
    assert sources.licence_named(text) in ("unknown", "GPL"), text


@pytest.mark.parametrize(
    "metadata, licence",
    [
        ("License-Expression: MIT AND 0BSD\nLicense: GPL", "MIT AND 0BSD"),
        ("License-Expression: mit or LicenseRef-Ours", "MIT OR LicenseRef-Ours"),
        ("License-Expression: <script>alert(1)</script>", "unknown"),
        ("License: Apache 2.0 License", "Apache-2.0"),
        (
            "Classifier: License :: OSI Approved :: BSD License\nLicense: Copyright (c) me",
            "BSD",
        ),
        (
            "Classifier: License :: OSI Approved :: MIT License\n"
            "Classifier: License :: OSI Approved :: GNU Lesser General Public License v3 (LGPLv3)",
            "MIT AND GPL",
        ),
        (
            "Classifier: License :: OSI Approved :: Eclipse Public License 2.0 (EPL-2.0)\n"
            "Classifier: License :: OSI Approved :: MIT License",
            "unknown AND MIT",
        ),
        ("Classifier: License :: OSI Approved :: ISC License (ISCL)", "ISC"),
        (
            "Classifier: License :: OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)",
            "MPL-2.0",
        ),
        (
            "Classifier: License :: Free for non-commercial use\nLicense: MIT",
            "unknown",
        ),
        ("License: Copyright Mitsubishi Electric", "unknown"),
        ("License: Not MIT: proprietary", "proprietary"),
        ("License: CC-BY-NC-4.0 and MIT", "CC-BY-NC-4.0 AND MIT"),
        ("License: BSD with Commons Clause, non-commercial", "unknown"),
        ("License: MITigated", "unknown"),
        ("License: MIT-NC", "unknown"),
        ("License: MIT License\n with the Commons Clause", "unknown"),
        ("License: MPL-2.0 AND MIT", "MPL-2.0 AND MIT"),
        (
            "License: MIT License\n Copyright (c) me\n Permission is hereby granted",
            "MIT",
        ),
        ("License: Apache License, Version 2.0", "Apache-2.0"),
        ("License: The MIT License", "MIT"),
        ("License: 3-Clause BSD License", "BSD-3-Clause"),
        ("License: Permitted use only", "unknown"),
        ("License: LGPLv3", "GPL"),
        ("License: NVIDIA Proprietary Software", "proprietary"),
        (
            "License: Apache 2.0\nClassifier: License :: Other/Proprietary License",
            "proprietary",
        ),
        ("Name: x", "unknown"),
    ],
)
def test_licence_from_metadata(metadata, licence):
    assert sources.licence_of(email.message_from_string(metadata)) == licence


def test_every_spelling_leads_to_a_name_that_the_list_knows():
    for text, name in sources.SPDX_OF.items():
        assert sources.licence_named(text) == name
        assert (
            name == "BSD" or sources.parse_licence(name, strict=True) is not None
        ), name
    for name in sources.PERMISSIVE - {"BSD"}:
        assert str(sources.parse_licence(name, strict=True)) == name


# the wheels of lesson 03 --------------------------------------------------------------------------


@pytest.fixture
def shelf(tmp_path, monkeypatch) -> Path:
    """A folder that pip takes in the place of a package registry."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "shelf"))
    (tmp_path / "shelf").mkdir()
    return tmp_path / "shelf"


def put_wheel(shelf: Path, files: dict[str, str]) -> None:
    """A wheel of the package `tiny`, written by hand."""
    metadata = "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\nLicense: MIT\n"
    wheel = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    folder = "tiny-1.0.dist-info"
    facts = {
        f"{folder}/METADATA": metadata,
        f"{folder}/WHEEL": wheel,
        f"{folder}/RECORD": "",
    }
    with zipfile.ZipFile(shelf / "tiny-1.0-py3-none-any.whl", "w") as archive:
        for name, content in {**files, **facts}.items():
            archive.writestr(name, content)


def project_that_leaves_a_mark(folder: Path, mark: Path) -> Path:
    """A source project whose build script writes a file."""
    folder.mkdir()
    script = f"open({str(mark)!r}, 'w').close()\nfrom setuptools import setup\n"
    script += "setup(name='tiny', version='1.0')\n"
    (folder / "setup.py").write_text(script)
    return folder


def test_a_wheel_is_unpacked_and_read(shelf, tmp_path):
    put_wheel(shelf, {"tiny/a.py": SOURCE, "tiny/data.bin": "no"})
    (tmp_path / "new").mkdir()
    tree = sources.wheel_tree("tiny", tmp_path / "new")
    assert (tree.package, tree.licence, tree.paths) == (
        "tiny",
        "MIT",
        ["tiny/a.py"],
    )


def test_a_wheel_that_leaves_its_folder_is_refused(shelf, tmp_path):
    put_wheel(shelf, {"../../outside.py": "x = 1"})
    (tmp_path / "new").mkdir()
    with pytest.raises(CourseError, match="leaves its folder"):
        sources.wheel_tree("tiny", tmp_path / "new")
    assert not list(tmp_path.rglob("outside.py"))


def test_what_is_not_there_is_an_error_that_says_what_to_do(shelf, tmp_path):
    with pytest.raises(
        CourseError, match="(?s)no wheel of no-such-package could be fetched.*next:"
    ):
        sources.fetch_wheel("no-such-package", tmp_path)


@pytest.mark.parametrize("where", ["path", "address", "option"])
def test_the_build_script_of_a_project_is_never_run(shelf, tmp_path, where):
    mark = tmp_path / "mark"
    project = project_that_leaves_a_mark(tmp_path / "project", mark)
    name = {
        "path": str(project),
        "address": project.as_uri(),
        "option": f"-r{project}",
    }[where]
    with pytest.raises(CourseError, match="is not the name of a project"):
        sources.fetch_wheel(name, tmp_path)
    assert not mark.exists()


@pytest.mark.parametrize(
    "setting", ["", "PIP_NO_BINARY=tiny", "PIP_NO_BINARY=:all:"]
)
def test_a_source_archive_is_never_taken(shelf, tmp_path, monkeypatch, setting):
    mark = tmp_path / "mark"
    project = project_that_leaves_a_mark(tmp_path / "tiny-1.0", mark)
    facts = b"Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n"
    with tarfile.open(shelf / "tiny-1.0.tar.gz", "w:gz") as archive:
        archive.add(project, "tiny-1.0")
        info = tarfile.TarInfo("tiny-1.0/PKG-INFO")
        info.size = len(facts)
        archive.addfile(info, io.BytesIO(facts))
    if setting:
        monkeypatch.setenv(*setting.split("="))
    with pytest.raises(CourseError, match="no wheel of tiny could be fetched"):
        sources.fetch_wheel("tiny", tmp_path)
    assert not mark.exists()


def test_pip_would_have_run_it(shelf, tmp_path):
    """What the two tests above would miss if the project left no mark at all."""
    mark = tmp_path / "mark"
    project = project_that_leaves_a_mark(tmp_path / "project", mark)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--no-build-isolation",
    ]
    subprocess.run(
        [*command, "--", str(project)],
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    assert mark.exists()
