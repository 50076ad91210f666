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
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock

from utils.errors import CourseError

Facts = dict[str, Any]
MANIFEST = "manifest.json"
BROKEN: Facts = {"files": {}, "settings": {}, "inputs": {}, "bytes": 0, "hash": ""}
FULL = (errno.ENOSPC, errno.EDQUOT)
CLOSED = (errno.EACCES, errno.EPERM, errno.ENOTDIR)
# Windows renames nothing that a program has open, and its virus scanner opens whatever is new.
WINDOWS = sys.platform == "win32"
PATIENCE_SECONDS = 5


def hash_file(path: Path) -> str:
    """The SHA-256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_json(value: Any) -> str:
    """A short content hash of anything JSON can say.

    >>> hash_json({"b": 1, "a": 2}) == hash_json({"a": 2, "b": 1})
    True
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextlib.contextmanager
def plain_disk_errors(folder: Path) -> Iterator[None]:
    """Turn a disk that is full or closed into a message with a way out; other errors pass unchanged.

    Libraries written in Rust wrap the system's error, "No space left on device (os error 28)".
    """
    ways = "point COURSE_BUILD and COURSE_HOME elsewhere"
    try:
        yield
    except Exception as error:
        wrapped = re.search(r"\(os error (\d+)\)", str(error))
        number = int(wrapped[1]) if wrapped else getattr(error, "errno", None)
        named = Path(getattr(error, "filename", None) or "elsewhere")
        ours = named.is_relative_to(folder)
        ours = ours or folder.is_relative_to(named)
        if number in FULL:
            fix = f"free some space, or {ways}"
            raise CourseError("the disk is full", folder, fix) from error
        if number == errno.EROFS or (number in CLOSED and ours):
            what = f"cannot write here: {os.strerror(number)}"
            fix = f"make it writable, or {ways}"
            raise CourseError(what, folder, fix) from error
        raise


