"""The only door to outside weights, vocabularies and data.

`asset("smollm2")` gives a folder on this machine whose content is checked. Fetching is a step of the
set-up, never of a lesson: `python -m course fetch smollm2`. With `COURSE_ASSETS=hub` models come
from the Hugging Face hub instead, at the commit that assets.toml names.
"""

from __future__ import annotations

import functools
import os
import sys
import tomllib
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from utils import artifacts
from utils.errors import CourseError, short_path

PACKAGE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Asset:
    """One thing from outside: what it is, where it comes from, what is taken out of it."""

    name: str
    what: str
    megabytes: int  # to fetch
    disk: int  # megabytes kept
    archives: list[str]
    files: list[str]
    licence: str
    origin: str
    strip: int = 0
    prepare: str = ""
    hub: str = ""
    revision: str = ""  # the hub's commit; without one the newest is taken
    sha256: dict[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Where it is kept; another version or pin is another folder."""
        pinned = [pins()[archive] for archive in self.archives]
        mark = artifacts.hash_json([pinned, self.files, self.prepare])
        return home() / "assets" / f"{self.name}-{mark[:8]}"


@functools.cache
def catalogue() -> dict[str, Asset]:
    """Every asset by name."""
    facts = tomllib.loads((PACKAGE / "assets.toml").read_text(encoding="utf-8"))
    return {name: Asset(name, **rest) for name, rest in facts.items()}


@functools.cache
def pins() -> dict[str, tuple[str, str]]:
    """Version and SHA-256 of each archive that assets.txt pins."""
    found = {}
    place = PACKAGE.parent / "assets.txt"
    text = place.read_text(encoding="utf-8")
    lines = text.splitlines()
    for line in lines:
        if "--hash=" in line:
            spec, pin = line.split()
            name, version = spec.split("==")
            _, sha256 = pin.split(":")
            pinned = (version, sha256)
            found[name] = pinned
    return found


def home() -> Path:
    """Where assets live: `COURSE_HOME`, else the user's cache folder."""
    import platformdirs

    cache = platformdirs.user_cache_dir("transformers-course")
    return Path(os.environ.get("COURSE_HOME") or cache)


def find(name: str) -> Asset:
    """The asset of that name, or an error that lists the names."""
    if name not in catalogue():
        fix = f"choose one of {', '.join(catalogue())}"
        raise CourseError(f"there is no asset {name!r}", "utils/assets.toml", fix)
    return catalogue()[name]


def asset(name: str) -> str:
    """The folder to load an asset from; prints its licence, origin and content hash.

    AutoTokenizer.from_pretrained(asset("smollm2"))
    """
    item = find(name)
    if os.environ.get("COURSE_ASSETS") == "hub" and item.hub:
        return from_hub(item)
    command = f"{short_path(Path(sys.executable))} -m course fetch {name}"
    manifest = artifacts.read_manifest(item.folder)
    if manifest is None:
        what = f"the asset {name!r} is not on this machine"
        way = f"{command}   ({item.megabytes} MB, needs a network)"
        raise CourseError(what, item.folder, way)
    broken = artifacts.damage(item.folder, manifest)
    if broken:
        what = f"the asset {name!r} is damaged: {broken}"
        raise CourseError(what, item.folder, f"{command} --again")
    releases = [f"{archive} {pins()[archive][0]}" for archive in item.archives]
    print(f"asset {name}: {item.what}")
    print(f"  licence {item.licence} | from {item.origin}")
    print(f"  release {' + '.join(releases)} | content hash {manifest['hash']}")
    return str(item.folder)


def ask_hub(item: Asset) -> None:
    """Say at once that there is no way to the hub; its own library takes most of a minute."""
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        urllib.request.urlopen(hub, timeout=3).close()
    except urllib.error.HTTPError:
        pass  # it answers
    except OSError as error:
        way = "unset COURSE_ASSETS to use packaged assets, or connect this machine"
        what = f"the hub cannot be reached for {item.hub!r}: {error}"
        raise CourseError(what, hub, way) from None


def from_hub(item: Asset) -> str:
    """The hub's own copy of a model, in the hub's cache: weights, configuration and tokenizer."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    offline = constants.HF_HUB_OFFLINE
    if not offline:
        ask_hub(item)
    wanted = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
    commit = item.revision or None
    try:
        folder = snapshot_download(item.hub, revision=commit, allow_patterns=wanted)
    except LocalEntryNotFoundError:
        if not offline:
            raise
        way = "unset HF_HUB_OFFLINE, or unset COURSE_ASSETS to use packaged assets"
        what = "HF_HUB_OFFLINE is set, and this model is not in the hub's cache"
        raise CourseError(what, item.hub, way) from None
    print(f"asset {item.name}: {item.what}")
    print(f"  licence {item.licence}")
    print(f"  from the hub, {item.hub}, commit {Path(folder).name}")
    return folder
