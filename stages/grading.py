"""Judges what a class has handed in: `python -m stages.grading`, its task as JSON on stdin.

A lesson of the course itself is run here once, from its own cells. At the check of each exercise the
process forks, once for each submission: the copy enters a cage, takes the answer, runs the check and
says how it went. So no submission sees another, the network, or a file of the teacher's, and a lesson
costs its time once for a whole class.

The cage is that of `sandbox`, with a wider view: the packages and the artifacts, which a check may
load, can be read in it. Answer and check share an interpreter here, because an answer may be a model
or an optimizer, and such things cannot cross to another process as plain values. A program that sets
out to forge its verdict can do so; `cage/examiner.py` says what it takes that none can.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from stages import tokenizer
from stages.cage import filter, kernel, view, warden
from stages.cage.limits import Limits
from stages.sandbox import Sandbox
from utils.errors import ROOT, CourseError, build_folder

if sys.platform != "linux":
    raise ImportError("only Linux has namespaces")

Facts = dict[str, Any]
RECORD_TYPE = "application/vnd.course.record+json"
LONGEST_HINT = 200
LONGEST_REPORT = 65_536
# Libraries load with threads, and a loader has workers.
LIMITS = Limits(memory_mb=4096, files_mb=64, processes=16)
# Not `/tmp`, in which a checkout may lie.
SCRATCH = "/scratch"
SHARED_MEMORY = "/dev/shm"
# The descriptors of a caged copy, behind its three streams.
ANSWERS, REPORT = 3, 4
ANYBODY = 0o777
MEGABYTE = 1 << 20


@dataclass(frozen=True)
class Cage:
    """What a copy may use, and the lesson's scratch folder, of which each copy gets its own."""

    limits: Limits
    scratch: str


# the lesson -------------------------------------------------------------------------------------


def make_shell() -> Any:
    """What runs cells as a kernel does, in this process."""
    from IPython.core.interactiveshell import InteractiveShell

    return InteractiveShell.instance()


def run_cell(shell: Any, code: str) -> tuple[list[Facts], BaseException | None]:
    """Run a cell: what it put on record, and the error that ended it."""
    from IPython.utils.capture import capture_output

    with capture_output() as shown:
        result = shell.run_cell(code)
    records = [output.data.get(RECORD_TYPE) for output in shown.outputs]
    error = result.error_before_exec or result.error_in_exec
    return [record for record in records if record], error


