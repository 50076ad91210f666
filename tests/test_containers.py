"""A limit that the kernel keeps, and what it counts."""

import os
import shutil
import subprocess

import pytest

from stages import containers

SIZE = 120_000_000


def read(path: str, how: str) -> None:
    """Use a file; this runs in a process of its own."""
    held = []
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            if how == "hold":
                held.append(part)


@pytest.fixture
def large_file(tmp_path):
    """A file of random bytes that the disk holds, not only the page cache."""
    if why := containers.cannot_contain():
        pytest.skip(why)
    path = tmp_path / "large.bin"
    path.write_bytes(os.urandom(SIZE))
    return str(path)


def bytes_in_page_cache(path: str) -> int:
    """What the page cache holds of a file, by a tool of util-linux."""
    command = ["fincore", "--bytes", "--noheadings", "--output=RES", path]
    return int(subprocess.check_output(command))


@pytest.mark.skipif(shutil.which("fincore") is None, reason="there is no fincore")
def test_a_file_that_is_forgotten_leaves_the_page_cache(large_file):
    assert bytes_in_page_cache(large_file) > 0
    containers.forget(large_file)
    assert bytes_in_page_cache(large_file) == 0


def test_files_that_are_only_read_are_charged_but_never_kill(large_file):
    ample = containers.run_contained(
        read, large_file, "drop", limit=4 * SIZE, files=[large_file]
    )
    tight = containers.run_contained(
        read, large_file, "drop", limit=SIZE // 2, files=[large_file]
    )
    assert ample.files > 0.9 * SIZE
    assert not tight.killed
    assert tight.peak <= SIZE // 2


def test_private_memory_above_the_limit_kills(large_file):
    held = containers.run_contained(
        read, large_file, "hold", limit=SIZE // 2, files=[large_file]
    )
    assert held.killed


def test_an_error_in_the_work_is_not_taken_for_a_kill(large_file):
    with pytest.raises(RuntimeError, match="FileNotFoundError"):
        containers.run_contained(read, "nowhere.bin", "drop", limit=4 * SIZE)


def test_no_group_is_left_behind(large_file):
    containers.run_contained(read, large_file, "drop", limit=4 * SIZE)
    parent, _ = containers.own_group()
    assert not list(parent.glob("course-*"))


@pytest.mark.parametrize(
    ("lines", "place", "names"),
    [
        ("4:memory:/box\n0::/\n", "memory/box", containers.OLD),
        ("0::/\n", "", containers.NEW),
    ],
)
def test_both_interfaces_of_the_kernel_are_found(
    lines, place, names, tmp_path, monkeypatch
):
    monkeypatch.setattr(containers.Path, "read_text", lambda path, encoding: lines)
    assert containers.own_group() == (containers.ROOT / place, names)


def test_where_no_group_can_be_made_the_reason_is_said(monkeypatch):
    def refuse(path, *rest, **options):
        raise PermissionError(path)

    monkeypatch.setattr(containers.Path, "mkdir", refuse)
    monkeypatch.setattr(containers.Path, "write_text", refuse)
    assert containers.cannot_contain()


def test_a_group_has_no_swap():
    """What does not fit must not move to a disk, or the limit would seem to hold more than it does."""
    if why := containers.cannot_contain():
        pytest.skip(why)
    with containers.group(1 << 28) as (folder, names):
        path = folder / names.swap
        if not path.exists():
            pytest.skip("swap is not counted here")
        together = 1 << 28 if names is containers.OLD else 0
        assert int(path.read_text("utf-8")) == together
