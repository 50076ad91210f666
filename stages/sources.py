"""Floor 1: where source files come from, and under which licence each package gives them."""
from __future__ import annotations

import email
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


MOST_BYTES = 16_000_000  # a larger file is not source; it is not even read
SOURCE = (".py", ".pyi")


@dataclass(frozen=True)
class Tree:
    """The source files of one package below a folder, and what was listed there but is no file."""

    package: str
    licence: str | None
    root: Path
    paths: list[str]
    rejected: dict[str, str] = field(default_factory=dict)

    @functools.cached_property
    def size(self) -> int:
        """Bytes of all its files."""
        return sum(os.path.getsize(self.root / p) for p in self.paths if (self.root / p).is_file())


def environment() -> list[Tree]:
    """The standard library (without its tests, which not every Python ships) and every package."""
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    library = folder_tree(Path(sysconfig.get_path("stdlib")), "python", "PSF-2.0", skip)
    installed = {d.metadata["Name"].lower(): d for d in importlib.metadata.distributions()
                 if d.metadata["Name"]}
    return [library] + [distribution_tree(name, installed[name]) for name in sorted(installed)]


def distribution_tree(name: str, package: importlib.metadata.Distribution) -> Tree:
    """The source files that an installed package lists as its own."""
    paths = {f.as_posix() for f in package.files or [] if f.name.endswith(SOURCE)}
    inside = sorted(p for p in paths if not p.startswith(("..", "/")) and p.isprintable())
    return Tree(name, licence_of(package.metadata), Path(package.locate_file("")), inside)


def folder_tree(root: Path, package: str, licence: str | None, skip: Iterable[str] = ()) -> Tree:
    """Any folder. A link to a folder is listed and not followed: it may lead back here."""
    paths, rejected = [], {}

    def refuse(place: str, reason: str) -> None:
        name = os.path.relpath(place, root).replace(os.sep, "/")
        rejected[name.encode(errors="backslashreplace").decode()] = reason

    for place, folders, names in os.walk(root, onerror=lambda e: refuse(e.filename, "unreadable")):
        for name in folders:
            if os.path.islink(os.path.join(place, name)):
                refuse(os.path.join(place, name), "link to a folder")
        folders[:] = sorted(set(folders) - set(skip))
        for name in (name for name in names if name.endswith(SOURCE)):
            path = Path(place, name).relative_to(root).as_posix()
            if path.isprintable():  # not so: bytes that are no text, or control characters
                paths.append(path)
            else:
                refuse(os.path.join(place, name), "name is not plain text")
    return Tree(package, licence, Path(root), sorted(paths), rejected)


def some_of(trees: list[Tree], most: int) -> list[Tree]:
    """Packages that fit in `most` bytes: the first always, the rest by a hash of their names."""
    order = sorted(trees[1:], key=lambda tree: hashlib.sha1(tree.package.encode()).digest())
    chosen, room = [trees[0]], most - trees[0].size
    for tree in order:
        if tree.size <= room:
            chosen.append(tree)
            room -= tree.size
    return chosen


PERMISSIVE = set("mit mit-0 mit-cmu x11 hpnd bsd bsd-2-clause bsd-3-clause 0bsd isc apache-2.0 "
                 "psf-2.0 python-2.0 cnri-python zlib unlicense cc0-1.0 bsl-1.0".split())
SHORT = {  # the whole of a classifier or of a short text, in small letters, and what it means
    "apache software": "Apache-2.0", "apache": "Apache-2.0", "apache 2": "Apache-2.0",
    "apache 2.0": "Apache-2.0", "apache version 2.0": "Apache-2.0", "apache v2": "Apache-2.0",
    "apache v2.0": "Apache-2.0", "apache-2": "Apache-2.0", "mit no attribution": "MIT-0",
    "new bsd": "BSD", "modified bsd": "BSD", "simplified bsd": "BSD", "3-clause bsd": "BSD-3-Clause",
    "2-clause bsd": "BSD-2-Clause", "bsd 3-clause": "BSD-3-Clause", "bsd 2-clause": "BSD-2-Clause",
    "isc (iscl)": "ISC", "iscl": "ISC", "python software foundation": "PSF-2.0", "psf": "PSF-2.0",
    "zlib/libpng": "Zlib", "unlicense (unlicense)": "Unlicense", "boost software 1.0 (bsl-1.0)": "BSL-1.0",
    "historical permission notice and disclaimer (hpnd)": "HPND", "mpl 2.0": "MPL-2.0",
    "cc0 1.0 universal (cc0 1.0) public domain dedication": "CC0-1.0",
    "mozilla public 2.0 (mpl 2.0)": "MPL-2.0", "mpl-2.0": "MPL-2.0"}
