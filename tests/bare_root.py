"""Set the course up where there is nothing but what the README names, by the README's own words.

    python -m tests.bare_root [--all] [--try]

A Debian with Python, venv, make, git and certificates is made by `debootstrap`: no npm, no compiler, no
CUDA, no caches. A user without rights clones this checkout there and types what stands in the code blocks
of README.md. pip's settings go along as environment variables, and the folders that they name are
visible. What was typed, how long it took and what it printed is written to `results/bare_root.json`,
for a clean commit only; `--try` writes nothing. `--all` runs every lesson and not only lesson 00.
Linux and root only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from course.checkout import clean_commit
from course.setup import pip_settings
from utils import artifacts
from utils.errors import ROOT, CourseError, build_folder
from utils.machine import count_cores, machine_facts

PACKAGES = "python3,python3-venv,make,git,ca-certificates"
SUITE = "bookworm"
RECORD = ROOT / "results" / "bare_root.json"
USER = 1000
HOME = "/home/learner"
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
# It only ends what would never come.
PATIENCE = 3600
Facts = dict[str, Any]


def blocks() -> list[list[str]]:
    """The commands of each code block of the README, comments cut off."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = []
    for block in re.findall(r"```bash\n(.*?)```", text, re.S):
        lines = [re.sub(r"\s+#.*", "", line) for line in block.splitlines()]
        found.append(lines)
    return found


def commands(everything: bool) -> list[str]:
    """What a reader types, block after block of the sections before the costs and the other systems."""
    chosen: list[str] = []
    for block in blocks():
        if any("conda" in line for line in block):
            break
        chosen += block
    # Lesson 00 stands for the others unless all are asked for.
    if not everything:
        chosen = [c + " ONLY=00" if c == "make run" else c for c in chosen]
    return chosen


def make_base() -> Path:
    """The bare Debian, made once."""
    base = build_folder() / "bare_root" / SUITE
    if (base / "complete").exists():
        return base
    if not shutil.which("debootstrap"):
        what = "debootstrap is missing"
        raise CourseError(what, fix="apt-get install debootstrap")
    shutil.rmtree(base, ignore_errors=True)
    base.mkdir(parents=True)
    include = f"--include={PACKAGES}"
    make = ["debootstrap", "--variant=minbase", include, SUITE, str(base)]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    (base / "complete").touch()
    return base


def pip_environment() -> dict[str, str]:
    """pip's settings on this machine as environment variables."""
    settings = pip_settings(sys.executable)
    wanted = (
        "index-url",
        "extra-index-url",
        "find-links",
        "default-timeout",
        "cert",
    )
    return {
        "PIP_" + name.upper().replace("-", "_"): settings[name]
        for name in wanted
        if name in settings
    }


def shared_folders(environment: dict[str, str]) -> Iterator[Path]:
    """Folders and files of this machine that pip's settings name, and the certificates."""
    words = " ".join(environment.values()).split()
    for word in words:
        path = Path(urlparse(word).path)
        if path.is_absolute() and not word.startswith("http"):
            # An index in a folder may hold its files beside its pages.
            yield path.parent if word.startswith("file:") else path
    if Path(CERTIFICATES).exists():
        yield Path(CERTIFICATES)


def git_folder() -> Path:
    """Where git keeps this checkout's history, which for a second work tree is elsewhere."""
    command = ["git", "rev-parse", "--path-format=absolute", "--git-common-dir"]
    return Path(subprocess.check_output(command, cwd=ROOT, text=True).strip())


