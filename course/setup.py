"""Makes `.venv` and fills it: `python3 -m course setup`. Python's own library alone is needed for it."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.util
import os
import queue
import re
import shutil
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

from course.torch_build import ASKED, Build, choose_build, find_driver
from utils.errors import CourseError, short_path

CHECKOUT = Path(__file__).resolve().parent.parent
VENV = CHECKOUT / ".venv"
LOG = VENV / "setup.log"
NEEDED = CHECKOUT / "requirements.txt"
NEEDED_FOR_TESTS = CHECKOUT / "requirements-test.txt"
# What builds the pages stands beside the environment, so that no lesson sees it.
NEEDED_FOR_SITE = CHECKOUT / "requirements-site.txt"
SITE_TOOLS = VENV / "site"
# The exact set of packages that the course is tested with.
CONSTRAINTS = CHECKOUT / "constraints" / "locked.txt"
# The newest Python for which every compiled package has a wheel.
NEWEST = (3, 14)
PATIENCE = 5  # seconds for an index to answer
Settings = dict[str, str]


def programs() -> Path:
    """The folder of an environment's programs."""
    return VENV / ("Scripts" if os.name == "nt" else "bin")


def interpreter() -> Path:
    """The environment's Python."""
    return programs() / ("python.exe" if os.name == "nt" else "python")


def run(asked: str = "", tests: bool = False) -> bool:
    """Make the environment, choose a build of PyTorch, install; False if all of it was done before."""
    asked = asked or os.environ.get("COURSE_TORCH") or "auto"
    if asked not in ASKED:
        fix = f"choose one of {', '.join(ASKED)}"
        raise CourseError(
            f"unknown build of PyTorch {asked!r}", "COURSE_TORCH", fix
        )
    start = time.monotonic()
    make_environment()
    marks = marks_of(tests)
    done = all(read_stamp(stamp) == mark for stamp, mark in marks.items())
    if done and asked in ("auto", torch_kind()):
        return False
    LOG.write_text("", encoding="utf-8")
    install_torch(asked)
    for file in [NEEDED, NEEDED_FOR_TESTS] if tests else [NEEDED]:
        # setuptools is what the course itself is then installed by.
        what = f"packages of {file.name}"
        install(what, "-c", CONSTRAINTS, "-r", file, "setuptools")
    install("course", "--no-deps", "--no-build-isolation", "-e", CHECKOUT)
    compile_packages()
    if asked not in ("auto", torch_kind()):
        what = f"PyTorch for {asked} was asked for, and pip has none of that build"
        raise CourseError(what, "COURSE_TORCH", "look into " + short_path(LOG))
    for stamp, mark in marks.items():
        stamp.write_text(mark, encoding="utf-8")
    seconds = f"{time.monotonic() - start:.0f} s"
    print(f"set up in {seconds} with PyTorch {torch_version()}")
    print(f"next: {short_path(programs() / 'course')} lab")
    return True


def install_site_tools() -> bool:
    """Put what builds the pages into a folder of its own; False if it is there."""
    stamp = SITE_TOOLS / ".installed"
    mark = hash_of([NEEDED_FOR_SITE])
    if read_stamp(stamp) == mark:
        return False
    shutil.rmtree(SITE_TOOLS, ignore_errors=True)
    options = ["--no-deps", "--target", SITE_TOOLS]
    install(f"packages of {NEEDED_FOR_SITE.name}", *options, "-r", NEEDED_FOR_SITE)
    stamp.write_text(mark, encoding="utf-8")
    return True


def marks_of(tests: bool) -> dict[Path, str]:
    """The stamps that an environment has when it is done, each with a hash of what it is made from."""
    base = [NEEDED, CONSTRAINTS, CHECKOUT / "pyproject.toml"]
    marks = {VENV / ".installed": hash_of(base)}
    if tests:
        marks[VENV / ".installed-for-tests"] = hash_of([*base, NEEDED_FOR_TESTS])
    return marks


def read_stamp(stamp: Path) -> str:
    """What a stamp says; nothing where it is missing."""
    return stamp.read_text(encoding="utf-8") if stamp.exists() else ""


def hash_of(files: list[Path]) -> str:
    """A hash of the content of files."""
    together = b"".join(path.read_bytes() for path in files)
    return hashlib.sha256(together).hexdigest()


# the environment --------------------------------------------------------------------------------


