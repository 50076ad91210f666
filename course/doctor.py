"""Says what this machine has and what it lacks: `python -m course doctor`.

Nothing is fetched or installed for it, and before the set-up Python's own library is enough.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from course import setup
from course.torch_build import choose_build, find_driver
from utils.errors import ROOT, build_folder, short_path
from utils.machine import count_cores, total_memory
from utils.profiles import fits_laptop

# What the packages take, and what assets, runs and artifacts take besides, in bytes.
PACKAGES_DISK = 2.5e9
COURSE_DISK = 2e9
LEAST_MEMORY = 3e9


class Finding(NamedTuple):
    """One line: ✔ is as it should be, ✘ stops the course, · is worth knowing; and what to type next."""

    mark: str
    text: str
    next: str = ""

    def __str__(self) -> str:
        way = f"   → {self.next}" if self.next else ""
        return f"{self.mark} {self.text}{way}"


def run() -> int:
    """Look at one thing after another; 1 if one of them stops the course."""
    python = setup.interpreter()
    bare = importlib.util.find_spec("filelock") is None
    if bare and python.exists():
        command = [str(python), "-m", "course", "doctor"]
        return subprocess.call(command, cwd=setup.CHECKOUT)
    stopped = False
    for look in LOOKS:
        for finding in look():
            print(finding, flush=True)
            stopped = stopped or finding.mark == "✘"
    ready = Finding("✔", "nothing stops the course", next_command(bare))
    if not stopped:
        print(ready)
    return int(stopped)


def next_command(bare: bool) -> str:
    """What a learner types when all is well."""
    if bare:
        return "python3 -m course setup"
    program = setup.programs() / "course"
    return f"{short_path(program) if program.exists() else 'course'} lab"


def look_at_python() -> Iterator[Finding]:
    """The Python, and whether it can make the environment."""
    name = f"Python {sys.version.split()[0]}"
    made = setup.interpreter().exists()
    problem = "" if made else setup.why_no_environment()
    if problem:
        yield Finding("✘", f"{name}: {problem}", setup.how_to_make_one())
    elif made:
        yield Finding("✔", f"{name}, the environment is in .venv")
    else:
        yield Finding("✔", f"{name}, can make the environment")


def look_at_git() -> Iterator[Finding]:
    """git, which tells a reader's changes from the course's."""
    if shutil.which("git"):
        yield Finding("✔", "git")
    else:
        yield Finding("·", "no git: updates come as a new copy", "install git")


def look_at_disk() -> Iterator[Finding]:
    """Room for packages, assets and runs, and whether they may be written."""
    places = {
        "the checkout": (setup.CHECKOUT, PACKAGES_DISK),
        "COURSE_BUILD": (build_folder(), COURSE_DISK),
        "COURSE_HOME": (assets_folder(), COURSE_DISK),
    }
    for name, (folder, needed) in places.items():
        while not folder.exists():
            folder = folder.parent
        installed = name == "the checkout" and setup.torch_version()
        free = shutil.disk_usage(folder).free
        size = f"{free / 1e9:.0f} GB free for {name}"
        if not os.access(folder, os.W_OK):
            way = f"set {name}" if name.isupper() else "copy it elsewhere"
            text = f"{name} cannot be written: {folder}"
            yield Finding("✘", text, way + " to a folder of yours")
        elif free < needed and not installed:
            text = f"{size}, {needed / 1e9:.1f} GB are needed"
            yield Finding("✘", text, "make room")
        else:
            yield Finding("✔", size)


def assets_folder() -> Path:
    """Where assets are kept; before the set-up, the folder that is known to be asked for."""
    if importlib.util.find_spec("platformdirs") is None:
        return Path(os.environ.get("COURSE_HOME") or Path.home())
    from utils import assets

    return assets.home()


def look_at_size() -> Iterator[Finding]:
    """Cores and memory, and what they carry."""
    memory = total_memory()
    cores = f"cores: {count_cores()}, memory:"
    if memory is None:
        yield Finding("·", f"{cores} it cannot be read here")
    elif memory < LEAST_MEMORY:
        text = f"{cores} {memory / 1e9:.1f} GB"
        yield Finding("✘", f"{text}; lessons take up to 3 GB", "use Colab")
    else:
        text = f"{cores} {memory / 1e9:.1f} GB"
        name = "laptop" if fits_laptop(memory) else "smoke"
        yield Finding("✔", f"{text}; `auto` takes the sizes of profile {name}")


def look_at_index() -> Iterator[Finding]:
    """The index that pip is set to, and whether it answers."""
    python = setup.interpreter()
    asked = python if python.exists() else Path(sys.executable)
    settings = setup.pip_settings(asked)
    # Before the set-up there may be no pip to ask.
    for name in ("index-url", "find-links", "cert"):
        variable = "PIP_" + name.upper().replace("-", "_")
        settings.setdefault(name, os.environ.get(variable, ""))
    index = settings["index-url"] or "https://pypi.org/simple"
    places = settings.get("find-links", "")
    beside = f", and {places}" if places else ""
    if settings.get("no-index"):
        yield Finding("·", f"pip asks no index, only {places}")
    elif setup.answers(f"{index.rstrip('/')}/pip/", settings):
        yield Finding("✔", f"the package index answers: {index}{beside}")
    elif setup.torch_version():
        text = f"the package index does not answer: {index}"
        yield Finding("·", f"{text}; lessons need none")
    else:
        way = "connect to a network, or set HTTPS_PROXY or PIP_INDEX_URL"
        yield Finding("✘", f"the package index does not answer: {index}", way)


def look_at_torch() -> Iterator[Finding]:
    """NVIDIA's driver, and whether the PyTorch that is here, or will be, can use its cards."""
    driver = find_driver()
    build = choose_build("auto", driver)
    if driver is None:
        yield Finding("·", "no NVIDIA driver: lessons run on the CPU")
    else:
        names = ", ".join(driver.cards) or "no card that it would name"
        newest = f"up to CUDA {driver.cuda:.1f}" if driver.cuda else "unknown CUDA"
        yield Finding("✔", f"NVIDIA driver, {newest}: {names}")
    version = setup.torch_version()
    if not version:
        text = f"PyTorch is not here; the build for {build.kind} will be taken"
        yield Finding("·", f"{text}: {build.reason}")
    elif driver and build.kind == "cuda" and setup.torch_kind() == "cpu":
        python = short_path(setup.interpreter())
        way = f"{python} -m course setup --torch cuda"
        yield Finding("✘", f"PyTorch {version} cannot use that card", way)
    else:
        yield Finding("✔", f"PyTorch {version}")


