"""A piece of work under a container's memory limit: what it is charged for, and whether it lives.

A container is, as far as memory goes, a Linux control group (cgroup) with a limit. Whoever may make
a group below his own, which is usually root, can try what a limit counts:

    if cannot_contain() == "":
        run_contained(work, argument, limit=200_000_000, files=[path])
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path("/sys/fs/cgroup")
PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
{source}
{name}(*json.loads(sys.argv[2]))
"""
# The shell enters the group, whose list of processes is $0, and becomes the command after it.
ENTER = 'echo $$ > "$0" && exec "$@"'


@dataclass(frozen=True)
class Names:
    """What one version of the kernel's interface calls its files and counters."""

    limit: str
    peak: str
    files: str
    kills: str
    swap: str


OLD = Names(
    "memory.limit_in_bytes",
    "memory.max_usage_in_bytes",
    "cache",
    "memory.oom_control",
    "memory.memsw.limit_in_bytes",
)
NEW = Names(
    "memory.max",
    "memory.peak",
    "file",
    "memory.events",
    "memory.swap.max",
)


@dataclass(frozen=True)
class Charges:
    """What a group was charged for: the most at any time, and for pages of files at the end."""

    peak: int
    files: int
    killed: bool


def own_group() -> tuple[Path, Names]:
    """The group of this process, in the old interface (version 1) or the new one.

    >>> own_group()                                                # doctest: +SKIP
    (PosixPath('/sys/fs/cgroup'), Names(limit='memory.max', peak='memory.peak', ...))
    """
    for line in Path("/proc/self/cgroup").read_text("utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            return ROOT / "memory" / path.lstrip("/"), OLD
    return ROOT, NEW


@contextlib.contextmanager
def group(limit: int) -> Iterator[tuple[Path, Names]]:
    """A new group below our own, which may have `limit` bytes of memory and no swap."""
    parent, names = own_group()
    if names is NEW:
        (parent / "cgroup.subtree_control").write_text("+memory", encoding="ascii")
    folder = parent / f"course-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    try:
        (folder / names.limit).write_text(str(limit), encoding="ascii")
        # The old interface limits memory and swap together, the new one swap alone.
        together = limit if names is OLD else 0
        # There is no such file where swap is not counted.
        with contextlib.suppress(OSError):
            (folder / names.swap).write_text(str(together), encoding="ascii")
        yield folder, names
    finally:
        folder.rmdir()


def cannot_contain() -> str:
    """Why no group can be made here; nothing where one can."""
    if sys.platform != "linux":
        return "control groups are a thing of Linux"
    try:
        with group(1 << 30):
            return ""
    except (OSError, ValueError) as error:
        return f"no memory cgroup can be made here ({type(error).__name__})"


def run_contained(
    work: Callable, *arguments: Any, limit: int, files: Iterable[str] = ()
) -> Charges:
    """Run `work(*arguments)` in a fresh Python in a group of its own, and read its charges.

    A page is charged to the group that brings it in, so the `files` leave the page cache first.
    """
    source = textwrap.dedent(inspect.getsource(work))
    program = PROGRAM.format(source=source, name=work.__name__)
    python = [
        sys.executable,
        "-c",
        program,
        json.dumps(sys.path),
        json.dumps(arguments),
    ]
    for path in files:
        forget(path)
    with group(limit) as (folder, names):
        entry = ["sh", "-c", ENTER, str(folder / "cgroup.procs")]
        done = subprocess.run(entry + python, capture_output=True, check=False)
        counters = read_counters(folder / "memory.stat")
        kills = read_counters(folder / names.kills)["oom_kill"]
        peak = int((folder / names.peak).read_text("utf-8"))
    if done.returncode and not kills:
        raise RuntimeError(done.stderr.decode(errors="replace"))
    return Charges(peak, counters[names.files], bool(kills))


def forget(path: str) -> None:
    """Write what is still to be written of a file, and drop its pages from the page cache."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    # Groups are Linux's, so no other system comes here; a type checker cannot know.
    if sys.platform == "linux":
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def read_counters(path: Path) -> dict[str, int]:
    """Lines of a name and a number: "cache 4096" -> {"cache": 4096}."""
    counters = {}
    for line in path.read_text("utf-8").splitlines():
        name, number = line.split()
        counters[name] = int(number)
    return counters
