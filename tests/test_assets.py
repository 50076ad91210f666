"""Assets: fetched by hash from where pip looks, checked at use. Servers are started here."""

import contextlib
import dataclasses
import functools
import http.server
import io
import json
import os
import re
import socket
import subprocess
import sys
import tarfile
import threading
import zipfile

import pytest

from conftest import MOUNTS
from course import __main__ as command
from course import fetch
from utils import artifacts, assets
from utils.assets import Asset
from utils.errors import ROOT, CourseError

SETUP = """
import pathlib
pathlib.Path({mark!r}).write_text("the build script ran")
raise SystemExit("and fails")
"""


@pytest.fixture
def shelf(tmp_path):
    """A folder with a wheel, and an sdist whose build script leaves a mark and fails."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    with zipfile.ZipFile(folder / "toy-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("toy/data/a.txt", "alpha")
        archive.writestr("toy/b.py", "raise SystemExit('it was imported')")
    members = {
        "Toy_Source-2.0/setup.py": SETUP.format(mark=str(tmp_path / "mark")),
        "Toy_Source-2.0/data/b.txt": "beta",
    }
    with tarfile.open(folder / "Toy_Source-2.0.tar.gz", "w:gz") as archive:
        for name, text in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
    return folder


@pytest.fixture
def toys(shelf, tmp_path, monkeypatch):
    """A catalogue of two assets, and a pip that looks for them on the shelf and nowhere else."""
    toy = Asset(
        "toy",
        "a toy",
        1,
        1,
        ["toy"],
        ["toy/data/*"],
        "MIT",
        "us",
        strip=2,
        hub="us/toy",
        revision="c0ffee",
    )
    source = Asset(
        "source",
        "an sdist",
        1,
        1,
        ["Toy-Source"],
        ["*/data/*"],
        "MIT",
        "us",
        strip=2,
    )
    items = {"toy": toy, "source": source}
    wheel = artifacts.hash_file(shelf / "toy-1.0-py3-none-any.whl")
    sdist = artifacts.hash_file(shelf / "Toy_Source-2.0.tar.gz")
    pins = {"toy": ("1.0", wheel), "Toy-Source": ("2.0", sdist)}
    monkeypatch.setattr(fetch, "catalogue", lambda: items)
    monkeypatch.setattr(assets, "catalogue", fetch.catalogue)
    monkeypatch.setattr(fetch, "pins", lambda: pins)
    monkeypatch.setattr(assets, "pins", lambda: pins)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    monkeypatch.setenv("COURSE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("COURSE_ASSETS", raising=False)
    return items


@pytest.fixture
def index(shelf, monkeypatch):
    """An index as PEP 503 describes it, on loopback, as the only one; its requests are counted."""
    requests = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):
            requests.append(self.path)
            if len(requests) == 1:  # it stumbles once
                self.send_error(503)
                return
            super().do_GET()

        def log_message(self, *words):
            pass

    for project, name in (
        ("toy", "toy-1.0-py3-none-any.whl"),
        ("toy-source", "Toy_Source-2.0.tar.gz"),
    ):
        page = shelf / "simple" / project / "index.html"
        page.parent.mkdir(parents=True)
        sha256 = artifacts.hash_file(shelf / name)
        other = f'<a href="../../{name}.other#sha256={"0" * 64}">{name}.other</a>'
        page.write_text(
            f'{other}\n<a href="../../{name}#sha256={sha256}" data-x="y">{name}</a>'
        )
    handler = functools.partial(Handler, directory=str(shelf))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.delenv("PIP_FIND_LINKS")
        monkeypatch.setenv(
            "PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple"
        )
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield requests
        server.shutdown()


def run(*arguments):
    return command.main(["fetch", *arguments])


# fetch ------------------------------------------------------------------------------------------


def test_fetch_then_use(toys, capsys):
    assert run("toy") == 0
    assert {p.name for p in toys["toy"].folder.iterdir()} == {
        "a.txt",
        "manifest.json",
    }
    assert assets.asset("toy") == str(toys["toy"].folder)
    assert "licence MIT | from us" in capsys.readouterr().out
    assert not (assets.home() / "archives").exists()


def test_on_a_terminal_a_download_moves_and_leaves_nothing(
    toys, index, monkeypatch, capsys
):
    toys["toy"] = dataclasses.replace(toys["toy"], prepare="nothing")
    monkeypatch.setitem(fetch.PREPARE, "nothing", lambda folder: None)
    monkeypatch.setattr(fetch, "BLOCK", 100)
    monkeypatch.setattr(fetch.sys.stdout, "isatty", lambda: True, raising=False)
    assert run("toy") == 0
    first, *moving, last = capsys.readouterr().out.split("\r\033[K")
    assert first.startswith("asset toy") and "done in" in last
    size = sum(len(text) for text in moving if "MB have come" in text)
    assert size > len("  0 MB have come")
    assert moving[-2:] == ["  unpacking", "  preparing it, once"]
    assert not any("\n" in text for text in moving)


def test_a_download_that_fails_leaves_no_line_behind(
    toys, shelf, monkeypatch, capsys
):
    broken = shelf / "toy-1.0-py3-none-any.whl"
    broken.write_bytes(broken.read_bytes() + b"!")
    monkeypatch.setattr(fetch.sys.stdout, "isatty", lambda: True, raising=False)
    assert run("toy") == 2
    assert capsys.readouterr().out.endswith("\r\033[K")


def test_a_log_gets_no_moving_line(toys, capsys):
    assert run("toy") == 0
    assert "\r" not in capsys.readouterr().out


def test_an_sdist_is_a_file_and_its_build_script_never_runs(toys, tmp_path):
    assert run("source") == 0
    assert (toys["source"].folder / "b.txt").read_text() == "beta"
    assert not (tmp_path / "mark").exists()


def test_an_index_serves_wheels_and_sdists_alike(toys, index):
    assert run() == 0
    assert (toys["toy"].folder / "a.txt").read_text() == "alpha"
    assert (toys["source"].folder / "b.txt").read_text() == "beta"
    # The server stumbled once, and the file of another hash was never asked for.
    assert index[0] == index[1] == "/simple/toy/"
    assert not any(path.endswith(".other") for path in index)


def test_an_index_in_a_folder_serves_as_well(toys, index, shelf, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", (shelf / "simple").as_uri())
    assert run("toy") == 0
    assert index == []


def test_one_archive_of_two_assets_is_downloaded_once(toys, index):
    second = Asset(
        "second", "of the same wheel", 1, 1, ["toy"], ["toy/*.py"], "MIT", "us"
    )
    toys["second"] = second
    assert run("toy", "second") == 0
    assert sum(path.endswith(".whl") for path in index) == 1


def test_fetching_again_neither_downloads_nor_hashes(toys, monkeypatch, capsys):
    run("toy")
    monkeypatch.setattr(
        fetch, "get_archive", lambda project: pytest.fail("downloaded again")
    )
    monkeypatch.setattr(
        artifacts, "hash_file", lambda path: pytest.fail("hashed again")
    )
    assert run("toy") == 0
    assert "here already" in capsys.readouterr().out


def test_fetching_again_when_told_downloads(toys, index):
    run("toy")
    count = len(index)
    assert run("toy", "--again") == 0
    assert len(index) > count


FETCH = """
import json, sys
from course import __main__ as command
from course import fetch
from utils import assets
from utils.assets import Asset

