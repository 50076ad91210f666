"""Memory readings: they see what a process takes, and do not see what the system may drop."""
from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from utils import memory
from utils.common import CourseError

MB = 1_000_000
linux = pytest.mark.skipif(memory.measure() != "RssAnon", reason="RssAnon is Linux's")


def hold(size: int) -> int:
    import time

    held = bytearray(size)
    time.sleep(0.1)
    return len(held)


def hold_for_a_moment(size: int) -> int:
    import time

    held = bytearray(size)
    time.sleep(0.1)
    del held
    time.sleep(0.1)
    return 0


def map_and_touch(path: str) -> list[int]:
    import mmap
    import time

    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        touched = len(data[::4096])
        time.sleep(0.1)
        return [len(data), touched]


def use_a_name_from_outside() -> int:
    return MB


def sleep_long(path: str) -> None:
    import os
    import time

    with open(path, "w") as file:
        file.write(str(os.getpid()))
    time.sleep(60)


def test_the_peak_is_what_the_function_took():
    base = memory.run_fresh(hold, 0)
    large = memory.run_fresh(hold, 64 * MB)
    assert large.result == 64 * MB
    assert 60 * MB < large.private - base.private < 80 * MB
    assert large.resident >= large.private
    assert large.readings > 5


def test_memory_given_back_still_counts_in_the_peak():
    base = memory.run_fresh(hold, 0).private
    assert memory.run_fresh(hold_for_a_moment, 64 * MB).private - base > 60 * MB


@linux
def test_mapped_pages_are_resident_but_not_private(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(64 * MB))
    base, mapped = memory.run_fresh(hold, 0), memory.run_fresh(map_and_touch, str(path))
    assert mapped.result == [64 * MB, 64 * MB // 4096]
    assert mapped.private - base.private < 8 * MB
    assert mapped.resident - base.resident > 50 * MB


def test_the_childs_memory_is_not_ours():
    ballast = bytearray(128 * MB)
    assert memory.run_fresh(hold, 0).private < len(ballast)


def test_a_failure_names_the_function_and_the_reason():
    with pytest.raises(CourseError, match="use_a_name_from_outside failed .*'MB' is not defined"):
        memory.run_fresh(use_a_name_from_outside)


def test_an_interrupt_leaves_no_process_behind(tmp_path, monkeypatch):
    path = tmp_path / "pid"

    def interrupt(pid: int) -> dict[str, int]:
        if path.exists() and path.read_text():
            raise KeyboardInterrupt
        return {"private": 0, "resident": 0}

    monkeypatch.setattr(memory, "memory_of", interrupt)
    with pytest.raises(KeyboardInterrupt):
        memory.run_fresh(sleep_long, str(path))
    assert not psutil.pid_exists(int(path.read_text()))


def test_a_process_that_ended_is_not_read_as_empty():
    child = subprocess.Popen([sys.executable, "-c", ""])
    deadline = time.monotonic() + 30
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    try:
        with pytest.raises((OSError, psutil.Error)):
            memory.memory_of(child.pid)
    finally:
        child.wait()


@linux
def test_the_parts_make_the_whole():
    found = memory.memory_of()
    assert found["private"] + found["mapped"] == found["resident"]


def test_systems_without_rssanon_say_what_they_count(monkeypatch):
    monkeypatch.setattr(memory, "measure", lambda: "RSS, mapped files included")
    found = memory.memory_of()
    assert found["resident"] >= found["private"] > 0
    assert found["mapped"] == found["resident"] - found["private"]
