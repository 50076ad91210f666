"""Archives from outside: what is damaged or hostile is an error, and never a file in another place."""

import io
import random
import tarfile
import zipfile
from pathlib import Path

import pytest

from utils import archives
from utils.archives import unpack
from utils.errors import CourseError


def make_zip(path: Path, files: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def make_tar(path: Path, files: dict[str, str]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return path


@pytest.mark.parametrize(
    "make, name", [(make_zip, "a.zip"), (make_tar, "a.tar.gz")]
)
def test_chosen_files_come_out_without_their_first_folders(tmp_path, make, name):
    archive = make(tmp_path / name, {"top/data/a.txt": "alpha", "top/code.py": "1"})
    (tmp_path / "out").mkdir()
    assert unpack(archive, ["top/data/*"], tmp_path / "out", strip=2) == 1
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"a.txt"}


def test_a_python_without_filters_for_tar_unpacks_too(tmp_path, monkeypatch):
    def extractall(self, path=".", members=None, *, numeric_owner=False):
        raise AssertionError(
            "as of Python 3.11.2 it takes no filter and is not used"
        )

    monkeypatch.setattr(tarfile.TarFile, "extractall", extractall)
    monkeypatch.delattr(tarfile, "data_filter")
    archive = make_tar(tmp_path / "a.tar.gz", {"top/a.txt": "alpha"})
    (tmp_path / "out").mkdir()
    assert unpack(archive, ["top/*"], tmp_path / "out") == 1
    assert (tmp_path / "out/top/a.txt").read_text() == "alpha"


def test_an_archive_in_an_archive_is_reached(tmp_path):
    inner = make_tar(
        tmp_path / "inner.tar.gz", {"x/wanted.txt": "w", "x/other.md": "o"}
    )
    with zipfile.ZipFile(tmp_path / "outer.zip", "w") as archive:
        archive.write(inner, "y/inner.tar.gz")
    (tmp_path / "out").mkdir()
    assert (
        unpack(
            tmp_path / "outer.zip",
            ["y/inner.tar.gz!x/*.txt"],
            tmp_path / "out",
            strip=1,
        )
        == 1
    )
    assert (tmp_path / "out/wanted.txt").read_text() == "w"


@pytest.mark.parametrize(
    "make, name", [(make_zip, "a.zip"), (make_tar, "a.tar.gz")]
)
@pytest.mark.parametrize(
    "member", ["../evil", "/evil", "a/../../evil", "C:/evil", "a\\..\\..\\evil"]
)
def test_a_name_that_leaves_its_folder_is_refused(tmp_path, make, name, member):
    archive = make(tmp_path / name, {"fine.txt": "", member: "bad"})
    (tmp_path / "out").mkdir()
    with pytest.raises(CourseError, match="a name that leaves its folder"):
        unpack(archive, ["**/*"], tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_link_in_an_archive_is_left_out(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    (tmp_path / "out").mkdir()
    assert unpack(tmp_path / "a.tar", ["**/*"], tmp_path / "out") == 0


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    archive = make_zip(tmp_path / "a.zip", {"a": "x" * 1000, "b": "x" * 1000})
    monkeypatch.setattr(archives, "MOST_BYTES", 1500)
    monkeypatch.setattr(
        zipfile.ZipFile, "extractall", lambda *_: pytest.fail("unpacked")
    )
    with pytest.raises(CourseError, match="unpacks to over"):
        unpack(archive, ["*"], tmp_path)


@pytest.mark.parametrize(
    "make, name", [(make_zip, "a.zip"), (make_tar, "a.tar.gz")]
)
@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_archive_is_unpacked_or_named_and_nothing_leaves_the_folder(
    tmp_path, make, name, seed
):
    archive = make(
        tmp_path / name, {f"d/{index}.txt": str(index) * 50 for index in range(8)}
    )
    data = bytearray(archive.read_bytes())
    draw = random.Random(seed)
    for _ in range(draw.choice([1, 3, 20])):
        data[draw.randrange(len(data))] = draw.randrange(256)
    archive.write_bytes(data[: draw.choice([len(data), len(data) // 2])])
    out = tmp_path / "out"
    out.mkdir()
    before = set(tmp_path.rglob("*"))
    try:
        unpack(archive, ["**/*.txt"], out)
    except CourseError as error:
        assert name in str(error)
    assert all(
        path.is_relative_to(out) for path in set(tmp_path.rglob("*")) - before
    )
