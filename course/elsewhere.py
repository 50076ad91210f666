"""The course in other places: `python -m course elsewhere oldest | locked | newest | colab`.

`python -m course elsewhere simpletransformers` only builds: the environment of a library that the course
does not install, for the lesson that tries it.

Each place is an environment of its own in `build/elsewhere`. In the first three the unit tests and the
lessons run from this checkout. `colab` is built from the list that Google publishes of its image; there
each lesson starts in an empty folder and a fresh image, from its own badge, as a reader meets it; the unit
tests run in a copy of that image which has been given every requirement.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from packaging.utils import canonicalize_name

from course import bootstrap, publish, runner, verdicts
from course.checkout import clean_commit
from course.notebooks import select
from utils import artifacts
from utils.errors import ROOT, CourseError, build_folder, short_path
from utils.profiles import PROFILES

PLACES = {
    "oldest": "the lowest releases that requirements.txt admits",
    "locked": "the releases of constraints/locked.txt, which `make` installs",
    "newest": "the newest of everything, ranges set aside",
    "colab": "Colab's packages; each lesson from its badge, in an empty folder",
}
# Environments of one lesson each, in which the course does not run: what pip is asked for.
GUESTS = {"simpletransformers": ["simpletransformers", "torch"]}
IMAGE_LIST = "https://raw.githubusercontent.com/googlecolab/backend-info/main/"
# What a build of torch for GPUs brings, in the releases that it alone knows.
CUDA = re.compile(r"(nvidia-(?!ml-py)|cuda-|triton)")
SHOWN = ("torch", "transformers", "datasets", "numpy")
RECORD = ROOT / "results" / "places.json"
# In every environment and in no list: the course itself, and what installs packages.
OURS = {"transformers-end-to-end", "pip", "setuptools", "wheel"}
Facts = dict[str, Any]


def list_of(place: str) -> Path:
    """The constraints of a place."""
    return ROOT / "constraints" / f"{place}.txt"


def find_python(place: str) -> str:
    """The Python that the list of a place names, or this one where that is not here."""
    text = list_of(place).read_text(encoding="utf-8") if place != "newest" else ""
    named = re.search(r"Python (3\.\d+)", text.partition("\n")[0])
    version = named[1] if named else ""
    path = shutil.which(f"python{version}") if version else None
    if named and not path:
        print(
            f"Python {version} is not here: {place} is built with {sys.version[:6]}"
        )
    return path or sys.executable


def call(*command: object, **options: Any) -> None:
    """Run a command that must succeed."""
    words = [str(word) for word in command]
    if subprocess.run(words, **options).returncode:
        what = f"this failed: {' '.join(words)}"
        raise CourseError(what, fix="its own message stands above")


def wanted_in(place: str) -> list[str]:
    """What pip is asked for when a place is built."""
    if place in GUESTS:
        return GUESTS[place]
    if place == "colab":
        text = list_of(place).read_text(encoding="utf-8")
        names = re.findall(r"(?m)^[\w.-]+", text)
        listed = {canonicalize_name(name) for name in names}
        # Of six hundred packages those that a lesson may meet; the rest it must install itself.
        return sorted(listed & (bootstrap.requirements().keys() | {"torchao"}))
    lines = []
    for name in ("requirements.txt", "requirements-test.txt"):
        lines += (ROOT / name).read_text(encoding="utf-8").splitlines()
    texts = [line.partition("#")[0].strip() for line in lines]
    if place == "newest":
        texts = [text.partition(",<")[0] for text in texts]
    return [text for text in texts if text]


def build(place: str) -> Path:
    """The Python of a place, whose environment is made unless it is there and the same."""
    folder = build_folder() / "elsewhere" / place
    wanted = wanted_in(place)
    pins: list[str] = []
    if place != "newest":
        lines = list_of(place).read_text(encoding="utf-8").splitlines()
        pins = [line for line in lines if not CUDA.match(line)]
    mark = artifacts.hash_json([wanted, pins])
    python = folder / "image" / "bin" / "python"
    stamp = folder / "image" / "installed"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == mark:
        return python
    shutil.rmtree(folder / "image", ignore_errors=True)
    about = PLACES.get(place, "an environment of one lesson")
    print(f"{place}: {about}; installing into {folder}", flush=True)
    call(find_python(place), "-m", "venv", folder / "image")
    list_here = folder / "image" / "constraints.txt"
    list_here.write_text("\n".join(pins), encoding="utf-8")
    install = [python, "-m", "pip", "install", "--quiet", "--no-compile"]
    call(*install, "-c", list_here, *wanted)
    stamp.write_text(mark, encoding="utf-8")
    return python


def is_here(place: str) -> bool:
    """Whether this Python has only releases that the list of a place names."""
    pins = {}
    if place != "newest":
        text = list_of(place).read_text(encoding="utf-8")
        for name, version in re.findall(r"(?m)^([\w.-]+)==([^\s;+]+)", text):
            pins[canonicalize_name(name)] = version
    for package in metadata.distributions():
        name = canonicalize_name(package.name)
        # torch names its build behind a plus sign.
        version, *_ = package.version.split("+")
        if name not in OURS and pins.get(name) != version:
            return False
    return True


def clean_environment(**more: str) -> dict[str, str]:
    """The environment without what this checkout has put there."""
    ours = ("COURSE_", "PYTHON", "VIRTUAL_ENV", "JUPYTER")
    kept = {
        name: text for name, text in os.environ.items() if not name.startswith(ours)
    }
    for name in ("COURSE_HOME", "COURSE_TORCH"):
        if name in os.environ:
            kept[name] = os.environ[name]
    return {**kept, **more}


def run_checkout(place: str, only: str | None) -> Facts:
    """The unit tests and the lessons of this checkout in an environment: what became of them."""
    here = is_here(place)
    python = sys.executable if here else str(build(place))
    # What this commit has already run here is taken up and not run again.
    folder = build_folder() / ("" if here else f"elsewhere/{place}/build")
    environment = clean_environment(COURSE_BUILD=str(folder), PYTHONPATH=str(ROOT))
    tests = run_tests(python, environment)
    run = [python, "-m", "course", "run", "--profile", "smoke"]
    run += ["--only", only or ""]
    subprocess.run(run, cwd=ROOT, env=environment)
    shelf = folder / "run" / "smoke"
    lessons = {}
    for path in select(only):
        result = artifacts.read_json(shelf / f"{path.stem}.json") or {}
        status = result.get("status", "not run")
        problems = [result.get("error") or status]
        if status == "passed":
            problems = verdicts.problems_of(shelf / path.name, "smoke", path)
        seconds = result.get("seconds", 0)
        lessons[path.name[:2]] = {"seconds": seconds, "problems": problems}
    return {"lessons": lessons, "python": python, **tests}


def run_tests(python: str, environment: dict[str, str]) -> Facts:
    """The unit tests of this checkout with the Python of a place: their last line, and whether it is red."""
    tests = [python, "-m", "pytest", "tests", "-n", "auto"]
    tests += ["-m", "not slow and not release"]
    done = subprocess.run(
        tests, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )
    print(done.stdout, flush=True)
    lines = done.stdout.strip().splitlines() or ["no test ran"]
    return {"tests": lines[-1].strip("= "), "red": done.returncode != 0}


def run_image_tests(image: Path) -> Facts:
    """The unit tests in a copy of Colab's image; what it lacks is installed as the set-up cell does it."""
    folder = build_folder() / "elsewhere" / "colab" / "tests"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(image, folder / "image", symlinks=True, copy_function=os.link)
    python = str(folder / "image" / "bin" / "python")
    wanted = wanted_in("locked")
    code = "from course import bootstrap; "
    code += f"bootstrap.prepare({wanted}, bootstrap.installed())"
    environment = clean_environment(
        COURSE_BUILD=str(folder / "build"), PYTHONPATH=str(ROOT)
    )
    call(python, "-c", code, cwd=ROOT, env=environment)
    return run_tests(python, environment)


