"""Ends every process of a run when the runner is gone, however it went.

The runner gives each kernel a token in its environment, which all descendants inherit, and holds
a pipe to this process. When the pipe closes, whoever still carries the token is killed.
"""
from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import psutil

TOKEN = "COURSE_RUN"


def carriers(token: str) -> Iterator[psutil.Process]:
    """The live processes that carry the token."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(TOKEN) == token and process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except (psutil.Error, OSError):
            continue


def end_all(token: str, seconds: float = 4) -> int:
    """Kill every carrier, and what they start meanwhile; how many there were."""
    ended: set[int] = set()
    deadline = time.monotonic() + seconds
    while (found := list(carriers(token))) and time.monotonic() < deadline:
        for process in found:
            ended.add(process.pid)
            try:
                process.kill()
            except psutil.Error:
                continue
        time.sleep(0.05)
    return len(ended)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    end_all(sys.argv[1])