class BareRoot:
    """The root of one run: the bare Debian below, what the run writes above."""

    def __init__(self, base: Path, place: Path) -> None:
        self.root = place / "root"
        self.folder = HOME
        self.environment = {
            "HOME": HOME,
            "PATH": "/usr/bin:/bin",
            "LANG": "C.UTF-8",
            **pip_environment(),
        }
        for name in ("root", "upper", "work"):
            (place / name).mkdir(parents=True)
        layers = f"lowerdir={base},upperdir={place}/upper,workdir={place}/work"
        mount("-t", "overlay", "overlay", "-o", layers, self.root)
        mount("-t", "proc", "proc", self.root / "proc")
        mount("--rbind", "/dev", self.root / "dev")
        for path in {*shared_folders(pip_environment()), ROOT, git_folder()}:
            self.share(path)
        for name in ("hosts", "resolv.conf"):
            shutil.copy(f"/etc/{name}", self.root / "etc" / name)
        home = self.root / HOME[1:]
        home.mkdir()
        # The address of the README stands for this checkout.
        text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        address = re.search(r'Repository = "(.+)"', text)
        assert address
        here = f'[url "{ROOT}"]\n\tinsteadOf = {address[1]}\n'
        (home / ".gitconfig").write_text(f"{here}[safe]\n\tdirectory = *\n")
        os.chown(home, USER, USER)

    def share(self, path: Path) -> None:
        """Make a file or folder of this machine visible at its own place, for reading."""
        path = path.resolve()
        target = self.root / str(path)[1:]
        if path.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch()
        mount("--bind", "-o", "ro", path, target)

    def start(self, command: str) -> subprocess.Popen:
        """Start what the user types."""
        # Whoever types it is where the last `cd` led.
        script = f"cd {shlex.quote(self.folder)} && exec {command}"
        variables = [f"{name}={text}" for name, text in self.environment.items()]
        outer = ["chroot", f"--userspec={USER}:{USER}", str(self.root)]
        inner = ["env", "-i", *variables, "bash", "-c", script]
        return subprocess.Popen(
            [*outer, *inner],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )

    def type(self, command: str) -> Facts:
        """Type one command; JupyterLab has done its part when it answers."""
        print(f"$ {command}", flush=True)
        start = time.monotonic()
        if command.startswith("cd "):
            self.folder = f"{self.folder}/{command[3:].strip()}"
            return {"command": command, "seconds": 0.0, "ended": "0", "printed": []}
        child = self.start(command)
        lines: list[str] = []
        answered = threading.Event()

        def listen() -> None:
            for line in child.stdout or ():
                print("  " + line, end="", flush=True)
                lines.append(line.rstrip())
                if not answered.is_set() and answers(line):
                    answered.set()
                    os.killpg(child.pid, signal.SIGTERM)

        reader = threading.Thread(target=listen)
        reader.start()
        child.wait(timeout=PATIENCE)
        reader.join()
        ended = "answered" if answered.is_set() else str(child.returncode)
        seconds = round(time.monotonic() - start, 1)
        facts: Facts = {"command": command, "seconds": seconds, "ended": ended}
        # Jupyter's own chatter, with its secret address, is nobody's record.
        facts["printed"] = [line for line in lines if not line.startswith("[")][
            -40:
        ]
        if answered.is_set():
            facts["printed"] = [
                line for line in facts["printed"] if "token" not in line
            ]
        return facts


def answers(line: str) -> bool:
    """Whether a line names JupyterLab's address and the server gives the notebook that it opens."""
    address = re.search(r"http://(localhost|127.0.0.1):\d+/\S*token=\w+", line)
    if not address:
        return False
    parts = urlparse(address[0])
    notebook = parts.path.partition("/tree/")[2]
    page = parts._replace(path=f"/api/contents/{notebook}").geturl()
    # The address is told a moment before the server listens.
    with contextlib.suppress(urllib.error.URLError):
        with urllib.request.urlopen(page, timeout=60) as answer:
            return bool(json.load(answer)["content"]["cells"])
    time.sleep(0.5)
    return answers(line)


def mount(*arguments: object) -> None:
    """Mount, in this process's own namespace."""
    subprocess.run(["mount", *map(str, arguments)], check=True)


def versions(bare: BareRoot) -> dict[str, str]:
    """What is installed there: the system's tools, and the packages that matter."""
    tools = (
        "cat /etc/debian_version; python3 --version; make --version; git --version"
    )
    child = bare.start(f"bash -c {shlex.quote(tools)}")
    words = [line for line in child.communicate()[0].splitlines() if line]
    listing = bare.start(".venv/bin/python -m pip list --format=json")
    packages = json.loads(listing.communicate()[0].splitlines()[0])
    names = ("torch", "transformers", "datasets", "jupyterlab", "pip")
    chosen = {p["name"]: p["version"] for p in packages if p["name"] in names}
    return {
        "Debian": words[0],
        "tools": "; ".join(words[1:3] + words[-1:]),
        **chosen,
    }


