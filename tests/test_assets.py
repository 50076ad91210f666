"""Assets: fetched by hash, unpacked safely, checked at use. No network: archives are made here."""
import io
import tarfile
import zipfile

import pytest

from utils import artifacts as folders, assets
from utils.assets import Asset
from utils.errors import CourseError


def make_wheel(path, files):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr("toy-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
        archive.writestr("toy-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("toy-1.0.dist-info/RECORD", "")
    return path


def tar_bytes(members):
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        for info, content in members:
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return data.getvalue()


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """An asset in a wheel that pip finds in a local folder, and its catalogue."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    wheel = make_wheel(shelf / "toy-1.0-py3-none-any.whl", {"toy/data/a.txt": "alpha", "toy/b.py": "1"})
    item = Asset("toy", "a toy", 1, 1, ["toy"], ["toy/data/*"], "MIT", "us", strip=2, hub="us/toy")
    monkeypatch.setattr(assets, "catalogue", lambda: {"toy": item})
    monkeypatch.setattr(assets, "pins", lambda: {"toy": ("1.0", folders.hash_file(wheel))})
    for key, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(shelf), "COURSE_HOME": str(tmp_path / "home"),
                       "PIP_CONFIG_FILE": "/dev/null", "PIP_EXTRA_INDEX_URL": ""}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv("COURSE_ASSETS", raising=False)
    return item


def test_fetch_then_use(toy, capsys):
    assets.fetch("toy")
    assert {p.name for p in toy.folder.iterdir()} == {"a.txt", "manifest.json"}
    assert assets.asset("toy") == str(toy.folder)
    assert "licence MIT | from us" in capsys.readouterr().out


def test_fetching_again_does_nothing_unless_told(toy, monkeypatch, capsys):
    assets.fetch("toy")
    monkeypatch.setattr(assets, "download", lambda *given: pytest.fail("downloaded again"))
    assets.fetch("toy")
    assert "here already" in capsys.readouterr().out


def test_an_asset_that_is_not_here_names_the_command(toy):
    with pytest.raises(CourseError, match="python -m course fetch toy"):
        assets.asset("toy")


def test_a_damaged_asset_is_named_and_mended(toy):
    assets.fetch("toy")
    (toy.folder / "a.txt").write_text("alphA")
    with pytest.raises(CourseError, match="a.txt has changed"):
        assets.asset("toy")
    assets.fetch("toy")  # what the set-up does: it mends
    assets.asset("toy")


def test_a_wrong_hash_is_refused_and_leaves_nothing(toy, monkeypatch):
    monkeypatch.setattr(assets, "pins", lambda: {"toy": ("1.0", "0" * 64)})
    with pytest.raises(CourseError, match="does not have the SHA-256"):
        assets.fetch("toy")
    assert not toy.folder.exists()


def test_a_wrong_hash_of_one_file_is_refused(toy):
    toy.sha256["a.txt"] = "0" * 64
    with pytest.raises(CourseError, match="is not what it says"):
        assets.fetch("toy")
    assert not toy.folder.exists()


def test_no_network_says_so(toy, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    with pytest.raises(CourseError, match="could not be fetched(.|\n)*connect to a network"):
        assets.fetch("toy")


def test_an_unknown_asset_lists_the_names(toy):
    with pytest.raises(CourseError, match="there is no asset 'tot'(.|\n)*toy"):
        assets.asset("tot")


def test_with_the_hub_a_model_comes_by_its_name(toy, monkeypatch):
    import socket

    import huggingface_hub

    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **rest: asked.append(name) or "/x/c0ffee")
    monkeypatch.setenv("COURSE_ASSETS", "hub")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert assets.asset("toy") == "/x/c0ffee" and asked == ["us/toy"]


def test_a_hub_that_is_out_of_reach_is_told_within_seconds(toy, monkeypatch):
    import time

    monkeypatch.setenv("COURSE_ASSETS", "hub")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    start = time.monotonic()
    with pytest.raises(CourseError, match="the hub cannot be reached(.|\n)*unset COURSE_ASSETS"):
        assets.asset("toy")
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("name", ["../evil.txt", "/etc/evil", "a/../../evil", "..\\evil", "C:\\evil"])
def test_a_name_that_leaves_the_folder_is_refused(tmp_path, name):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, "x")
    (tmp_path / "out").mkdir()
    with pytest.raises(CourseError, match="leaves its folder"):
        assets.unpack(path, ["**/*"], tmp_path / "out")


def test_a_link_in_a_tar_does_not_leave_the_folder(tmp_path):
    link = tarfile.TarInfo("toy/link")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc"
    (tmp_path / "a.tar.gz").write_bytes(tar_bytes([(link, b""), (tarfile.TarInfo("toy/link/x"), b"x")]))
    (tmp_path / "out").mkdir()
    assert assets.unpack(tmp_path / "a.tar.gz", ["**/*"], tmp_path / "out") == 1
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))
    assert (tmp_path / "out/toy/link/x").read_bytes() == b"x"  # a plain file in a plain folder


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(assets, "MOST_BYTES", 1000)
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros", b"0" * 1001)
    (tmp_path / "out").mkdir()
    with pytest.raises(CourseError, match="unpacks to over"):
        assets.unpack(tmp_path / "a.zip", ["*"], tmp_path / "out")


def test_a_nested_archive_is_reached_into(tmp_path):
    inner = tar_bytes([(tarfile.TarInfo("deep/a_Truth.txt"), b"a"), (tarfile.TarInfo("deep/b.txt"), b"b")])
    (tmp_path / "a.tar.gz").write_bytes(tar_bytes([(tarfile.TarInfo("x/y/inner.tar.gz"), inner)]))
    (tmp_path / "out").mkdir()
    count = assets.unpack(tmp_path / "a.tar.gz", ["*/y/inner.tar.gz!*/*_Truth.txt"], tmp_path / "out", 1)
    assert count == 1 and (tmp_path / "out/a_Truth.txt").read_text() == "a"


def test_every_asset_is_whole_and_pinned():
    pinned = assets.pins()
    for item in assets.catalogue().values():
        assert item.licence and item.origin and item.what and item.prepare in assets.PREPARE
        assert all(len(pinned[archive][1]) == 64 for archive in item.archives)
    used = {archive for item in assets.catalogue().values() for archive in item.archives}
    assert set(pinned) == used