def publish_here(folder: Path) -> str:
    """A repository as it will lie on GitHub: this commit with its tag, and the copies' branch."""
    shutil.rmtree(folder, ignore_errors=True)
    facts = publish.project()
    work = folder / "work"
    call("git", "clone", "--quiet", ROOT, work)
    git = [
        "git",
        "-C",
        work,
        "-c",
        "user.name=course",
        "-c",
        "user.email=course@localhost",
    ]
    call(*git, "tag", "--force", f"v{facts['version']}")
    call(*git, "checkout", "--quiet", "-B", publish.BRANCH)
    publish.publish(work)
    call(*git, "commit", "--quiet", "--all", "--message", "Copies for Colab")
    return work.as_uri()


def notebook_behind(badge: str, address: str) -> str:
    """The notebook that a Colab badge opens, from the local repository that stands for GitHub."""
    place = re.search(r"/github/[^/]+/[^/]+/blob/([^/]+)/(notebooks/[^)]+)", badge)
    if not place:
        raise CourseError(f"this badge opens no notebook: {badge}")
    folder = address.removeprefix("file://")
    show = ["git", "-C", folder, "show", f"{place[1]}:{place[2]}"]
    return subprocess.run(show, check=True, capture_output=True, text=True).stdout


def run_from_badge(path: Path, image: Path, address: str) -> Facts:
    """Run one lesson in a fresh image and an empty folder, from its own badge."""
    import nbformat

    folder = build_folder() / "elsewhere" / "colab" / path.name[:2]
    shutil.rmtree(folder, ignore_errors=True)
    content = folder / "content"
    content.mkdir(parents=True)
    # Linked and not copied: what pip replaces in one is untouched in the other.
    shutil.copytree(image, folder / "image", symlinks=True, copy_function=os.link)
    badge = re.search(r"https://colab[^)]+", path.read_text(encoding="utf-8"))
    text = notebook_behind(badge[0] if badge else "", address)
    notebook = nbformat.reads(text, as_version=4)
    environment = clean_environment(
        COLAB_RELEASE_TAG="release-colab",
        COURSE_PROFILE="smoke",
        GIT_CONFIG_COUNT="1",
        GIT_CONFIG_KEY_0=f"url.{address}.insteadOf",
        GIT_CONFIG_VALUE_0=publish.project()["repository"],
    )
    start = time.monotonic()
    error = execute(notebook, content, folder / "image", environment)
    seconds = round(time.monotonic() - start, 1)
    executed = folder / path.name
    executed.write_text(nbformat.writes(notebook), encoding="utf-8")
    problems = [error] if error else verdicts.problems_of(executed, "smoke")
    facts = {"seconds": seconds, "problems": problems}
    facts["set_up"] = cell_seconds(notebook)
    if not problems:
        shutil.rmtree(folder / "image")
        shutil.rmtree(content)
    return facts