fields, pins, *arguments = json.loads(sys.argv[1])
items = {name: Asset(**one) for name, one in fields.items()}
for module in (fetch, assets):
    module.catalogue = lambda: items
    module.pins = lambda: pins
sys.exit(command.main(["fetch", *arguments]))
"""


def start_fetch(toys, *arguments):
    """`python -m course fetch` in a process of its own, with the toys for its catalogue."""
    fields = {name: vars(toy) for name, toy in toys.items()}
    order = json.dumps([fields, fetch.pins(), *arguments])
    command = [sys.executable, "-c", FETCH, order]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


class SlowFile(io.BytesIO):
    """A file that is sent in two halves, and between them `meanwhile` happens."""

    def __init__(self, content, meanwhile):
        super().__init__(content)
        self.meanwhile = meanwhile

    def read(self, size=-1):
        half = len(self.getvalue()) // 2
        if not self.tell():
            return super().read(half)
        if self.tell() == half:
            self.meanwhile()
        return super().read(size)


def test_who_has_all_takes_no_archive_from_who_still_fetches(
    toys, index, shelf, monkeypatch
):
    """One process is in the middle of an archive, when another ends and tidies up."""
    assert run("source") == 0
    others = []

    def run_another():
        other = start_fetch(toys, "source")
        others.append(other)
        assert "here already" in other.stdout.readline()
        # It ends, unless it waits for the first one; a slow machine cannot make this red.
        with contextlib.suppress(subprocess.TimeoutExpired):
            other.wait(timeout=2)

    send = http.server.SimpleHTTPRequestHandler.send_head

    def send_slowly(self):
        file = send(self)
        if not self.path.endswith(".whl"):
            return file
        with file:
            return SlowFile(file.read(), run_another)

    monkeypatch.setattr(
        http.server.SimpleHTTPRequestHandler, "send_head", send_slowly
    )
    first = start_fetch(toys, "toy")
    words, _ = first.communicate(timeout=300)
    assert first.returncode == 0, words
    assert others[0].wait(timeout=300) == 0
    assert (toys["toy"].folder / "a.txt").read_text() == "alpha"
    assert not (assets.home() / "archives").exists()


def test_what_another_process_fetched_meanwhile_is_not_fetched_again(toys, index):
    """Two want the same: the second waits for the lock, and finds it there."""
    assets.home().mkdir()
    with fetch.archives_lock():
        both = [start_fetch(toys, "toy") for _ in range(2)]
        for one in both:
            assert "1 MB" in one.stdout.readline()
    for one in both:
        words, _ = one.communicate(timeout=300)
        assert one.returncode == 0, words
    assert sum(path.endswith(".whl") for path in index) == 1


def test_a_damaged_asset_is_named_and_mended(toys):
    run("toy")
    (toys["toy"].folder / "a.txt").write_text("alphA")
    with pytest.raises(CourseError, match=r"a\.txt has changed"):
        assets.asset("toy")
    assert run("toy") == 0
    assets.asset("toy")


@pytest.mark.parametrize("name", ["toy", "source"])
def test_an_archive_of_another_hash_is_refused_and_leaves_nothing(
    toys, shelf, name, capsys
):
    for path in shelf.iterdir():
        path.write_bytes(path.read_bytes() + b"!")
    assert run(name) == 2
    message = capsys.readouterr().err
    assert "does not have the SHA-256" in message
    assert "do not use it" in message
    assert not toys[name].folder.exists()


def test_an_index_that_has_no_file_of_that_hash_is_refused(
    toys, index, monkeypatch, capsys
):
    pins = {"toy": ("1.0", "1" * 64)}
    monkeypatch.setattr(fetch, "pins", lambda: pins)
    monkeypatch.setattr(assets, "pins", lambda: pins)
    assert run("toy") == 2
    assert "none of these places" in capsys.readouterr().err
    assert not any(path.endswith(".whl") for path in index)


def test_a_wrong_hash_of_one_file_is_refused(toys, capsys):
    toys["toy"].sha256["a.txt"] = "0" * 64
    assert run("toy") == 2
    assert "is not what it says" in capsys.readouterr().err
    assert not toys["toy"].folder.exists()


def test_without_a_network_the_way_out_is_told(toys, monkeypatch, capsys):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv(
            "PIP_INDEX_URL", f"http://127.0.0.1:{closed.getsockname()[1]}/simple"
        )
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.delenv("PIP_FIND_LINKS")
        assert run("toy") == 2
    message = capsys.readouterr().err
    assert "toy 1.0 could not be fetched" in message
    assert "where: http://127.0.0.1" in message
    assert "next:  connect to a network and run the command again" in message


def test_one_that_cannot_be_had_does_not_keep_the_others_away(toys, shelf, capsys):
    broken = shelf / "toy-1.0-py3-none-any.whl"
    broken.write_bytes(broken.read_bytes() + b"!")
    assert run("toy", "source") == 2
    message = capsys.readouterr().err
    assert "not fetched: toy; only the lessons that take them" in message
    assert toys["source"].folder.exists()


def test_neither_npm_nor_any_other_program_is_needed(toys, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    assert run() == 0


@MOUNTS
def test_a_full_disk_is_told_as_one(toys, shelf, tmp_path, monkeypatch, capsys):
    with zipfile.ZipFile(shelf / "toy-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("toy/data/a.bin", os.urandom(400_000))
    pins = {"toy": ("1.0", artifacts.hash_file(shelf / "toy-1.0-py3-none-any.whl"))}
    monkeypatch.setattr(fetch, "pins", lambda: pins)
    monkeypatch.setattr(assets, "pins", lambda: pins)
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200k", "none", str(small)], check=True
    )
    try:
        monkeypatch.setenv("COURSE_HOME", str(small / "home"))
        assert run("toy") == 2
        assert "the disk is full" in capsys.readouterr().err
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_the_environment_has_the_last_word_over_pips_files(
    toys, tmp_path, monkeypatch
):
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\nindex-url = https://one/simple\nextra-index-url =\n  https://two/simple\n"
        "  https://three/simple\n[download]\ntimeout = 7\n[install]\nno-index = yes\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    places = fetch.list_places(fetch.pip_settings(), "a-b")
    assert places == [
        f"https://{name}/simple/a-b/" for name in ("one", "two", "three")
    ]
    monkeypatch.setenv("PIP_INDEX_URL", "https://mine/simple/")
    assert (
        fetch.list_places(fetch.pip_settings(), "a-b")[0]
        == "https://mine/simple/a-b/"
    )
    assert fetch.pip_settings()["timeout"] == "7"


def test_the_list_says_what_is_here_and_fetches_nothing(toys, capsys):
    run("toy")
    capsys.readouterr()
    assert run("--list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert " here " in lines[0]
    assert " here " not in lines[1]


def test_what_lessons_take_is_read_from_their_own_calls(toys, tmp_path, capsys):
    code = 'asset("toy"); asset("not in the catalogue")'
    cell = {"cell_type": "code", "source": code, "metadata": {}}
    path = tmp_path / "05_a.ipynb"
    path.write_text(json.dumps({"cells": [cell]}))
    assert [item.name for item in fetch.taken_by(path)] == ["toy"]


def test_importing_fetch_takes_neither_torch_nor_a_connection():
    code = "import course.fetch, sys; print(*{'torch', 'requests', 'transformers'} & set(sys.modules))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == ""


# use --------------------------------------------------------------------------------------------


def test_an_asset_that_is_not_here_names_the_command(toys):
    with pytest.raises(CourseError, match="python -m course fetch toy"):
        assets.asset("toy")


def test_an_unknown_asset_lists_the_names(toys, capsys):
    with pytest.raises(CourseError, match=r"there is no asset 'tot'(.|\n)*toy"):
        assets.asset("tot")
    assert run("tot") == 2
    assert "there is no asset 'tot'" in capsys.readouterr().err


@pytest.mark.parametrize("status", [200, 404])
def test_with_the_hub_a_model_comes_by_its_name(toys, monkeypatch, status):
    import huggingface_hub

    asked = []

    def snapshot(name, **rest):
        asked.append((name, rest["revision"]))
        return "/x/c0ffee"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("COURSE_ASSETS", "hub")

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(status)

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        assert assets.asset("toy") == "/x/c0ffee"
        server.shutdown()
    assert asked == [("us/toy", "c0ffee")]


def test_the_hub_is_asked_for_a_commit_and_not_for_the_newest():
    for item in assets.catalogue().values():
        length = 40 if item.hub else 0
        assert re.fullmatch(f"[0-9a-f]{{{length}}}", item.revision), item.name


def test_a_hub_that_is_out_of_reach_is_told_and_not_waited_for(toys, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("COURSE_ASSETS", "hub")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        CourseError, match=r"the hub cannot be reached(.|\n)*unset COURSE_ASSETS"
    ):
        assets.asset("toy")


def test_offline_the_hub_is_not_asked_and_its_cache_is_read(
    toys, monkeypatch, tmp_path
):
    import huggingface_hub

    def network(*_, **__):
        raise AssertionError("the network was asked")

    cache = tmp_path / "cache"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(assets.urllib.request, "urlopen", network)
    monkeypatch.setenv("COURSE_ASSETS", "hub")
    with pytest.raises(
        CourseError, match=r"not in the hub's cache(.|\n)*unset HF_HUB"
    ):
        assets.asset("toy")
    commit = "c0ffee" + 34 * "0"
    toys["toy"] = dataclasses.replace(toys["toy"], revision=commit)
    place = cache / "models--us--toy/snapshots" / commit
    place.mkdir(parents=True)
    assert assets.asset("toy") == str(place)


# the catalogue ----------------------------------------------------------------------------------


def test_every_asset_is_whole_and_pinned():
    pinned = assets.pins()
    for item in assets.catalogue().values():
        assert item.licence
        assert item.origin
        assert item.what
        assert item.prepare in ("", *fetch.PREPARE)
        assert all(len(pinned[archive][1]) == 64 for archive in item.archives)
    used = {
        archive for item in assets.catalogue().values() for archive in item.archives
    }
    assert set(pinned) == used
