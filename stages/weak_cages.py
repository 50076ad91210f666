"""Cages that do not hold, one a little stronger than the other, and attacks that get out of each.

They show why the sandbox is built as it is. The attacks are tame: each does what it does to a
folder of its own, a few dozen processes or a few hundred megabytes, and an outer guard ends
everything after some seconds. Never run anything else in these.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from utils.errors import CourseError

# What an attack writes or prints when it did what it came for.
MARK = "did it"
# How much longer than its time limit the outer guard waits for a cage.
GRACE = 3.0
# The secrets that attacks look for.
SECRET = "the reader's own words"
TOKEN_NAME = "A_TOKEN_OF_THE_READER"
# Every attack is a wrong answer to these.
TESTS = "assert double(21) == 42\n"


@dataclass(frozen=True)
class Attack:
    """A program that does not solve its task, and what it tries instead."""

    name: str
    what: str
    program: str


@dataclass(frozen=True)
class Attempt:
    """What came of an attack in a cage: a false pass, a deed, a judge that hangs or is dead."""

    passed: bool
    hung: bool
    judge_died: bool
    output: str
    marked: bool

    @property
    def succeeded(self) -> bool:
        """Whether the cage was too weak for it."""
        deed = self.marked or MARK in self.output
        return self.passed or self.hung or self.judge_died or deed


class Yard:
    """A folder to be harmed: a home with a secret, a scratch folder, a port that listens.

    `seconds` is the time limit of those cages that have one.
    """

    def __init__(self, folder: Path, seconds: float = 1.0) -> None:
        self.folder = folder
        self.seconds = seconds
        self.scratch = folder / "scratch"
        self.scratch.mkdir(parents=True, exist_ok=True)
        (folder / "secret.txt").write_text(SECRET, encoding="utf-8")
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.mark = folder / "mark.txt"

    def close(self) -> None:
        """Stop listening."""
        self.listener.close()

    def text_of(self, attack: Attack) -> str:
        """The attack's text, with the places of this yard in it."""
        places = {
            "MARK": str(self.mark),
            "HOME": str(self.folder),
            "PORT": str(self.listener.getsockname()[1]),
        }
        text = attack.program
        for name, place in places.items():
            text = text.replace(f"@{name}@", place)
        return text


@cache
def attacks() -> dict[str, Attack]:
    """The attacks by their names, in the order in which the cages meet them."""
    text = Path(__file__).with_name("attacks.toml").read_text(encoding="utf-8")
    entries = [Attack(**entry) for entry in tomllib.loads(text)["attack"]]
    return {attack.name: attack for attack in entries}


# A judge that runs program and tests in its own interpreter, with `exec`.
IN_PROCESS = """
import sys
program, tests = sys.argv[1:]
space = {}
try:
    exec(program + "\\n" + tests, space)
    verdict = "passed"
except BaseException:
    verdict = "failed"
print("verdict:", verdict)
"""

# A judge that starts a second interpreter, and believes its exit status or its last line.
APART = """
import subprocess, sys
program, tests, limit, limits, trust = sys.argv[1:]
words = [sys.executable, "-c", limits + "\\n" + program + "\\n" + tests]
if trust == "line":
    words[-1] += "print('all tests passed')"
clean = {} if limits else None
try:
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=float(limit) or None, env=clean
    )
    lines = done.stdout.splitlines()
    good = lines[-1:] == ["all tests passed"] if trust == "line" else not done.returncode
    print(done.stdout)
except subprocess.TimeoutExpired:
    good = False
print("verdict:", "passed" if good else "failed")
"""

# Stands before a program: an address space of 256 MB, 2 s of processor, files of 1 MB.
LIMITS = (
    "import resource as r;"
    " r.setrlimit(r.RLIMIT_AS, (1 << 28, 1 << 28)); r.setrlimit(r.RLIMIT_CPU, (2, 2));"
    " r.setrlimit(r.RLIMIT_FSIZE, (1 << 20, 1 << 20))"
)


def exec_cage(program: str, yard: Yard) -> Attempt:
    """`exec` in the judge's own interpreter: no cage at all."""
    return guarded([IN_PROCESS, program, TESTS], yard)


def process_cage(program: str, yard: Yard) -> Attempt:
    """A process of its own; it passes if its exit status is 0."""
    return guarded([APART, program, TESTS, "0", "", "status"], yard)


def line_cage(program: str, yard: Yard) -> Attempt:
    """A process of its own; it passes if the last line that it prints says so."""
    return guarded([APART, program, TESTS, "0", "", "line"], yard)


def timed_cage(program: str, yard: Yard) -> Attempt:
    """The same, ended after its time."""
    words = [program, TESTS, str(yard.seconds), "", "line"]
    return guarded([APART, *words], yard)


def limited_cage(program: str, yard: Yard) -> Attempt:
    """The same with limits of the kernel (memory, processor, files) and an empty environment."""
    words = [program, TESTS, str(yard.seconds), LIMITS, "line"]
    return guarded([APART, *words], yard)


CAGES: dict[str, Callable[[str, Yard], Attempt]] = {
    "exec": exec_cage,
    "a process, its exit status": process_cage,
    "a process, its last line": line_cage,
    "a time limit": timed_cage,
    "limits of the kernel": limited_cage,
}


def gets_out_of(attack: Attack) -> str:
    """The strongest of these cages that an attack gets out of, or "none".

    >>> gets_out_of(attacks()["early exit"])    # doctest: +SKIP
    'a process, its exit status'
    """
    for name, cage in reversed(CAGES.items()):
        with tempfile.TemporaryDirectory() as folder:
            yard = Yard(Path(folder))
            attempt = cage(yard.text_of(attack), yard)
            yard.close()
        if attempt.succeeded:
            return name
    return "none"


def guarded(words: Sequence[str], yard: Yard) -> Attempt:
    """Run a judge in a session of its own, and end all of it after some seconds."""
    if sys.platform == "win32":
        raise CourseError(
            "these cages are made of POSIX's processes", fix="use Linux"
        )
    yard.mark.unlink(missing_ok=True)
    environment = {**os.environ, TOKEN_NAME: SECRET, "HOME": str(yard.folder)}
    judge = subprocess.Popen(
        [sys.executable, "-c", *words],
        cwd=yard.scratch,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )
    hung = False
    try:
        output, _ = judge.communicate(timeout=yard.seconds + GRACE)
    except subprocess.TimeoutExpired:
        hung, output = True, ""
    finally:
        # What an attack leaves behind shall have the time to show itself.
        time.sleep(0.5)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(judge.pid, signal.SIGKILL)
        judge.wait()
        if judge.stdout:
            judge.stdout.close()
    said = "verdict:" in output
    passed = "verdict: passed" in output
    return Attempt(passed, hung, not said and not hung, output, yard.mark.exists())
