"""Sealed folders: complete or absent, and damage is noticed."""
import errno
import json

import pytest

from utils import artifacts as folders
from utils.errors import CourseError


def fill(folder):
    (folder / "sub").mkdir()
    (folder / "a.txt").write_text("alpha")
    (folder / "sub/b.txt").write_text("beta")


@pytest.fixture
def sealed(tmp_path):
    with folders.sealed(tmp_path / "thing", {"name": "thing"}) as folder:
        fill(folder)
    return tmp_path / "thing"


def test_a_sealed_folder_knows_its_files(sealed):
    manifest = folders.read_manifest(sealed)
    assert set(manifest["files"]) == {"a.txt", "sub/b.txt"} and manifest["bytes"] == 9
    assert folders.damage(sealed, manifest) == ""


def test_one_flipped_byte_is_noticed(sealed):
    (sealed / "a.txt").write_text("alphA")
    assert "a.txt has changed" in folders.damage(sealed, folders.read_manifest(sealed))


def test_a_missing_and_an_added_file_are_noticed(sealed):
    manifest = folders.read_manifest(sealed)
    (sealed / "c.txt").write_text("")
    assert folders.damage(sealed, manifest) == "c.txt has come"
    (sealed / "a.txt").unlink()
    assert folders.damage(sealed, manifest) == "a.txt has gone"


def test_an_error_while_filling_keeps_the_old_folder(sealed, tmp_path):
    with pytest.raises(ValueError), folders.sealed(sealed, {}) as folder:
        (folder / "a.txt").write_text("new")
        raise ValueError
    assert (sealed / "a.txt").read_text() == "alpha"
    assert [p.name for p in tmp_path.iterdir()] == ["thing"]


def test_sealing_again_replaces_everything(sealed, tmp_path):
    with folders.sealed(sealed, {}) as folder:
        (folder / "new.txt").write_text("new")
    assert {p.name for p in sealed.iterdir()} == {"new.txt", "manifest.json"}
    assert [p.name for p in tmp_path.iterdir()] == ["thing"]


def test_what_a_killed_process_left_is_cleared(tmp_path):
    (tmp_path / ".thing.new").mkdir()
    (tmp_path / ".thing.new/half.txt").write_text("ha")
    with folders.sealed(tmp_path / "thing", {}) as folder:
        assert list(folder.iterdir()) == []


@pytest.mark.parametrize("number, said", [(errno.ENOSPC, "the disk is full"),
                                          (errno.EROFS, "cannot write here")])
def test_disk_errors_say_what_to_do(tmp_path, number, said):
    with pytest.raises(CourseError, match=said) as caught:
        with folders.sealed(tmp_path / "thing", {}):
            raise OSError(number, "…")
    assert "COURSE_BUILD" in str(caught.value)
    assert not (tmp_path / "thing").exists()


def test_other_errors_pass_unchanged(tmp_path):
    with pytest.raises(FileNotFoundError), folders.plain_disk_errors(tmp_path):
        raise FileNotFoundError


def test_an_input_that_cannot_be_read_is_not_our_disk(tmp_path):
    with pytest.raises(PermissionError), folders.plain_disk_errors(tmp_path / "build"):
        raise PermissionError(errno.EACCES, "no", str(tmp_path / "input.txt"))


@pytest.mark.parametrize("spoil", [lambda text: text[:-9], lambda text: text.replace('"thing"', '"thong"')])
def test_a_damaged_manifest_is_damage(sealed, spoil):
    path = sealed / "manifest.json"
    path.write_text(spoil(path.read_text()))
    assert folders.damage(sealed, folders.read_manifest(sealed)) == "manifest.json has changed"


def test_json_is_replaced_whole(tmp_path):
    path = tmp_path / "a.json"
    folders.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        folders.write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