@contextlib.contextmanager
def sealed(target: Path, facts: Facts) -> Iterator[Path]:
    """Yield an empty folder beside `target`; when the block ends well, seal it and move it there.

    Each writer has a folder of its own, so two writers of one artifact do not meet; the last wins.
    """
    with plain_disk_errors(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = _new_folder(target)
        try:
            yield aside
            _seal(aside, facts)
            _swap(aside, target)
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def _new_folder(target: Path) -> Path:
    """A folder of this process beside the target; what killed writers of this machine left goes."""
    import psutil

    host = socket.gethostname()
    mine = f".{target.name}.new-{host}-"
    for path in target.parent.glob(f"{mine}*"):
        rest = path.name.removeprefix(mine)
        number, _, _ = rest.partition("-")
        try:
            dead = psutil.Process(int(number)).status() == psutil.STATUS_ZOMBIE
        except psutil.Error as error:
            # Of a process of somebody else's we learn no more than that it lives.
            dead = isinstance(error, psutil.NoSuchProcess)
        if dead:
            shutil.rmtree(path, ignore_errors=True)
    me = os.getpid()
    mine = f"{mine}{me}-"
    folder = Path(tempfile.mkdtemp(prefix=mine, dir=target.parent))
    folder.chmod(0o755)
    return folder


def _seal(folder: Path, facts: Facts) -> None:
    """Bring every file to the disk, then write the manifest: a power cut finds all or nothing."""
    hashes = {}
    stats = {}
    for name, path in list_files(folder).items():
        with path.open("rb+") as file:
            os.fsync(file.fileno())
        hashes[name] = hash_file(path)
        stats[name] = [path.stat().st_size, path.stat().st_mtime_ns]
    manifest = {**facts, "files": hashes, "stats": stats, "hash": hash_json(hashes)}
    manifest["bytes"] = sum(size for size, _ in stats.values())
    manifest["seal"] = hash_json(manifest)
    write_json(folder / MANIFEST, manifest)


def _swap(aside: Path, target: Path) -> None:
    """Put a sealed folder in its place. Between the two renames the old one is found by `read_manifest`."""
    old = target.with_name(f".{target.name}.old")
    lock = target.with_name(f".{target.name}.lock")
    with FileLock(lock):
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
            move(target, old)
        move(aside, target)
        if not WINDOWS:  # the names, too, must reach the disk
            descriptor = os.open(target.parent, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        shutil.rmtree(old, ignore_errors=True)


def move(source: Path, target: Path) -> None:
    """Rename over what is there. On Windows, wait a little for whoever has one of the files open."""
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            os.replace(source, target)
            return
        except PermissionError as error:
            if not WINDOWS:
                raise
            if time.monotonic() > end:
                what = "another program has files here open, so Windows cannot replace them"
                fix = "shut down the notebook that uses it (Kernel, Shut Down), and try again"
                raise CourseError(what, target, fix) from error
        time.sleep(0.05)


def list_files(folder: Path) -> dict[str, Path]:
    """Every file below a folder by its relative name, sorted; not the folder's own manifest."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path != folder / MANIFEST:
            inside = path.relative_to(folder)
            files[inside.as_posix()] = path
    return files


def is_bytecode(path: Path) -> bool:
    """Whether Python wrote the file itself, beside a module that was imported from a folder.

    >>> is_bytecode(Path("judge/__pycache__/score.cpython-313.pyc"))
    True
    """
    return path.parent.name == "__pycache__" and path.suffix == ".pyc"


def read_manifest(folder: Path) -> Facts | None:
    """The manifest of a sealed folder, or None where there is no complete one."""
    old = folder.with_name(f".{folder.name}.old")
    # A writer may have been killed between its two renames.
    if old.exists() and not folder.exists():
        lock = folder.with_name(f".{folder.name}.lock")
        with FileLock(lock):
            if old.exists() and not folder.exists():
                move(old, folder)
    try:
        manifest = read_json(folder / MANIFEST)
    except ValueError:
        # Not JSON: damaged, like any other file.
        return BROKEN
    if isinstance(manifest, dict | None):
        return manifest
    return BROKEN


def staleness(manifest: Facts, place: Callable[[str], Path]) -> str:
    """Which input of an artifact, or of its inputs, is another one today; nothing if none is."""
    for source, made_from in manifest["inputs"].items():
        current = read_manifest(place(source))
        if current is None or current["hash"] != made_from:
            return f"was made from another {source!r} than today's"
        older = staleness(current, place)
        if older:
            return f"was made from {source!r}, which {older}"
    return ""


def damage(folder: Path, manifest: Facts, full: bool = False) -> str:
    """The first thing that differs from the manifest, in words; nothing when all is as sealed."""
    content = {key: value for key, value in manifest.items() if key != "seal"}
    if hash_json(content) != manifest.get("seal"):
        return f"{MANIFEST} has changed"
    full = full or "COURSE_VERIFY" in os.environ
    files = list_files(folder)
    hashes, stats = manifest["files"], manifest.get("stats", {})
    for name in sorted(files | hashes):
        if name not in files:
            return f"{name} has gone"
        if name not in hashes:
            if is_bytecode(files[name]):
                continue
            return f"{name} has come"
        stat = files[name].stat()
        if not full and stats.get(name) == [stat.st_size, stat.st_mtime_ns]:
            continue
        today = hash_file(files[name])
        if today != hashes[name]:
            return f"{name} has changed (SHA-256 {today[:12]}, not {hashes[name][:12]})"
    return ""


def write_json(path: Path, value: Any) -> None:
    """Write JSON aside, bring it to the disk, and rename it over the old file."""
    name = f".{path.name}.{os.getpid()}.part"
    aside = path.with_name(name)
    with aside.open("w", encoding="utf-8", newline="\n") as file:
        json.dump(value, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    move(aside, path)


def read_json(path: Path) -> Any:
    """What a JSON file holds, or None where there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