def why_no_environment() -> str:
    """What keeps this Python from making one, in words; nothing if it can."""
    if sys.version_info[:2] > NEWEST:
        return "PyTorch has no wheels for a Python this new"
    if importlib.util.find_spec("ensurepip") is None:
        return "this Python comes without venv and ensurepip"
    return ""


def how_to_make_one() -> str:
    """The one thing to do about it."""
    if sys.version_info[:2] > NEWEST:
        newest = f"python{NEWEST[0]}.{NEWEST[1]}"
        return f"run the same command with an older Python, such as {newest}"
    return "on Debian and Ubuntu: sudo apt install python3-venv, then again"


def make_environment() -> None:
    """Make `.venv`, unless it is there and its pip runs."""
    command = [str(interpreter()), "-m", "pip", "--version"]
    with contextlib.suppress(OSError):
        if not subprocess.run(command, capture_output=True).returncode:
            return
    problem = why_no_environment()
    if problem:
        raise CourseError(problem, sys.executable, how_to_make_one())
    print(f"making {short_path(VENV)} with Python {sys.version.split()[0]}")
    make = [sys.executable, "-m", "venv", "--clear", str(VENV)]
    answer = subprocess.run(
        make, capture_output=True, encoding="utf-8", errors="replace"
    )
    if answer.returncode:
        words = (answer.stdout + answer.stderr).strip()
        what = f"the environment could not be made: {words}"
        raise CourseError(what, VENV, "mend that, and run the command again")


# the build of PyTorch ---------------------------------------------------------------------------


def read_torch(name: str) -> str:
    """One line of the `torch/version.py` that is installed; empty without it. Nothing is imported."""
    prefix = VENV if VENV.exists() else Path(sys.prefix)
    for folder in ("lib/python*", "Lib"):
        for path in prefix.glob(f"{folder}/site-packages/torch/version.py"):
            text = path.read_text(encoding="utf-8")
            line = re.search(rf"(?m)^{name}\b.*?= *(.*)$", text)
            return line[1].strip("'\"") if line else ""
    return ""


def torch_version() -> str:
    """The PyTorch that is installed, such as `2.13.0+cpu`."""
    return read_torch("__version__")


def torch_kind() -> str:
    """The build that is installed, `cpu` or `cuda`; empty without one."""
    cuda = read_torch("cuda")
    if not cuda:
        return ""
    return "cpu" if cuda == "None" else "cuda"


def pinned_torch() -> str:
    """The release of PyTorch in the constraints, such as `2.13.0`."""
    pins = CONSTRAINTS.read_text(encoding="utf-8")
    pin = re.search(r"(?m)^torch==([^\s;]+)", pins)
    return pin[1] if pin else ""


def install_torch(asked: str) -> None:
    """Install PyTorch first where the usual wheel is not the one for this machine.

    It comes from PyTorch's index alone and without what it needs, which pip's own index has.
    """
    pin = pinned_torch()
    right_release = torch_version().partition("+")[0] == pin
    if right_release and asked in ("auto", torch_kind()):
        return
    build = choose_build(asked, find_driver())
    place = f" from {build.place}" if build.place else ""
    print(f"PyTorch for {build.kind}{place}: {build.reason}", flush=True)
    options = ["--no-deps", f"torch=={pin}"]
    if right_release:
        options.append("--force-reinstall")
    problem = why_not_from(build) if build.place else ""
    if problem:
        print(f"  not from there: {problem}; pip takes what it finds", flush=True)
    elif build.place:
        options += ["--index-url", build.place]
    # Else it comes with all the rest, from where the rest comes from.
    if right_release or "--index-url" in options:
        install("PyTorch", *options)


def pip_settings(python: Path | str = sys.executable) -> Settings:
    """pip's options for downloads from its files and the environment, which has the last word."""
    command = [python, "-m", "pip", "config", "list"]
    listing = subprocess.run(command, capture_output=True, encoding="utf-8").stdout
    settings = {}
    for section in ("global.", "download.", ":env:."):
        for line in listing.splitlines():
            name, _, value = line.partition("=")
            if name.startswith(section):
                settings[name.removeprefix(section)] = ast.literal_eval(value)
    return settings


def why_not_from(build: Build) -> str:
    """Why a build is not to be had from PyTorch's index, in words; nothing if it is."""
    settings = pip_settings(interpreter())
    for name in ("index-url", "no-index"):
        if settings.get(name):
            return f"pip is set to {name}={settings[name]}"
    if answers(f"{build.place}/torch/", settings):
        return ""
    return f"it does not answer within {PATIENCE} s"


