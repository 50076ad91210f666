"""Sealed folders: complete or absent, and damage is noticed."""

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from utils import artifacts
from utils.errors import CourseError


def fill(folder):
    (folder / "sub").mkdir()
    (folder / "a.txt").write_text("alpha")
    (folder / "sub/b.txt").write_text("beta")


@pytest.fixture
def sealed(tmp_path):
    with artifacts.sealed(tmp_path / "thing", {"name": "thing"}) as folder:
        fill(folder)
    return tmp_path / "thing"


def test_a_sealed_folder_knows_its_files(sealed):
    manifest = artifacts.read_manifest(sealed)
    assert (
        set(manifest["files"]) == {"a.txt", "sub/b.txt"} and manifest["bytes"] == 9
    )
    assert artifacts.damage(sealed, manifest) == ""


def test_one_flipped_byte_is_noticed(sealed):
    (sealed / "a.txt").write_text("alphA")
    assert "a.txt has changed" in artifacts.damage(
        sealed, artifacts.read_manifest(sealed)
    )


def test_a_missing_and_an_added_file_are_noticed(sealed):
    manifest = artifacts.read_manifest(sealed)
    (sealed / "c.txt").write_text("")
    assert artifacts.damage(sealed, manifest) == "c.txt has come"
    (sealed / "a.txt").unlink()
    assert artifacts.damage(sealed, manifest) == "a.txt has gone"


def test_the_bytecode_of_a_module_that_was_imported_is_no_damage(tmp_path):
    folder = tmp_path / "judge"
    with artifacts.sealed(folder, {"name": "judge"}) as place:
        (place / "score.py").write_text("POINTS = 3\n")
    quiet = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    subprocess.run(
        [sys.executable, "-c", "import score"], cwd=folder, env=quiet, check=True
    )
    manifest = artifacts.read_manifest(folder)
    [written] = (folder / "__pycache__").iterdir()
    assert artifacts.damage(folder, manifest) == ""
    written.with_suffix(".py").write_text("")
    assert "has come" in artifacts.damage(folder, manifest)