def apart(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, run by this process in a copy of itself, and by every other process as it is.

    For what starts threads that last: a copy of this process lacks them and waits for them without end.
    """
    judge = os.getpid()
    context = multiprocessing.get_context("fork")

    def answer(end: Any, given: tuple[Any, ...]) -> None:
        try:
            end.send((function(*given), None))
        except CourseError as error:
            end.send((None, error))

    def run(*given: Any) -> Any:
        if os.getpid() != judge:
            return function(*given)
        mine, theirs = context.Pipe(duplex=False)
        child = context.Process(target=answer, args=(theirs, given))
        child.start()
        theirs.close()
        try:
            result, error = mine.recv()
        finally:
            child.join()
        if error:
            raise error
        return result

    return run


def grade(task: Facts, tell: Any) -> None:
    """Run a lesson, and at each check the answers of all that have handed in."""
    tokenizer.learn_ranks = apart(tokenizer.learn_ranks)
    tempfile.tempdir = os.environ["TMPDIR"] = task["scratch"]
    shell = make_shell()
    limits = replace(LIMITS, seconds=task["seconds"])
    cage = Cage(limits, task["scratch"])
    for cell in task["cells"]:
        for submission in task["submissions"] if cell["exercises"] else ():
            for facts in judge(shell, cell, submission["file"], cage):
                tell({"who": submission["who"], **facts})
        _, error = run_cell(shell, cell["source"])
        if error:
            what = f"the lesson itself stopped: {type(error).__name__}: {error}"
            raise CourseError(what, task["lesson"], "run it by itself first")


def judge(shell: Any, cell: Facts, file: str, cage: Cage) -> list[Facts]:
    """The verdicts on one answer, from a caged copy of this process; most checks give one."""
    answers = os.open(file, os.O_RDONLY)
    mine, theirs = socket.socketpair()
    mapped, written = os.pipe()
    pid = kernel.clone(kernel.NAMESPACES)
    if pid == 0:
        os.close(written)
        os.read(mapped, 1)
        be_caged(shell, cell, answers, theirs, cage)
    for one in (answers, mapped):
        os.close(one)
    theirs.close()
    folder = os.open(f"/proc/{pid}", os.O_RDONLY)
    try:
        warden.map_users(folder)
        os.close(written)
        said, ended = listen(mine, cage.limits.seconds)
    finally:
        os.close(folder)
        mine.close()
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    verdicts = read_report(said)
    missing = ("crashed", ended_by(status))
    if not ended:
        missing = ("timeout", f"not done in {cage.limits.seconds:g} s")
    rows = []
    for number in cell["exercises"]:
        verdict, hint = verdicts.get(number, missing)
        rows.append({"exercise": number, "verdict": verdict, "hint": hint})
    return rows


def listen(control: socket.socket, seconds: float) -> tuple[bytes, bool]:
    """What the copy says in its time, and whether it came to its end."""
    end = time.monotonic() + seconds
    said = b""
    while len(said) <= LONGEST_REPORT:
        left = end - time.monotonic()
        ready, _, _ = select.select([control], [], [], max(0, left))
        if not ready:
            return b"", False
        part = control.recv(LONGEST_REPORT)
        if not part:
            break
        said += part
    return said, True


def read_report(said: bytes) -> dict[str, tuple[str, str]]:
    """Verdicts by their exercises, each as two plain lines, whatever the copy has sent.

    >>> read_report(b'{"05.1": ["fail", "no\\\\u001b[2J"], "05.2": 3}')
    {'05.1': ('fail', 'no?[2J')}
    >>> read_report(b"?")
    {}
    """
    verdicts = {}
    try:
        facts = json.loads(said)
        pairs = list(facts.items())
    except (ValueError, AttributeError, RecursionError):
        return {}
    for number, pair in pairs:
        if isinstance(pair, list) and len(pair) == 2:
            verdict, hint = (plain(str(word)) for word in pair)
            verdicts[number] = (verdict, hint)
    return verdicts


def plain(text: str) -> str:
    """A text as one short line, which no terminal takes for a command.

    >>> plain("a\\n b\\x1b[0m")
    'a b?[0m'
    """
    line = " ".join(text.split())
    shown = "".join(sign if sign.isprintable() else "?" for sign in line)
    return shown[:LONGEST_HINT]


def ended_by(status: int) -> str:
    """How a copy ended that has said nothing."""
    number = os.waitstatus_to_exitcode(status)
    if number > 0 and number != signal.SIGKILL:
        return f"signal {number} ended it"
    return "it ended without a verdict"


# the cage ---------------------------------------------------------------------------------------


def go_on_in_a_fork() -> None:
    """Return in a fork, and wait for it in this process, whose end is the end of all in its namespace.

    Libraries with threads, such as Arrow, mend themselves in a fork of the C library, which the call that
    makes namespaces is not; without it they would wait for threads that were not copied.
    """
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        # A signal that has ended it is told as an exit code.
        os._exit(max(-os.waitstatus_to_exitcode(status), 0))


def be_caged(
    shell: Any, cell: Facts, answers: int, control: socket.socket, cage: Cage
) -> NoReturn:
    """Enter the cage, judge one answer there, say how it went."""
    where = control.detach()
    verdicts = {}
    try:
        go_on_in_a_fork()
        enter_cage(answers, where, cage)
        where = REPORT
        verdicts = verdicts_on(shell, cell)
    except BaseException as error:
        verdicts = same(cell, "no cage", f"{type(error).__name__}: {error}")
    finally:
        with contextlib.suppress(OSError):
            os.write(where, json.dumps(verdicts).encode())
        os._exit(0)


def enter_cage(answers: int, control: int, cage: Cage) -> None:
    """View, scratch, descriptors, rights, limits, filter: in this order, and for good."""
    os.setsid()
    socket.sethostname("cage")
    nothing = os.open(os.devnull, os.O_WRONLY)
    guard = warden.Warden(socket.socket())
    enter_view(visible_paths(), cage.scratch)
    for folder in (SCRATCH, SHARED_MEMORY):
        mount_empty(folder, cage.limits.files_mb)
    os.chdir(SCRATCH)
    os.environ |= {"HOME": SCRATCH, "TMPDIR": SCRATCH}
    tempfile.tempdir = SCRATCH
    warden.keep_only([answers, nothing, control])
    with contextlib.suppress(OSError):
        os.close(warden.TELLS)
    kernel.prctl(kernel.SECURE_BITS, kernel.LOCKED_BITS)
    warden.give_up_rights()
    kernel.prctl(kernel.DUMPABLE, 0)
    guard.set_limits(asdict(cage.limits))
    filter.install(guard.filters[cage.limits.processes > 0])


def visible_paths() -> list[str]:
    """What a check may read: packages, the course's code, assets, artifacts."""
    from utils.assets import home

    wanted: list[str | Path] = [*sys.path]
    wanted += [ROOT / "utils", ROOT / "stages", home()]
    wanted += [build_folder() / "artifacts"]
    paths = {os.path.realpath(path) for path in wanted if path}
    # The checkout itself holds more than its code.
    paths -= {str(ROOT), os.getcwd()}
    there = {path for path in paths if os.path.isdir(path)}
    return view.without_nested({*view.visible_paths(), *there})


def mount_empty(folder: str, megabytes: int) -> None:
    """A folder in memory in which everybody may write and nothing may be executed."""
    flags = kernel.NO_SUID | kernel.NO_DEVICES | kernel.NO_EXEC
    size = f"size={megabytes}m,nr_inodes=16384,mode=777"
    kernel.mount("scratch", folder, "tmpfs", flags, size)


def enter_view(paths: list[str], scratch: str) -> None:
    """Make a small file system the root: those paths, read-only, and a copy of the scratch folder."""
    kernel.mount("none", "/", "", kernel.RECURSIVE | kernel.PRIVATE)
    safe = kernel.NO_SUID | kernel.NO_DEVICES
    kernel.mount("view", view.PLACE, "tmpfs", safe, "size=4m,mode=755")
    for folder in (SCRATCH, SHARED_MEMORY):
        os.makedirs(view.PLACE + folder)
    for path in paths:
        view.show(path)
    copy_into_memory(scratch, view.PLACE + scratch)
    kernel.restrict_mount(view.PLACE, view.SEALED, deep=False)
    kernel.enter_root(view.PLACE)


def copy_into_memory(folder: str, place: str) -> None:
    """What the lesson has written, for a check that reads it or writes beside it."""
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    megabytes = sum(path.stat().st_size for path in files) // MEGABYTE
    # It is there where the lesson imports from its scratch folder.
    os.makedirs(place, exist_ok=True)
    mount_empty(place, megabytes + LIMITS.files_mb)
    shutil.copytree(folder, place, True, ignore=neither, dirs_exist_ok=True)
    # In the cage this process is another user, whom the lesson has not thought of.
    for path in Path(place).rglob("*"):
        if not path.is_symlink():
            path.chmod(ANYBODY)


def neither(folder: str, names: list[str]) -> list[str]:
    """What is no file and no folder, such as a socket, and cannot be copied."""
    paths = [os.path.join(folder, name) for name in names]
    return [
        os.path.basename(path)
        for path in paths
        if not (os.path.isfile(path) or os.path.isdir(path))
    ]


def same(cell: Facts, verdict: str, hint: str) -> Facts:
    """One verdict for all that a check looks at."""
    return {number: [verdict, hint] for number in cell["exercises"]}


def verdicts_on(shell: Any, cell: Facts) -> Facts:
    """Run an answer and the check behind it."""
    first, *_ = cell["exercises"]
    with os.fdopen(ANSWERS, "rb") as file:
        answer = json.load(file).get(first)
    if answer is None:
        return same(cell, "missing", "no such exercise in the notebook")
    torch = sys.modules.get("torch")
    if torch:
        # The threads of the process that was copied are not here.
        torch.set_num_threads(1)
    records: list[Facts] = []
    for code in (answer, cell["source"]):
        records, error = run_cell(shell, code)
        if error:
            hint = f"{type(error).__name__}: {error}"
            return same(cell, "error", hint)
    verdicts = same(cell, "error", "the check gave no verdict")
    for record in records:
        if record["kind"] == "exercise":
            verdicts[record["name"]] = [record["verdict"], record["hint"]]
    return verdicts


def main() -> int:
    """Read the task, judge; one line of JSON for each verdict, and for an error."""
    task = json.loads(sys.stdin.readline())
    # What cells print goes to the log; the verdicts have the output to themselves.
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(facts: Facts) -> None:
        print(json.dumps(facts), file=output, flush=True)

    there, reason = Sandbox.available()
    if not there:
        tell({"refused": reason})
        return 3
    try:
        grade(task, tell)
    except CourseError as error:
        tell({"stopped": str(error)})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