def first_start(facts: Facts) -> str:
    """The README's table of the first start, from a record."""
    cold, warm = parts(facts["typed"]), parts(facts["again"])
    cores = facts["machine"]["cores allowed"]
    where = f"{cores} core{'' if str(cores) == '1' else 's'}, {facts['date']}"
    lines = [f"| step | on {where} | once more, pip's cache filled |"]
    lines += ["|:--|--:|--:|"]
    for step, seconds in cold.items():
        lines.append(f"| {step} | {seconds:.0f} s | {warm[step]:.0f} s |")
    return "\n".join(lines)


def parts(typed: list[Facts]) -> dict[str, float]:
    """How long each step took from `git clone` to JupyterLab with lesson 00."""
    steps = {step["command"]: step for step in typed}
    clone, start = typed[0]["seconds"], steps["make lab"]["seconds"]
    printed = "\n".join(steps["make lab"]["printed"])
    packages = seconds_in(r"set up in (\d+) s", printed)
    weights = seconds_in(r"done in (\d+) s", printed) if "done in" in printed else 0
    return {
        "`git clone`": clone,
        "environment and packages, with a line that moves": packages,
        "the weights of the first lesson, 93 MB": weights,
        "JupyterLab answers with the lesson": start - packages - weights,
        "together": clone + start,
    }


def fill(text: str, table: str) -> str:
    """The README with that table between its marks."""
    before, _, rest = text.partition("<!-- start:begin -->")
    _, _, after = rest.partition("<!-- start:end -->")
    return f"{before}<!-- start:begin -->\n{table}\n<!-- start:end -->{after}"


def seconds_in(pattern: str, text: str) -> int:
    """The seconds that a line of the set-up tells."""
    match = re.search(pattern, text)
    assert match, f"no line of the first start says {pattern!r}"
    return int(match[1])


def absent(bare: BareRoot) -> list[str]:
    """Which of the things that the course must not need are not there; all of them."""
    unwanted = ["npm", "node", "gcc", "cc", "nvidia-smi", "nvcc", "pip", "curl"]
    child = bare.start(f"bash -c {shlex.quote('command -v ' + ' '.join(unwanted))}")
    present = child.communicate()[0].split()
    assert not present, f"this root is not bare: {present}"
    return unwanted


def start_again(bare: BareRoot, typed: list[Facts]) -> list[Facts]:
    """Clone and start once more, as a reader does who has deleted the folder: her caches are filled."""
    shutil.rmtree(bare.root / HOME[1:] / "course")
    bare.folder = HOME
    lines = [step["command"] for step in typed]
    return [bare.type(line) for line in lines[: lines.index("make lab") + 1]]


def run(everything: bool, record: bool) -> int:
    """Type everything; 0 if all of it ended well."""
    place = build_folder() / "bare_root" / "run"
    shutil.rmtree(place, ignore_errors=True)
    bare = BareRoot(make_base(), place)
    facts: Facts = {"commit": clean_commit(), "date": str(datetime.now(UTC).date())}
    facts["machine"] = machine_facts()
    facts["machine"]["cores allowed"] = str(count_cores())
    facts["absent"] = absent(bare)
    facts["typed"] = []
    for command in commands(everything):
        typed = bare.type(command)
        facts["typed"].append(typed)
        if typed["ended"] not in ("0", "answered"):
            print(f"✘ {command}: status {typed['ended']}")
            break
    well = facts["typed"][-1]["ended"] in ("0", "answered")
    if well:
        facts["versions"] = versions(bare)
        facts["again"] = start_again(bare, facts["typed"])
    if well and record:
        artifacts.write_json(RECORD, facts)
        readme = ROOT / "README.md"
        text = readme.read_text(encoding="utf-8")
        readme.write_text(fill(text, first_start(facts)), encoding="utf-8")
        print(f"written: {RECORD} and the table of the first start in {readme}")
    return 0 if well else 1


def main() -> int:
    """Read the arguments; go into a namespace of our own, so that nothing mounted outlives us."""
    parser = argparse.ArgumentParser(prog="python -m tests.bare_root")
    parser.add_argument("--all", action="store_true", help="every lesson")
    parser.add_argument("--try", dest="record", action="store_false")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.record:
        clean_commit()
    if options.inside:
        return run(options.all, options.record)
    space = [
        "unshare",
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
    ]
    again = [sys.executable, "-m", "tests.bare_root", "--inside", *sys.argv[1:]]
    return subprocess.call([*space, *again], cwd=ROOT)


if __name__ == "__main__":
    sys.exit(main())