def execute(notebook: Any, folder: Path, image: Path, environment: Facts) -> str:
    """Execute a notebook with the Python of an image; the error that ended it, if one did."""
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import KernelManager
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    command = [str(image / "bin" / "python"), "-m", "ipykernel_launcher"]
    kernel = {"argv": [*command, "-f", "{connection_file}"], "language": "python"}
    kernel["display_name"] = "image"
    place = folder.parent / "kernels" / "image" / "kernel.json"
    place.parent.mkdir(parents=True, exist_ok=True)
    artifacts.write_json(place, kernel)
    manager = KernelManager(kernel_name="image")
    manager.kernel_spec_manager = KernelSpecManager(
        kernel_dirs=[str(place.parent.parent)], ensure_native_kernel=False
    )
    client = NotebookClient(notebook, km=manager, timeout=1800)
    client.resources = {"metadata": {"path": str(folder)}}
    try:
        client.execute(env=environment)
    except CellExecutionError as problem:
        return f"{problem.ename}: {problem.evalue}"[:500]
    finally:
        # A client ends only the kernels that it has made itself.
        manager.shutdown_kernel(now=True)
    return ""


def cell_seconds(notebook: Any) -> float:
    """Seconds of the set-up cell."""
    for cell in notebook.cells:
        times = cell.metadata.get("execution", {})
        if (
            "bootstrap" in cell.metadata.get("tags", [])
            and "shell.execute_reply" in times
        ):
            begin, end = [
                datetime.datetime.fromisoformat(times[name])
                for name in ("iopub.execute_input", "shell.execute_reply")
            ]
            return round((end - begin).total_seconds(), 1)
    return 0.0


