"""The judge: it starts caged children, keeps their time, and reads what they say.

It runs in the reader's own process, so nothing that comes from a program is more than bytes here.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from utils.errors import CourseError

from .limits import Limits, Verdict

if sys.platform != "linux":
    raise ImportError("only Linux has namespaces")

LONGEST_SOURCE = 1_000_000
LONGEST_VERDICT = 4_000_004
# Far above what a busy machine needs to start an interpreter.
PATIENCE = 60
STOPPED = {
    "timeout": "it did not end in its time",
    "output": "it printed more than it may",
    "refused": "it said more than a verdict holds",
}
# A folder and not a package: the cage takes nothing of the course but this.
START = (
    "import sys; sys.path.insert(0, sys.argv[1]); from cage import warden;"
    " del sys.path[0]; warden.main(int(sys.argv[2]))"
)
Facts = dict[str, Any]


class Child:
    """A caged process: its number with the warden, and a hold on it."""

    def __init__(self, pid: int, hold: int) -> None:
        self.pid, self.hold = pid, hold

    def kill(self) -> None:
        """Kill it, and with it all that it started."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.hold, signal.SIGKILL)
        os.close(self.hold)


class Worker:
    """One warm parent in its namespaces, and the socket to it."""

    def __init__(self) -> None:
        self.control, other = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_SEQPACKET
        )
        self.control.settimeout(PATIENCE)
        folder = str(Path(__file__).parent.parent)
        # Isolated (-I), but for the seed of hashes, which it would not take from the environment.
        words = [
            base_interpreter(),
            "-P",
            "-s",
            "-S",
            "-B",
            "-X",
            "utf8",
            "-c",
            START,
        ]
        with other:
            self.process = subprocess.Popen(
                [*words, folder, str(other.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment(),
                cwd="/",
                pass_fds=[other.fileno()],
            )
        try:
            self.hear()
        except CourseError:
            self.close()
            raise

    def hear(self) -> tuple[Facts, list[int]]:
        """What the warden says, and what it hands over."""
        try:
            data, holds, _, _ = socket.recv_fds(self.control, 4096, 1)
        except OSError:
            data, holds = b"", []
        facts = (
            json.loads(data) if data else {"error": "its parent process is gone"}
        )
        if "error" in facts:
            raise CourseError(f"the cage could not be built: {facts['error']}")
        return facts, holds

    def ask(
        self, request: Facts, files: Sequence[int] = ()
    ) -> tuple[Facts, list[int]]:
        """Ask the warden for something; where it is gone, it cannot be asked."""
        try:
            data = json.dumps(request).encode()
            socket.send_fds(self.control, [data], list(files))
        except OSError as error:
            raise CourseError(
                f"the cage's parent process is gone: {error}"
            ) from None
        return self.hear()

    def start(self, role: str, limits: Limits, files: Sequence[int]) -> Child:
        """Have a child started; it gets copies of the files."""
        request = {"do": "start", "role": role, "limits": asdict(limits)}
        facts, holds = self.ask(request, files)
        return Child(facts["pid"], holds[0])

    def finish(self, child: Child) -> Facts:
        """End a child; its exit status and seconds of processor time."""
        request = {"do": "end", "pid": child.pid}
        facts, _ = self.ask(request)
        return facts

    def close(self) -> None:
        """End the parent, and with it everything below it."""
        self.control.close()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def base_interpreter() -> str:
    """The interpreter behind a virtual environment, which has the library beside it."""
    return os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)


def environment() -> dict[str, str]:
    """All that a program finds in its environment."""
    names = {"LANG": "C.UTF-8", "HOME": "/tmp", "PATH": "/usr/bin:/bin"}
    # With one seed a set gives its members in one order, whichever worker runs the program.
    names["PYTHONHASHSEED"] = "0"
    libraries = os.environ.get("LD_LIBRARY_PATH")
    return names | ({"LD_LIBRARY_PATH": libraries} if libraries else {})


class Trial:
    """One program on one worker: its children, its clock, and what came out."""

    def __init__(self, worker: Worker, limits: Limits) -> None:
        self.worker, self.limits = worker, limits
        self.children: list[Child] = []
        # Descriptors that are read here, and those that only the children need.
        self.heard: dict[int, bytearray] = {}
        self.lent: list[int] = []
        self.stopped = ""
        self.seconds = 0.0

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.end()
        finally:
            close_all(self.lent)
            close_all(list(self.heard))

    def end(self) -> list[int]:
        """End the children and all that they started; their exit statuses."""
        children, self.children = self.children, []
        for child in children:
            child.kill()
        facts = [self.worker.finish(child) for child in children]
        statuses = [fact["status"] for fact in facts]
        return statuses

    def start(self, role: str, source: str, *files: int) -> Child:
        """Start a child with a text in a file in memory, which no other child is given."""
        text = text_file(source)
        try:
            child = self.worker.start(role, self.limits, [text, *files])
        finally:
            os.close(text)
        self.children.append(child)
        return child

    def pipe(self) -> tuple[int, int]:
        """A pipe between children."""
        ends = os.pipe()
        self.lent += ends
        return ends

    def listen(self) -> int:
        """The end to lend of a pipe that is read here."""
        mine, theirs = os.pipe()
        os.set_blocking(mine, False)
        self.heard[mine] = bytearray()
        self.lent.append(theirs)
        return theirs

    def watch(self, last: Child) -> None:
        """Read what comes until this child ends, time is over, or too much is said."""
        close_all(self.lent)
        self.lent = []
        begun = time.monotonic()
        poll = select.poll()
        for file in (last.hold, *self.heard):
            poll.register(file, select.POLLIN)
        ended = False
        while not ended and not self.stopped:
            left = self.limits.seconds - (time.monotonic() - begun)
            if left <= 0:
                self.stopped = "timeout"
                break
            for file, _ in poll.poll(left * 1000):
                if file == last.hold:
                    ended = True
                elif not self.take(file):
                    poll.unregister(file)
        for file in self.heard:
            while not self.stopped and self.take(file):
                pass
        self.seconds = time.monotonic() - begun

    def take(self, file: int) -> bool:
        """Take what a pipe holds; False at its end, or where nothing is in it."""
        try:
            part = os.read(file, 1 << 16)
        except BlockingIOError:
            return False
        place = self.heard[file]
        place += part
        # The output is the first that was opened.
        printed = next(iter(self.heard)) == file
        most = self.limits.output_bytes if printed else LONGEST_VERDICT
        if len(place) > most:
            del place[most:]
            self.stopped = "output" if printed else "refused"
        return bool(part)


def text_file(source: str) -> int:
    """A file in memory with a text."""
    file = os.memfd_create("text")
    with open(file, "wb", closefd=False) as place:
        place.write(source.encode("utf-8", "surrogatepass"))
    return file


def close_all(files: Sequence[int]) -> None:
    """Close descriptors."""
    for file in files:
        os.close(file)


def run_script(worker: Worker, program: str, limits: Limits) -> Verdict:
    """Run a program by itself."""
    if problem := too_long(program):
        return problem
    with Trial(worker, limits) as trial:
        output = trial.listen()
        child = trial.start("script", program, output)
        trial.watch(child)
        (status,) = trial.end()
        (data,) = trial.heard.values()
    printed = plain_text(data)
    lines = printed.strip().splitlines()
    last = lines[-1] if lines else ""
    if trial.stopped:
        outcome, message = trial.stopped, STOPPED[trial.stopped]
    elif status == 0:
        outcome, message = "passed", "the program came to its end"
    elif status < 0:
        outcome, message = of_signal(-status)
    else:
        outcome = "memory" if last.startswith("MemoryError") else "error"
        message = last or f"exit status {status}"
    passed = outcome == "passed"
    return Verdict(passed, outcome, message, trial.seconds, printed)


def run_tests(
    worker: Worker, role: str, program: str, tests: str, limits: Limits
) -> Verdict:
    """Run a program, and its tests or calls in a process beside it."""
    if problem := too_long(program):
        return problem
    with Trial(worker, limits) as trial:
        output, report = trial.listen(), trial.listen()
        asks, answers = trial.pipe(), trial.pipe()
        trial.start("program", program, output, asks[0], answers[1])
        files = (output, answers[0], asks[1], report)
        trial.watch(trial.start(role, tests, *files))
        status, _ = trial.end()
        printed, said = trial.heard.values()
    facts = read_report(bytes(said))
    outcome, message = facts["outcome"], facts["message"]
    if trial.stopped:
        outcome, message = trial.stopped, STOPPED[trial.stopped]
    elif outcome == "crashed" and status < 0 and -status != signal.SIGKILL:
        outcome, message = of_signal(-status)
    results = tuple(facts.get("results", ()))
    passed = outcome == "passed"
    return Verdict(
        passed, outcome, message, trial.seconds, plain_text(printed), results
    )


def too_long(program: str) -> Verdict | None:
    """A verdict on what nobody would read."""
    if len(program) <= LONGEST_SOURCE:
        return None
    message = f"a program of {len(program):,} characters, over {LONGEST_SOURCE:,}"
    return Verdict(False, "refused", message, 0.0, "")


def read_report(data: bytes) -> Facts:
    """What the tests' process said; without a whole message nothing passed."""
    try:
        (length,) = struct.unpack_from("<I", data)
        if length == len(data) - 4:
            return json.loads(data[4:])
    except (struct.error, ValueError):
        pass
    return {"outcome": "refused", "message": "the tests' process gave no verdict"}


def of_signal(number: int) -> tuple[str, str]:
    """The outcome of a program that a signal ended."""
    if number == signal.SIGXCPU:
        return "timeout", STOPPED["timeout"]
    return "crashed", f"signal {number} ended the program"


def plain_text(data: bytearray) -> str:
    """What was printed, whatever its bytes are."""
    return data.decode("utf-8", "replace")
