"""Folders that are complete or absent, and that notice when a byte of theirs changes.

A sealed folder holds its files and `manifest.json`: what made it, and each file's SHA-256. It is
written beside its place and renamed into it, so a killed process leaves the old one or the new one.
Files are hashed once, when they are sealed. Later a file whose size and time are as they were is
taken as unchanged, since hashing a hundred gigabytes takes minutes; `COURSE_VERIFY=1` hashes all.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock

from utils.errors import CourseError

MANIFEST = "manifest.json"
FULL = (errno.ENOSPC, errno.EDQUOT)
CLOSED = (errno.EACCES, errno.EPERM, errno.ENOTDIR)
WAYS_OUT = "point COURSE_BUILD and COURSE_HOME elsewhere"
BROKEN: dict[str, Any] = {"files": {}, "settings": {}, "inputs": {}, "bytes": 0, "hash": "", "seal": "broken"}


def hash_file(path: Path) -> str:
    """The SHA-256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def list_files(folder: Path) -> dict[str, Path]:
    """Every file below a folder by its relative name, sorted; not the folder's own manifest."""
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    paths.pop(MANIFEST, None)
    return dict(sorted(paths.items()))


def hash_json(value: Any) -> str:
    """A short content hash of anything JSON can say.

    >>> hash_json({"b": 1, "a": 2}) == hash_json({"a": 2, "b": 1})
    True
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# disks --------------------------------------------------------------------------------------------


def disk_error_number(error: BaseException) -> int | None:
    """The system's number of a disk error, also of one that a library written in Rust has wrapped.

    >>> disk_error_number(RuntimeError("No space left on device (os error 28)"))
    28
    """
    if isinstance(error, OSError):
        return error.errno
    wrapped = re.search(r"\(os error (\d+)\)", str(error))
    return int(wrapped[1]) if wrapped else None


@contextlib.contextmanager
def plain_disk_errors(folder: Path) -> Iterator[None]:
    """Turn a disk that is full or closed into a message with a way out; other errors pass unchanged."""
    try:
        yield
    except Exception as error:
        number = disk_error_number(error)
        if number in FULL:
            raise CourseError("the disk is full", folder, f"free some space, or {WAYS_OUT}") from error
        named = getattr(error, "filename", None)
        ours = named is not None and (Path(named).is_relative_to(folder) or folder.is_relative_to(named))
        if number == errno.EROFS or (number in CLOSED and ours):
            what = f"cannot write here: {os.strerror(number)}"
            raise CourseError(what, folder, f"make it writable, or {WAYS_OUT}") from error
        raise


# sealed folders -----------------------------------------------------------------------------------


@contextlib.contextmanager
def sealed(target: Path, facts: dict[str, Any]) -> Iterator[Path]:
    """Yield an empty folder beside `target`; when the block ends well, seal it and move it there.

    Each writer has a folder of its own, so two writers of one artifact do not meet; the last wins.
    """
    with plain_disk_errors(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        _clear_leftovers(target)
        prefix = f".{target.name}.new-{socket.gethostname()}-{os.getpid()}-"
        aside = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
        aside.chmod(0o755)
        try:
            yield aside
            _seal(aside, facts)
            with FileLock(_lock_of(target)):
                old = target.with_name(f".{target.name}.old")
                if target.exists():
                    shutil.rmtree(old, ignore_errors=True)
                    target.rename(old)
                aside.rename(target)
                _sync_folder(target.parent)
                shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def _lock_of(target: Path) -> Path:
    return target.with_name(f".{target.name}.lock")


def _clear_leftovers(target: Path) -> None:
    """Remove what killed writers of this machine left behind."""
    import psutil

    for path in target.parent.glob(f".{target.name}.new-{socket.gethostname()}-*"):
        owner = re.search(r"-(\d+)-[^-]*$", path.name)
        if owner and not psutil.pid_exists(int(owner[1])):
            shutil.rmtree(path, ignore_errors=True)


def _seal(folder: Path, facts: dict[str, Any]) -> None:
    """Bring every file to the disk, then write the manifest: a power cut finds all or nothing."""
    hashes, stats = {}, {}
    for name, path in list_files(folder).items():
        with path.open("rb+") as file:
            os.fsync(file.fileno())
        hashes[name] = hash_file(path)
        stats[name] = _stat(path)
    size = sum(stat[0] for stat in stats.values())
    manifest = {**facts, "files": hashes, "stats": stats, "bytes": size, "hash": hash_json(hashes)}
    write_json(folder / MANIFEST, {**manifest, "seal": hash_json(manifest)})


def _stat(path: Path) -> list[int]:
    known = path.stat()
    return [known.st_size, known.st_mtime_ns]


def _sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk, where the system can."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a sealed folder, or None where there is no complete one."""
    old = folder.with_name(f".{folder.name}.old")
    if not folder.exists() and old.exists():  # a writer was killed between its two renames
        with FileLock(_lock_of(folder)):
            if not folder.exists() and old.exists():
                old.rename(folder)
    try:
        manifest = read_json(folder / MANIFEST)
    except ValueError:  # not JSON: damaged, like any other file
        return BROKEN
    return manifest if manifest is None or isinstance(manifest, dict) else BROKEN


def damage(folder: Path, manifest: dict[str, Any], full: bool | None = None) -> str:
    """The first thing that differs from the manifest, in words; nothing when all is as sealed."""
    content = {key: value for key, value in manifest.items() if key != "seal"}
    if hash_json(content) != manifest.get("seal"):
        return f"{MANIFEST} has changed"
    full = bool(os.environ.get("COURSE_VERIFY")) if full is None else full
    paths = list_files(folder)
    hashes = manifest["files"]
    stats = manifest.get("stats", {})
    for name in sorted(paths | hashes):
        if name not in paths:
            return f"{name} has gone"
        if name not in hashes:
            return f"{name} has come"
        if not full and _stat(paths[name]) == stats.get(name):
            continue
        today = hash_file(paths[name])
        if today != hashes[name]:
            return f"{name} has changed (SHA-256 {today[:12]}, not {hashes[name][:12]})"
    return ""


# JSON -----------------------------------------------------------------------------------------------


def write_json(path: Path, value: Any) -> None:
    """Write JSON aside, bring it to the disk, and rename it over the old file."""
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
