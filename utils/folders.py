"""Floor 1: folders that are complete or absent, and that notice when a byte of theirs changes.

A sealed folder holds its files and `manifest.json`: what made it, and each file's SHA-256. It is
written beside its place and renamed into it, so a killed process leaves the old one or none.
"""
from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from utils.common import CourseError

MANIFEST = "manifest.json"
FULL = (errno.ENOSPC, errno.EDQUOT)
CLOSED = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)


def hash_file(path: Path) -> str:
    """The SHA-256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_files(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file below a folder, by its relative name, sorted."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    return {p.relative_to(folder).as_posix(): hash_file(p) for p in files}


def hash_json(value: Any) -> str:
    """A short content hash of anything JSON can say.

    >>> hash_json({"b": 1, "a": 2}) == hash_json({"a": 2, "b": 1})
    True
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextlib.contextmanager
def plain_disk_errors(folder: Path) -> Iterator[None]:
    """Turn the system's disk errors into a message with a way out."""
    try:
        yield
    except OSError as error:
        ways = "point COURSE_BUILD and COURSE_HOME elsewhere"
        if error.errno in FULL:
            raise CourseError("the disk is full", folder, f"free some space, or {ways}") from error
        ours = error.filename is None or Path(error.filename).is_relative_to(folder)
        if error.errno in CLOSED and (ours or folder.is_relative_to(error.filename)):
            what = f"cannot write here: {error.strerror}"
            raise CourseError(what, folder, f"make it writable, or {ways}") from error
        raise


@contextlib.contextmanager
def sealed(target: Path, facts: dict[str, Any]) -> Iterator[Path]:
    """Yield an empty folder beside `target`; when the block ends well, seal it and move it there."""
    aside, old = (target.with_name(f".{target.name}.{kind}") for kind in ("new", "old"))
    with plain_disk_errors(target.parent):
        aside.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)  # what a killed process left
        aside.mkdir()
        try:
            yield aside
            files = hash_files(aside)
            for name in files:  # on the disk before the name is: a power cut leaves the old or the new
                with (aside / name).open("rb+") as file:
                    os.fsync(file.fileno())
            size = sum((aside / name).stat().st_size for name in files)
            manifest = {**facts, "files": files, "bytes": size, "hash": hash_json(files)}
            write_json(aside / MANIFEST, {**manifest, "seal": hash_json(manifest)})
            shutil.rmtree(old, ignore_errors=True)
            if target.exists():
                target.rename(old)
            aside.rename(target)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    """Write JSON aside, sync it, and rename it over the old file."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    with aside.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def read_json(path: Path) -> Any:
    """What a JSON file holds, or None where there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a sealed folder, or None where there is no complete one."""
    try:
        return read_json(folder / MANIFEST)
    except ValueError:  # not JSON: damaged, like any other file
        return {"files": {}, "settings": {}, "inputs": {}, "bytes": 0, "hash": "", "seal": "broken"}


def damage(folder: Path, manifest: dict[str, Any]) -> str:
    """The first thing that differs from the manifest, in words; nothing when all is as sealed."""
    if hash_json({k: v for k, v in manifest.items() if k != "seal"}) != manifest.get("seal"):
        return f"{MANIFEST} has changed"
    found, sealed_as = hash_files(folder), manifest["files"]
    for name in sorted(found | sealed_as):
        if found.get(name) != sealed_as.get(name):
            return f"{name} has " + ("gone" if name not in found else "come" if name not in sealed_as
                                     else f"changed (SHA-256 {found[name][:12]}, not {sealed_as[name][:12]})")
    return ""