def run_colab(only: str | None) -> Facts:
    """Every lesson from its badge in an image of its own."""
    python = build("colab")
    address = publish_here(build_folder() / "elsewhere" / "colab" / "repository")

    def run_and_show(path: Path) -> Facts:
        facts = run_from_badge(path, python.parent.parent, address)
        mark = "✘" if facts["problems"] else "✔"
        times = f"{facts['seconds']:7.1f} s, set-up {facts['set_up']:5.1f} s"
        print(f"{mark} {path.stem:36} {times}", *facts["problems"], flush=True)
        return facts

    chosen = select(only)
    # Each has a folder, an image and a kernel of its own.
    with ThreadPoolExecutor(runner.count_jobs(PROFILES["smoke"])) as pool:
        results = list(pool.map(run_and_show, chosen))
    lessons = {path.name[:2]: facts for path, facts in zip(chosen, results)}
    tests = run_image_tests(python.parent.parent)
    return {"lessons": lessons, "python": python, **tests}


def record(place: str, facts: Facts) -> None:
    """Keep what became of a place, from a clean commit only.

    Lessons that ran alone join the row of the others if every package is that of the row.
    """
    try:
        commit = clean_commit()
    except CourseError as error:
        print(f"not recorded: {error}")
        return
    date = f"{datetime.date.today()}"
    versions = versions_of(facts["python"])
    records = artifacts.read_json(RECORD) or {}
    row = records.get(place, {})
    same = all(row.get(name) == version for name, version in versions.items())
    lessons = dict(row["lessons"]) if row and same else {}
    for name, lesson in facts["lessons"].items():
        lessons[name] = {**lesson, "commit": commit, "date": date}
    missing = [path.name[:2] for path in select() if path.name[:2] not in lessons]
    if missing:
        print(f"not recorded: {place} has never run {', '.join(missing)}")
        return
    kept: Facts = {"date": date, "commit": commit, **versions, "lessons": lessons}
    kept["tests"] = facts.get("tests", "")
    artifacts.write_json(RECORD, {**records, place: kept})


def versions_of(python: str) -> dict[str, str]:
    """The versions of a Python and of the packages that the table shows, and a hash of them all."""
    code = "import json, sys, importlib.metadata as m; "
    code += "pairs = {(d.name.lower(), d.version) for d in m.distributions()}; "
    code += "print(json.dumps([sys.version.split()[0], sorted(pairs)]))"
    asked = subprocess.run([python, "-c", code], capture_output=True, check=True)
    version, pairs = json.loads(asked.stdout)
    packages = dict(pairs)
    shown = {name: packages[name] for name in SHOWN}
    every = hashlib.sha256(json.dumps(pairs).encode()).hexdigest()[:16]
    return {"python": version, **shown, "packages": every}