def test_what_gets_its_name_has_reached_the_disk_before(tmp_path, monkeypatch):
    sync, move = os.fsync, artifacts.move
    synced, named = set(), set()

    def note_sync(number):
        synced.add(os.fstat(number).st_ino)
        sync(number)

    def note_move(source, target):
        files = [source, *source.rglob("*")] if source.is_dir() else [source]
        for path in files:
            assert path.is_dir() or path.stat().st_ino in synced, path
        named.add(target.name)
        move(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(artifacts, "move", note_move)
    with artifacts.sealed(tmp_path / "thing", {}) as folder:
        fill(folder)
    assert named == {"manifest.json", "thing"}
    if os.name == "posix":  # the names, too
        assert tmp_path.stat().st_ino in synced


def test_an_error_while_filling_keeps_the_old_folder(sealed, tmp_path):
    with pytest.raises(ValueError), artifacts.sealed(sealed, {}) as folder:
        (folder / "a.txt").write_text("new")
        raise ValueError
    assert (sealed / "a.txt").read_text() == "alpha"
    assert {p.name for p in tmp_path.iterdir()} == {"thing", ".thing.lock"}


def test_sealing_again_replaces_everything(sealed, tmp_path):
    with artifacts.sealed(sealed, {}) as folder:
        (folder / "new.txt").write_text("new")
    assert {p.name for p in sealed.iterdir()} == {"new.txt", "manifest.json"}
    assert {p.name for p in tmp_path.iterdir()} == {"thing", ".thing.lock"}


def test_what_a_killed_process_left_is_cleared_and_a_living_writer_is_not(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    dead = tmp_path / f".thing.new-{socket.gethostname()}-{child.pid}-abc"
    alive = tmp_path / f".thing.new-{socket.gethostname()}-{os.getppid()}-abc"
    dead.mkdir()
    alive.mkdir()
    with artifacts.sealed(tmp_path / "thing", {}) as folder:
        assert list(folder.iterdir()) == []
    assert not dead.exists() and alive.exists()


def test_two_writers_of_one_artifact_do_not_meet(tmp_path):
    inside = threading.Barrier(2)
    errors = []

    def write(text):
        try:
            with artifacts.sealed(tmp_path / "thing", {}) as folder:
                (folder / "a.txt").write_text(text)
                inside.wait(timeout=60)
        except BaseException as error:
            errors.append(error)

    writers = [
        threading.Thread(target=write, args=[text]) for text in ("one", "two")
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert errors == []
    manifest = artifacts.read_manifest(tmp_path / "thing")
    assert artifacts.damage(tmp_path / "thing", manifest) == ""
    assert (tmp_path / "thing/a.txt").read_text() in ("one", "two")


def test_a_kill_between_the_two_renames_leaves_the_old_one(sealed, tmp_path):
    sealed.rename(tmp_path / ".thing.old")
    manifest = artifacts.read_manifest(sealed)
    assert manifest["name"] == "thing" and artifacts.damage(sealed, manifest) == ""


def test_what_is_as_it_was_is_not_read_again(sealed, monkeypatch):
    manifest = artifacts.read_manifest(sealed)
    monkeypatch.setattr(
        artifacts, "hash_file", lambda path: pytest.fail("read again")
    )
    assert artifacts.damage(sealed, manifest) == ""


def test_a_byte_flipped_behind_the_clock_is_found_on_request(sealed):
    path = sealed / "a.txt"
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_text("alphA")
    os.utime(path, ns=times)
    manifest = artifacts.read_manifest(sealed)
    assert artifacts.damage(sealed, manifest) == ""
    assert "a.txt has changed" in artifacts.damage(sealed, manifest, full=True)


def test_a_copy_whose_times_are_new_is_read_and_is_whole(sealed, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(sealed, copy, copy_function=shutil.copyfile)
    assert artifacts.damage(copy, artifacts.read_manifest(copy)) == ""


def test_a_manifest_deeper_down_is_a_file_like_any_other(tmp_path):
    with artifacts.sealed(tmp_path / "thing", {}) as folder:
        (folder / "inner").mkdir()
        (folder / "inner/manifest.json").write_text("{}")
    (tmp_path / "thing/inner/manifest.json").write_text("[]")
    manifest = artifacts.read_manifest(tmp_path / "thing")
    assert "inner/manifest.json has changed" in artifacts.damage(
        tmp_path / "thing", manifest
    )


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["files", "seal", "hash", "stats"]), inner
            )
        ),
    )
)
def test_any_json_for_a_manifest_is_damage_and_no_crash(tmp_path_factory, value):
    folder = tmp_path_factory.mktemp("any")
    (folder / "manifest.json").write_text(json.dumps(value))
    manifest = artifacts.read_manifest(folder)
    assert manifest is None or "manifest.json has changed" in artifacts.damage(
        folder, manifest
    )


