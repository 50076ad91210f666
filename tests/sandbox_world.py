"""What a hostile program could reach if its cage had a hole, and whether it did."""

from __future__ import annotations

import os
import re
import select
import shutil
import socket
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hostile import Hostile

from stages.sandbox import Verdict
from utils.errors import ROOT

# Not /tmp, which every cage has one of its own of.
PLACE = "/var/tmp"


class World:
    """A home with a secret, a folder that anybody may write, sockets that listen."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = f"mark-{uuid.uuid4().hex}"
        self.secret = uuid.uuid4().hex
        folder.chmod(0o777)
        (folder / "secret.txt").write_text(self.secret)
        self.listeners = list(self.listen())
        self.before = self.facts()

    def listen(self) -> Iterator[socket.socket]:
        """A connection, a datagram, a local name and a local path."""
        connections = socket.create_server(("127.0.0.1", 0))
        self.port = connections.getsockname()[1]
        datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        datagrams.bind(("127.0.0.1", self.port))
        path = str(self.folder / "socket")
        for address in (f"\0{self.mark}", path):
            local = socket.socket(socket.AF_UNIX)
            local.bind(address)
            local.listen()
            yield local
        os.chmod(path, 0o777)
        yield connections
        yield datagrams

    def places(self) -> dict[str, str]:
        """What stands for the marks of a program."""
        return {
            "HOME": str(self.folder),
            "OUTSIDE": str(self.folder),
            "ROOT": str(ROOT),
            "PORT": str(self.port),
            "PID": str(os.getpid()),
            "MARK": self.mark,
        }

    def facts(self) -> dict[str, object]:
        """What no program may change."""
        return {
            "files": sorted(os.listdir(self.folder)),
            "secret": (self.folder / "secret.txt").read_text(),
            "mounts": Path("/proc/self/mountinfo").read_text(),
            "marked": sorted(self.marked()),
        }

    def marked(self) -> Iterator[str]:
        """Files with the mark in their names, where anybody may write."""
        for folder in ("/", "/tmp", "/var/tmp", "/dev/shm", "."):
            with suppress(OSError):
                names = os.listdir(folder)
                yield from (name for name in names if self.mark in name)

    def check(self, hostile: Hostile, verdict: Verdict) -> None:
        """No escape, no forged verdict, nothing left."""
        what = f"{hostile.name}: {verdict}"
        assert not verdict.passed and verdict.outcome in hostile.outcome, what
        assert "ESCAPED" not in verdict.output, what
        assert self.secret not in verdict.output, what
        if hostile.stopped and verdict.outcome != "timeout":
            assert re.search(
                rf"stopped by .*({hostile.stopped})", verdict.output
            ), what
        assert self.facts() == self.before, what
        for listener in self.listeners:
            assert not was_reached(listener), what

    def close(self) -> None:
        """Let go of the sockets."""
        for listener in self.listeners:
            listener.close()


def was_reached(listener: socket.socket) -> bool:
    """Whether somebody has connected, or sent something."""
    return bool(select.select([listener], [], [], 0)[0])


def descendants(pid: int) -> set[int]:
    """All processes below one, by the process table."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError, IndexError):
                text = Path(f"/proc/{name}/stat").read_text()
                parents[int(name)] = int(text.rpartition(")")[2].split()[1])
    found = {pid}
    while True:
        more = {child for child, parent in parents.items() if parent in found}
        if more <= found:
            return found - {pid}
        found |= more


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"


@contextmanager
def new_world() -> Iterator[World]:
    folder = Path(tempfile.mkdtemp(dir=PLACE))
    world = World(folder)
    try:
        yield world
    finally:
        world.close()
        shutil.rmtree(folder)
