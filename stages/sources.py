"""Where source files come from, and under which licence each package gives them."""

from __future__ import annotations

import errno
import functools
import hashlib
import importlib.metadata
import os
import re
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import license_expression

# A larger file is not source: it is not even read.
MOST_BYTES = 16_000_000
SOURCE = (".py", ".pyi")


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
    skip = {
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idle_test",
        "__pycache__",
    }
    trees = [
        folder_tree(Path(sysconfig.get_path("stdlib")), "python", "PSF-2.0", skip)
    ]
    installed = {}
    for package in importlib.metadata.distributions():
        if package.metadata["Name"]:
            installed[package.metadata["Name"].lower()] = package
    return trees + [
        distribution_tree(name, installed[name]) for name in sorted(installed)
    ]


def distribution_tree(name: str, package: importlib.metadata.Distribution) -> Tree:
    """The source files that an installed package lists as its own, inside its folder."""
    paths = set()
    for file in package.files or []:
        path = file.as_posix()
        if (
            path.endswith(SOURCE)
            and path.isprintable()
            and not path.startswith(("..", "/"))
        ):
            paths.add(path)
    root = Path(str(package.locate_file("")))
    return Tree(name, licence_of(package.metadata), root, sorted(paths))


def folder_tree(
    root: Path, package: str, licence: str, skip: Iterable[str] = ()
) -> Tree:
    """The source files of a folder. A link to a folder is listed, not followed: it may go back."""
    paths: list[str] = []
    rejected: dict[str, str] = {}

    def reject(place: str, reason: str) -> None:
        name = os.path.relpath(place, root).replace(os.sep, "/")
        rejected[name.encode(errors="backslashreplace").decode()] = reason

    for place, folders, names in os.walk(
        root, onerror=lambda e: reject(e.filename, "unreadable")
    ):
        folders[:] = sorted(set(folders) - set(skip))
        for name in folders:
            if os.path.islink(os.path.join(place, name)):
                reject(os.path.join(place, name), "link to a folder")
        for name in names:
            path = Path(place, name).relative_to(root).as_posix()
            if not name.endswith(SOURCE):
                continue
            # A name may hold control characters, or bytes that are no text.
            if path.isprintable():
                paths.append(path)
            else:
                reject(os.path.join(place, name), "name is not plain text")
    return Tree(package, licence, Path(root), sorted(paths), rejected)


# SPDX names, and BSD where a package does not say which of its forms.
PERMISSIVE = {
    "MIT",
    "MIT-0",
    "MIT-CMU",
    "X11",
    "HPND",
    "BSD",
    "BSD-2-Clause",
    "BSD-3-Clause",
}
PERMISSIVE |= {
    "0BSD",
    "ISC",
    "Apache-2.0",
    "PSF-2.0",
    "Python-2.0",
    "CNRI-Python",
    "Zlib",
}
PERMISSIVE |= {"Unlicense", "CC0-1.0", "BSL-1.0"}
# What classifiers and short texts call a licence: small letters, no comma, no `the`, no `license`.
SPELLINGS = {
    "Apache-2.0": "apache; apache software; apache 2; apache 2.0; apache version 2.0; apache v2.0",
    "BSD": "bsd; new bsd; modified bsd; simplified bsd",
    "BSD-2-Clause": "bsd 2-clause; 2-clause bsd",
    "BSD-3-Clause": "bsd 3-clause; 3-clause bsd",
    "BSL-1.0": "boost software 1.0 (bsl-1.0)",
    "CC0-1.0": "cc0 1.0 universal (cc0 1.0) public domain dedication",
    "HPND": "historical permission notice and disclaimer (hpnd)",
    "ISC": "isc (iscl); iscl",
    "MIT-0": "mit no attribution (mit-0); mit no attribution",
    "MPL-2.0": "mpl 2.0; mozilla public 2.0 (mpl 2.0)",
    "PSF-2.0": "python software foundation; psf",
    "Unlicense": "unlicense (unlicense)",
    "Zlib": "zlib/libpng",
}
SPDX_OF = {
    text: name for name, texts in SPELLINGS.items() for text in texts.split("; ")
}


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
    """
    plain = re.sub(r"^the |\blicen[sc]e\b|,", " ", " ".join(text.lower().split()))
    plain = " ".join(plain.split())
    if plain in SPDX_OF:
        return SPDX_OF[plain]
    tree = parse_licence(plain, strict=True)
    if tree is not None:
        return str(tree)
    return "GPL" if re.search(r"general public|\b[al]?gpl", plain) else "unknown"


def licence_of(metadata: Any) -> str:
    """One expression from package metadata: its expression, its classifiers, or its short text.

    >>> import email
    >>> licence_of(email.message_from_string("License: Apache 2.0 License"))
    'Apache-2.0'
    """
    if metadata.get("License-Expression"):
        tree = parse_licence(metadata["License-Expression"])
        return "unknown" if tree is None else str(tree)
    classifiers = metadata.get_all("Classifier") or []
    names = [
        text.rpartition(" :: ")[2]
        for text in classifiers
        if text.startswith("License ::")
    ]
    if names:
        return " AND ".join(dict.fromkeys(licence_named(name) for name in names))
    head, _, rest = (metadata.get("License") or "").strip().partition("\n")
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
    return tree is not None and allows(tree)


def allows(tree: Any) -> bool:
    """Is a parsed expression permissive? Of an exception (WITH) only SPDX's own are believed."""
    choices = [allows(part) for part in tree.args]
    if choices:
        return all(choices) if isinstance(tree, spdx().AND) else any(choices)
    exception = getattr(tree, "exception_symbol", None)
    if exception is not None:
        return exception.is_exception and tree.license_symbol.key in PERMISSIVE
    return tree.key in PERMISSIVE


@functools.cache
def opted_out() -> list[str]:
    """The patterns of `opt_out.txt`: packages or paths whose owners asked to be left out."""
    lines = (
        (Path(__file__).parent / "opt_out.txt")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    patterns = [line.split("#")[0].strip() for line in lines]
    return [pattern for pattern in patterns if pattern]


def blob_id(data: bytes) -> str:
    """The name that Git and GitHub give to a content.

    >>> blob_id(b"")
    'e69de29bb2d1d6434b8b29ae775ad8c2e48c5391'
    """
    return hashlib.sha1(
        b"blob %d\0" % len(data) + data, usedforsecurity=False
    ).hexdigest()


def read_file(path: Path) -> tuple[bytes, str]:
    """The bytes of a file, and why they are of no use if they are not. It never raises."""
    try:
        before = path.stat()
        if not path.is_file():
            return b"", "not a plain file"
        if before.st_size > MOST_BYTES:
            return b"", "too large to read"
        data = path.read_bytes()
        after = path.stat()
    except OSError as error:
        return b"", "link in a loop" if error.errno == errno.ELOOP else "unreadable"
    except ValueError:  # a NUL, or half a character, in the path
        return b"", "unreadable"
    if (before.st_size, before.st_mtime_ns) != (len(data), after.st_mtime_ns):
        return b"", "changed while read"
    if not data.strip():
        return data, "empty"
    # What holds a NUL is binary: it is stored, and the query leaves it out.
    if b"\0" in data:
        return data, ""
    try:
        data.decode()
    except UnicodeDecodeError:
        return data, "not UTF-8"
    return data, ""