def answers(address: str, settings: Settings) -> bool:
    """Whether an address answers soon."""
    cafile = settings.get("cert") or None
    with contextlib.suppress(OSError, ValueError):
        context = ssl.create_default_context(cafile=cafile)
        asked = urllib.request.Request(address, method="HEAD")
        urllib.request.urlopen(asked, timeout=PATIENCE, context=context).close()
        return True
    return False


# pip --------------------------------------------------------------------------------------------


class Progress:
    """One line that moves on a terminal; in a log nothing but where a new stage begins."""

    def __init__(self, what: str) -> None:
        self.start = time.monotonic()
        self.shown = sys.stdout.isatty()
        self.text = f"looking for {what}"
        self.fetched = 0
        pins = CONSTRAINTS.read_text(encoding="utf-8")
        self.most = len(re.findall(r"(?m)^[^#\n]+==", pins))
        print(f"installing {what}", flush=True)

    def read(self, line: str) -> None:
        """Take up what a line of pip's tells."""
        archive = re.search(r"([^/\s]+)-\d\S*\.(whl|tar\.gz|zip)( \(.*\))?$", line)
        installing = line.startswith("Installing collected packages:")
        if installing:
            count = line.count(",") + 1
            self.text = f"unpacking {count} packages"
            if not self.shown:
                print(f"  {self.text}", flush=True)
        elif archive:
            self.fetched += 1
            package = f"package {self.fetched} of at most {self.most}"
            self.text = f"{package}: {archive[1]}{archive[3] or ''}"

    def show(self) -> None:
        """Draw the line."""
        if self.shown:
            seconds = time.monotonic() - self.start
            line = f"  {self.text}, {seconds:.0f} s"
            print(f"\r\033[K{line[:100]}", end="", flush=True)

    def end(self) -> None:
        """Wipe the line away."""
        if self.shown:
            print("\r\033[K", end="", flush=True)


def install(what: str, *arguments: object) -> None:
    """Let pip install something, showing how far it is; all that it says is kept in `.venv/setup.log`."""
    command = [str(interpreter()), "-m", "pip", "install"]
    command += ["--disable-pip-version-check", "--progress-bar=off"]
    # Python compiles what is imported, a small part of it all; see `compile_packages`.
    command.append("--no-compile")
    command += map(str, arguments)
    progress = Progress(what)
    lines: queue.Queue[str] = queue.Queue()
    with (
        LOG.open("a", encoding="utf-8") as log,
        subprocess.Popen(
            command,
            cwd=CHECKOUT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        ) as child,
    ):
        reader = threading.Thread(target=read_lines, args=(child, lines))
        reader.start()
        while reader.is_alive() or not lines.empty():
            with contextlib.suppress(queue.Empty):
                line = lines.get(timeout=0.5)
                log.write(line)
                progress.read(line.rstrip())
            progress.show()
    progress.end()
    if child.returncode:
        raise pip_failed(what)


def compile_packages() -> None:
    """Compile all packages where Python is told to keep nothing that it compiles: importing PyTorch
    and transformers would take it some seconds more in every process."""
    if not sys.dont_write_bytecode:
        return
    every_core = ("-j", "0")
    # Some packages bring files that no Python of today can compile, and that nobody imports.
    subprocess.run(
        [interpreter(), "-m", "compileall", "-qq", *every_core, VENV], cwd=CHECKOUT
    )


def read_lines(child: subprocess.Popen, lines: queue.Queue[str]) -> None:
    """In a thread: pass on what a process says."""
    for line in child.stdout or ():
        lines.put(line)


def pip_failed(what: str) -> CourseError:
    """pip's own words, and what to do about them."""
    text = LOG.read_text(encoding="utf-8")
    errors = [line for line in text.splitlines() if line.startswith("ERROR")]
    words = "\n".join(errors[-3:] or text.splitlines()[-3:])
    fix = "connect to a network and run the same command again"
    if "No matching distribution" in words:
        fix = "look up “pip finds no matching version” in docs/troubleshooting.md"
    if "No space left" in text:
        fix = "make room on the disk and run the same command again"
    message = f"pip could not install the {what}:\n{words}"
    return CourseError(message, LOG, fix)
