"""Where source files come from, and under which licence each package gives them."""

from __future__ import annotations

import email
import errno
import functools
import hashlib
import importlib.metadata
import os
import re
import stat
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import license_expression

from utils.archives import unpack
from utils.errors import CourseError

# A larger file is not source: it is not even read.
MOST_BYTES = 16_000_000
SOURCE = (".py", ".pyi")
ODD_NAME = "name is not plain text"


@dataclass(frozen=True)
class Tree:
    """The source files of one package below a folder; `rejected` has the reason for other names."""

    package: str
    licence: str
    root: Path
    paths: list[str]
    rejected: dict[str, str] = field(default_factory=dict)

    @functools.cached_property
    def size(self) -> int:
        """Bytes of all its files."""
        places = [self.root / path for path in self.paths]
        return sum(place.stat().st_size for place in places if place.is_file())


def environment() -> list[Tree]:
    """The standard library (without its tests, which not every Python ships) and every package."""
    skip = ["site-packages", "dist-packages", "test", "tests", "idle_test"]
    library = Path(sysconfig.get_path("stdlib"))
    trees = {}
    for package in importlib.metadata.distributions():
        name = package.metadata["Name"]
        if name:
            name = name.lower()
            trees[name] = distribution_tree(name, package)
    packages = [trees[name] for name in sorted(trees)]
    python = folder_tree(library, "python", "PSF-2.0", skip)
    return [python, *packages]


def packages_within(trees: list[Tree], most: int) -> list[Tree]:
    """Trees that fit in `most` bytes: the first always, the rest by a hash of their names."""
    first, *rest = trees
    rest.sort(key=lambda tree: hashlib.sha1(tree.package.encode()).digest())
    chosen = [first]
    room = most - first.size
    for tree in rest:
        size = tree.size
        if size <= room:
            chosen.append(tree)
            room -= size
    return chosen


def distribution_tree(name: str, package: importlib.metadata.Distribution) -> Tree:
    """The source files that an installed package lists; those outside its folder are rejected."""
    paths = set()
    rejected = {}
    for file in package.files or []:
        path = file.as_posix()
        if not path.endswith(SOURCE):
            continue
        if path.startswith(("../", "/")):
            rejected[storable(path)] = "outside its folder"
        elif path.isprintable():
            paths.add(path)
        else:
            rejected[storable(path)] = ODD_NAME
    root = Path(str(package.locate_file("")))
    return Tree(name, licence_of(package.metadata), root, sorted(paths), rejected)


def storable(name: str) -> str:
    """A file's name as a text that can be stored: half characters are spelled out."""
    return name.encode(errors="backslashreplace").decode()


def folder_tree(
    root: Path, package: str, licence: str, skip: Iterable[str] = ()
) -> Tree:
    """The source files of a folder. A link to a folder is listed, not followed: it may go back."""
    paths: list[str] = []
    refused: list[tuple[str | Path, str]] = []
    errors: list[OSError] = []
    for place, folders, names in os.walk(root, onerror=errors.append):
        folders[:] = sorted(set(folders) - set(skip))
        for path in [Path(place, name) for name in folders]:
            if path.is_symlink():
                refused.append((path, "link to a folder"))
        for path in [Path(place, name) for name in names if name.endswith(SOURCE)]:
            # A name may hold control characters, or bytes that are no text.
            if str(path.relative_to(root)).isprintable():
                paths.append(path.relative_to(root).as_posix())
            else:
                refused.append((path, ODD_NAME))
    refused += [(error.filename, "unreadable") for error in errors]
    rejected = {}
    for refusal, reason in refused:
        name = Path(refusal).relative_to(root).as_posix()
        rejected[storable(name)] = reason
    return Tree(package, licence, Path(root), sorted(paths), rejected)


def fetch_wheel(project: str, folder: Path) -> Path:
    """A released wheel, fetched by pip into a folder; nothing of it is run."""
    # For a path, an address or a source archive pip would run a build script.
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*(==[A-Za-z0-9.!+]+)?", project):
        what = f"{project!r} is not the name of a project"
        raise CourseError(
            what, "fetch_wheel", "give a name: attrs, or attrs==25.4.0"
        )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    # For another Python than ours it is text as good as any.
    command += ["--ignore-requires-python", "--only-binary", ":all:", "--", project]
    pip = subprocess.run(
        command, cwd=folder, capture_output=True, encoding="utf-8", errors="replace"
    )
    if pip.returncode:
        reason = pip.stderr.strip().splitlines()[-1:]
        what = f"no wheel of {project} could be fetched: {' '.join(reason)}"
        raise CourseError(what, "pip download", "check the name and the network")
    return next(folder.glob("*.whl"))


def wheel_tree(project: str, folder: Path) -> Tree:
    """The source files and the licence of a released wheel, in an empty folder."""
    wheel = fetch_wheel(project, folder)
    unpack(wheel, ["**/*.py", "*.dist-info/METADATA"], folder)
    metadata = next(folder.glob("*.dist-info/METADATA")).read_bytes()
    licence = licence_of(email.message_from_bytes(metadata))
    return folder_tree(folder, project, licence)