def run(names: list[str], only: str | None, renew: bool) -> list[tuple[Path, str]]:
    """Run the course in the places named; what was wrong, by lesson."""
    problems = []
    for place in names or list(PLACES):
        if place not in PLACES and place not in GUESTS:
            what = f"there is no place {place!r}"
            known = ", ".join([*PLACES, *GUESTS])
            raise CourseError(what, fix=f"choose one of {known}")
        if renew:
            renew_list(place)
        if place in GUESTS:
            print(f"{place}: {short_path(build(place))}")
            continue
        facts = run_colab(only) if place == "colab" else run_checkout(place, only)
        record(place, facts)
        if facts.get("red"):
            problems.append((ROOT / "tests", f"{place}: {facts['tests']}"))
        for path in select(only):
            for text in facts["lessons"][path.name[:2]]["problems"]:
                problems.append((path, f"{place}: {text}"))
    return problems


def renew_list(place: str) -> None:
    """Write the list of a place anew: of Colab from Google, of the oldest from the ranges."""
    if place == "oldest":
        lines = lowest()
        about = "The lowest releases that requirements.txt admits"
        about = f"# {about}, and the newest of what they bring; Python 3.11"
    elif place == "colab":
        lines = pins_of(download("pip-freeze.txt"))
        python = re.search(r"Python (3\.\d+)", download("os-info.txt"))
        named = python[0] if python else "Python"
        today = datetime.date.today()
        about = f"# The packages of Colab's CPU image, {named}, as Google publishes them"
        about += f": googlecolab/backend-info, {today}."
    elif place in GUESTS:
        lines = frozen(place)
        about = f"# {' and '.join(GUESTS[place])} with what they bring, as near to"
        about += " constraints/locked.txt as they allow; Python 3.11"
    else:
        raise CourseError(f"the list of {place!r} is not renewed by this command")
    command = f"# python -m course elsewhere {place} --renew"
    text = "\n".join([about, command, "", *lines, ""])
    list_of(place).write_text(text, encoding="utf-8")


def download(name: str) -> str:
    """A file that Google publishes about its image."""
    with urllib.request.urlopen(IMAGE_LIST + name, timeout=60) as page:
        return page.read().decode()


def pins_of(freeze: str) -> list[str]:
    """The releases of a frozen list, also where it gives an address instead.

    >>> pins_of("a==1.0\\ntorch @ https://x/torch-2.11.0%2Bcpu-cp313-linux.whl\\nb @ git+x@1")
    ['a==1.0', 'torch==2.11.0']
    >>> pins_of("google-colab @ file:///dist/google_colab-1.0.0.tar.gz")
    ['google-colab==1.0.0']
    """
    pins = []
    for line in freeze.splitlines():
        name, _, address = line.partition(" @ ")
        file = unquote(address.rpartition("/")[2])
        version = re.match(r"[A-Za-z0-9_]+-(\d+(\.\d+)*)", file)
        if re.fullmatch(r"[\w.-]+==\S+", line):
            pins.append(line)
        elif version:
            pins.append(f"{name}=={version[1]}")
    return pins


def frozen(place: str) -> list[str]:
    """What pip installs for a guest beside the releases of the locked list."""
    shutil.copy(list_of("locked"), list_of(place))
    freeze = [str(build(place)), "-m", "pip", "freeze"]
    done = subprocess.run(freeze, capture_output=True, text=True, check=True)
    pins = [pin.partition("+")[0] for pin in pins_of(done.stdout)]
    return [pin for pin in pins if not CUDA.match(pin)]


def lowest() -> list[str]:
    """The lowest release of each requirement, as uv finds them; torch's CUDA libraries left out."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet"]
    command += ["--resolution", "lowest-direct", "--python-version", "3.11"]
    command += [
        "--no-header",
        "--no-annotate",
        "requirements.txt",
        "requirements-test.txt",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise CourseError(
            f"uv found no releases: {done.stderr}", fix="pip install uv"
        )
    return [line for line in done.stdout.splitlines() if not CUDA.match(line)]