def look_at_kernel() -> Iterator[Finding]:
    """The kernel that lessons run in."""
    if importlib.util.find_spec("ipykernel"):
        yield Finding("✔", f"the kernel is {short_path(Path(sys.executable))}")
    else:
        yield Finding("·", "the packages are not installed yet")


def look_at_assets() -> Iterator[Finding]:
    """Weights and data, lesson by lesson."""
    if importlib.util.find_spec("filelock") is None:
        return
    from course import fetch
    from course.notebooks import select
    from utils import artifacts

    ready = []
    for path in select():
        number = path.name[:2]
        items = fetch.taken_by(path)
        missing = [i for i in items if not artifacts.read_manifest(i.folder)]
        size = sum(item.megabytes for item in missing)
        names = ", ".join(item.name for item in missing)
        if missing:
            text = f"lesson {number}: {names} to fetch, {size} MB"
            yield Finding("·", text, f"course fetch --for {number}")
        else:
            ready.append(number)
    if ready:
        yield Finding("✔", f"weights and data are here for {', '.join(ready)}")


def look_at_checkout() -> Iterator[Finding]:
    """The checkout, whose notebooks are the course."""
    if not (ROOT / "notebooks").is_dir():
        way = "git clone it again"
        yield Finding("✘", f"there are no notebooks in {short_path(ROOT)}", way)


LOOKS = [
    look_at_checkout,
    look_at_python,
    look_at_git,
    look_at_disk,
    look_at_size,
    look_at_index,
    look_at_torch,
    look_at_kernel,
    look_at_assets,
]