FOLDER = Path(__file__).parent
LICENCES = tomllib.loads((FOLDER / "licences.toml").read_text(encoding="utf-8"))
PERMISSIVE = set(LICENCES["permissive"])
SPDX_OF = LICENCES["spellings"]
# Reads licence expressions, and knows the names of the SPDX list.
spdx = functools.cache(license_expression.get_spdx_licensing)


def parse_licence(text: str | None, strict: bool = False) -> Any:
    """A licence expression as a tree, or None for another text; `strict`: of SPDX names only."""
    try:
        return spdx().parse(text, validate=strict, strict=strict)
    except Exception:  # on a hostile text the parser fails in many ways
        return None


def licence_named(text: str) -> str:
    """The licence that a short text names if it is, as a whole, a known name; else `unknown`.

    >>> licence_named("The MIT License"), licence_named("MIT, for research only")
    ('MIT', 'unknown')
    >>> licence_named("NVIDIA Proprietary Software")
    'proprietary'
    """
    plain = re.sub(r"^the |\blicen[sc]e\b|,", " ", " ".join(text.lower().split()))
    plain = " ".join(plain.split())
    if plain in SPDX_OF:
        return SPDX_OF[plain]
    tree = parse_licence(plain, strict=True)
    if tree is not None:
        return str(tree)
    if "proprietary" in plain:
        return "proprietary"
    return "GPL" if re.search(r"general public|\b[al]?gpl", plain) else "unknown"


def licence_of(metadata: Any) -> str:
    """One expression from package metadata: its expression, its classifiers, or its short text.

    >>> import email
    >>> licence_of(email.message_from_string("License: Apache 2.0 License"))
    'Apache-2.0'
    """
    expression = metadata.get("License-Expression")
    if expression:
        tree = parse_licence(expression)
        if tree is None:
            return "unknown"
        return str(tree)
    classifiers = metadata.get_all("Classifier") or []
    licences = [text for text in classifiers if text.startswith("License ::")]
    ends = [text.rpartition(" :: ")[2] for text in licences]
    names = [licence_named(end) for end in ends]
    if names:
        return " AND ".join(dict.fromkeys(names))
    text = metadata.get("License") or ""
    head, _, rest = text.strip().partition("\n")
    # A text that goes on below a known name may take back what the name gives.
    if re.search(r"(?i)commons clause|commercial|proprietary", rest):
        return "unknown"
    return licence_named(head)


@functools.cache
def permissive(expression: str | None) -> bool:
    """Does the expression let us train and publish? AND binds to all its parts, OR lets us choose.

    >>> permissive("Apache-2.0 OR GPL-3.0"), permissive("MPL-2.0 AND MIT"), permissive("unknown")
    (True, False, False)
    """
    tree = parse_licence(expression)
    if tree is None:
        return False
    return allows(tree)


def allows(tree: Any) -> bool:
    """Is a parsed expression permissive? Of an exception (WITH) only SPDX's own are believed."""
    choices = [allows(part) for part in tree.args]
    if choices and isinstance(tree, spdx().AND):
        return all(choices)
    if choices:
        return any(choices)
    exception = getattr(tree, "exception_symbol", None)
    if exception is not None:
        unlisted = exception.key.startswith("LicenseRef-")
        listed = exception.is_exception and not unlisted
        return listed and tree.license_symbol.key in PERMISSIVE
    return tree.key in PERMISSIVE


@functools.cache
def opted_out() -> list[str]:
    """The patterns of `opt_out.txt`: packages or paths whose owners asked to be left out."""
    lines = (FOLDER / "opt_out.txt").read_text(encoding="utf-8").splitlines()
    patterns = [line.split("#")[0].strip() for line in lines]
    return [pattern for pattern in patterns if pattern]


def blob_id(data: bytes) -> str:
    """The name that Git and GitHub give to a content.

    >>> blob_id(b"")
    'e69de29bb2d1d6434b8b29ae775ad8c2e48c5391'
    """
    digest = hashlib.sha1(b"blob %d\0" % len(data), usedforsecurity=False)
    digest.update(data)
    return digest.hexdigest()


def read_file(path: str | Path) -> tuple[bytes, str]:
    """The bytes of a file, and why they are of no use if they are not. It never raises."""
    try:
        before = os.stat(path)
        if not stat.S_ISREG(before.st_mode):
            return b"", "not a plain file"
        if before.st_size > MOST_BYTES:
            return b"", "too large to read"
        with open(path, "rb") as file:
            data = file.read()
            after = os.fstat(file.fileno())
        # What holds a NUL is binary: it is stored, and the query leaves it out.
        if b"\0" not in data:
            data.decode()
    except OSError as error:
        return b"", "link in a loop" if error.errno == errno.ELOOP else "unreadable"
    except UnicodeDecodeError:
        return b"", "not UTF-8"
    except ValueError:  # a NUL, or half a character, in the path
        return b"", "unreadable"
    if (before.st_size, before.st_mtime_ns) != (len(data), after.st_mtime_ns):
        return b"", "changed while read"
    return data, "empty" if not data or data.isspace() else ""