@pytest.fixture
def small_disk(tmp_path):
    """A real disk of 600 kB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(place)]
    if (
        sys.platform != "linux"
        or subprocess.run(command, capture_output=True).returncode
    ):
        pytest.skip("this system lets nobody mount a small disk")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_met_by_a_library_in_rust_says_what_to_do(small_disk):
    with artifacts.sealed(small_disk / "thing", {}) as folder:
        (folder / "a.txt").write_text("alpha")
    with pytest.raises(CourseError, match="the disk is full"):
        with artifacts.sealed(small_disk / "thing", {}) as folder:
            save_file(
                {"weights": torch.zeros(1_000_000)}, folder / "model.safetensors"
            )
    manifest = artifacts.read_manifest(small_disk / "thing")
    assert artifacts.damage(small_disk / "thing", manifest) == "", (
        "the old one was lost"
    )


@pytest.mark.parametrize(
    "number, said",
    [(errno.ENOSPC, "the disk is full"), (errno.EROFS, "cannot write here")],
)
def test_disk_errors_say_what_to_do(tmp_path, number, said):
    with (
        pytest.raises(CourseError, match=said) as caught,
        artifacts.sealed(tmp_path / "thing", {}),
    ):
        raise OSError(number, "…")
    assert "COURSE_BUILD" in str(caught.value)
    assert not (tmp_path / "thing").exists()


def test_a_refusal_that_names_no_file_is_not_our_disk(tmp_path):
    with pytest.raises(PermissionError), artifacts.plain_disk_errors(tmp_path):
        raise PermissionError(errno.EPERM, "a kill")


def test_other_errors_pass_unchanged(tmp_path):
    with pytest.raises(FileNotFoundError), artifacts.plain_disk_errors(tmp_path):
        raise FileNotFoundError


def test_an_input_that_cannot_be_read_is_not_our_disk(tmp_path):
    with (
        pytest.raises(PermissionError),
        artifacts.plain_disk_errors(tmp_path / "build"),
    ):
        raise PermissionError(errno.EACCES, "no", str(tmp_path / "input.txt"))


@pytest.mark.parametrize(
    "spoil",
    [lambda text: text[:-9], lambda text: text.replace('"thing"', '"thong"')],
)
def test_a_damaged_manifest_is_damage(sealed, spoil):
    path = sealed / "manifest.json"
    path.write_text(spoil(path.read_text()))
    assert (
        artifacts.damage(sealed, artifacts.read_manifest(sealed))
        == "manifest.json has changed"
    )


def test_json_is_replaced_whole(tmp_path):
    path = tmp_path / "a.json"
    artifacts.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        artifacts.write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}


def test_a_folder_that_was_sealed_without_sizes_and_times_is_hashed(sealed):
    manifest = artifacts.read_manifest(sealed)
    del manifest["stats"], manifest["seal"]
    manifest["seal"] = artifacts.hash_json(manifest)
    artifacts.write_json(sealed / "manifest.json", manifest)
    assert artifacts.damage(sealed, artifacts.read_manifest(sealed)) == ""
    (sealed / "a.txt").write_text("alphA")
    assert "a.txt has changed" in artifacts.damage(sealed, manifest)


@pytest.fixture
def windows(monkeypatch):
    """Windows, where nothing below a folder that is in `held` can be renamed."""
    held = {}
    replace = os.replace

    def refuse_open_files(source, target):
        for path in (Path(source), Path(target)):
            if held.get(path, 0):
                held[path] -= 1
                raise PermissionError(errno.EACCES, "Access is denied", str(path))
        replace(source, target)

    monkeypatch.setattr(artifacts, "WINDOWS", True)
    monkeypatch.setattr(artifacts, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(os, "replace", refuse_open_files)
    return held


def test_on_windows_a_folder_that_a_notebook_has_open_is_said_to_be_in_use(
    sealed, windows
):
    windows[sealed] = 10**9
    with pytest.raises(CourseError, match="has files here open") as caught:
        with artifacts.sealed(sealed, {}) as folder:
            (folder / "a.txt").write_text("new", encoding="utf-8")
    assert "shut down the notebook" in str(caught.value)
    assert "writable" not in str(caught.value)
    assert (sealed / "a.txt").read_text(encoding="utf-8") == "alpha"
    assert not [path for path in sealed.parent.iterdir() if ".new-" in path.name]


def test_on_windows_a_virus_scanner_is_waited_for(sealed, windows):
    windows[sealed] = 2
    with artifacts.sealed(sealed, {}) as folder:
        (folder / "a.txt").write_text("new", encoding="utf-8")
    assert (sealed / "a.txt").read_text(encoding="utf-8") == "new"
    windows[sealed.parent / "a.json"] = 2
    artifacts.write_json(sealed.parent / "a.json", 1)
    assert artifacts.read_json(sealed.parent / "a.json") == 1
    assert set(windows.values()) == {0}


def test_a_writer_of_somebody_else_s_is_left_alone(tmp_path, monkeypatch):
    theirs = tmp_path / f".thing.new-{socket.gethostname()}-4321-abc"
    theirs.mkdir()

    def denied(number):
        raise psutil.AccessDenied(number)

    monkeypatch.setattr(psutil, "Process", denied)
    with artifacts.sealed(tmp_path / "thing", {}):
        pass
    assert theirs.exists()