NAMES = "MIT MIT-0 MIT-CMU X11 HPND BSD BSD-2-Clause BSD-3-Clause 0BSD ISC Apache-2.0 PSF-2.0 Zlib Unlicense"
SHORT |= {name.lower(): name for name in NAMES.split()}
GPL = re.compile(r"(gnu )?((lesser|library|affero) )?(general public|[al]?gpl)[ \w.+()-]*")


def licence_named(text: str) -> str:
    """What a short text names if it is, as a whole, a known name; else `unknown`.

    >>> licence_named("The MIT License"), licence_named("MIT, for research only")
    ('MIT', 'unknown')
    """
    plain = re.sub(r"^the |\blicen[sc]e\b|,", " ", " ".join(text.lower().split()))
    plain = " ".join(plain.split())
    return SHORT.get(plain) or ("GPL" if GPL.fullmatch(plain) else "unknown")


def free_text(text: str) -> str:
    """The licence in the field `License`: a name, names joined by OR and AND, or a text under a name."""
    head, _, rest = text.strip().partition("\n")
    if re.search(r"(?i)commons clause|commercial|proprietary", rest):
        return "unknown"
    joined = re.split(r" (AND|OR) ", head)  # capitals, as in an SPDX expression
    names = [word if word in ("AND", "OR") else licence_named(word) for word in joined]
    return "unknown" if "unknown" in names else " ".join(names)


def licence_of(metadata: Any) -> str:
    """One expression from package metadata: its expression, its classifiers, or its short text.

    >>> licence_of(email.message_from_string("License: Apache 2.0 License"))
    'Apache-2.0'
    """
    if metadata.get("License-Expression"):
        return metadata["License-Expression"]
    texts = [c for c in metadata.get_all("Classifier") or [] if c.startswith("License ::")]
    if not texts:
        return free_text(metadata.get("License") or "")
    found = dict.fromkeys(licence_named(text.rpartition(" :: ")[2]) for text in texts)
    return " AND ".join(found)


def permissive(expression: str | None) -> bool:
    """Every part joined by AND must offer a permissive choice; ignoring brackets only refuses more.

    >>> permissive("Apache-2.0 OR GPL-3.0"), permissive("MPL-2.0 AND MIT"), permissive("unknown")
    (True, False, False)
    """
    plain = re.sub(r"[()]| with [\w.-]*exception[\w.-]*", " ", (expression or "unknown").lower())
    return all(any(name.strip() in PERMISSIVE for name in part.split(" or "))
               for part in plain.split(" and "))


@functools.cache
def opted_out() -> list[str]:
    """The patterns of `opt_out.txt`: packages or paths whose owners asked to be left out."""
    lines = (Path(__file__).parent / "opt_out.txt").read_text(encoding="utf-8").splitlines()
    return [line.split("#")[0].strip() for line in lines if line.split("#")[0].strip()]


def blob_id(data: bytes) -> str:
    """The name that Git and GitHub give to a content.

    >>> blob_id(b"")
    'e69de29bb2d1d6434b8b29ae775ad8c2e48c5391'
    """
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def read_file(path: Path) -> tuple[bytes, str]:
    """The bytes of a file, and why they are of no use if they are not. It never raises."""
    try:
        before = path.stat()
        if before.st_size > MOST_BYTES or not path.is_file():
            return b"", "too large to read" if path.is_file() else "not a plain file"
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
    try:
        data.decode()
    except UnicodeDecodeError:
        return data, "" if b"\0" in data else "not UTF-8"
    return data, ""
