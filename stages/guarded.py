"""Processes that end with the one that started them, however that one ends.

    server = Guarded(["transformers", "serve", folder])     ...     server.stop()

Between a process and its child stands a guard that holds the end of a pipe. When the process stops it,
fails, or is killed, the pipe closes, and the guard ends the child with everything it has started.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from utils.errors import ROOT, CourseError


class Guarded:
    """A command that runs beside this process and no longer than it."""

    def __init__(self, command: list[str], **environment: str) -> None:
        self.journal = tempfile.NamedTemporaryFile(suffix=".log")  # noqa: SIM115
        guard = [sys.executable, "-m", "stages.guarded", *command]
        names = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        self.process = subprocess.Popen(
            guard,
            stdin=subprocess.PIPE,
            stdout=self.journal,
            stderr=self.journal,
            env=names,
        )

    def __enter__(self) -> Guarded:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End it and all that it has started, and wait until they are gone."""
        if self.process.stdin and not self.process.stdin.closed:
            self.process.stdin.close()
        self.process.wait(timeout=60)
        self.journal.close()

    def family(self) -> list[psutil.Process]:
        """The guard, the command, and what it has started."""
        guard = psutil.Process(self.process.pid)
        return [guard, *guard.children(recursive=True)]

    def journal_text(self) -> str:
        """What it has printed."""
        return Path(self.journal.name).read_text(encoding="utf-8", errors="replace")

    def wait_for(self, url: str, seconds: float = 180) -> str:
        """Return the address when something answers there; an error if the command ends before."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            if answers(url):
                return url
            time.sleep(0.2)
        last = self.journal_text().splitlines()[-12:]
        self.stop()
        raise CourseError("the server did not come up", fix="\n".join(last))


def free_port() -> int:
    """A port that nobody listens on now.

    >>> 1024 < free_port() < 65536
    True
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def answers(url: str) -> bool:
    """Whether a server answers, with whatever status."""
    try:
        with urllib.request.urlopen(url + "/health", timeout=2):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


def end(process: psutil.Process) -> None:
    """End a process and all that it has started: gently, its children after it, then not gently."""
    try:
        children = process.children(recursive=True)
        process.terminate()
    except psutil.NoSuchProcess:
        return
    # A server lets its workers finish.
    psutil.wait_procs([process, *children], timeout=10)
    for how in ("terminate", "kill"):
        left = [one for one in [process, *children] if one.is_running()]
        for one in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                getattr(one, how)()
        psutil.wait_procs(left, timeout=5)


def guard(command: list[str]) -> int:
    """Run a command until it ends, or until nobody holds the other end of our input."""
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL}
    child = subprocess.Popen(command, **options)
    told = threading.Event()
    ender = threading.Thread(target=end_when_told, args=(child, told), daemon=True)
    ender.start()
    code = child.wait()
    if told.is_set():
        # What the command has started may need longer than the command.
        ender.join()
    return code


def end_when_told(child: subprocess.Popen[bytes], told: threading.Event) -> None:
    """Read until the pipe closes; nobody ever writes into it."""
    sys.stdin.buffer.read()
    told.set()
    end(psutil.Process(child.pid))


if __name__ == "__main__":
    sys.exit(guard(sys.argv[1:]))
