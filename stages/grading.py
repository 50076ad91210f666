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
import os
import select
import signal
import socket
import sys
import time
from dataclasses import asdict
from typing import Any, NoReturn

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
LIMITS = Limits(seconds=120, memory_mb=4096, files_mb=64)
# The descriptors of a caged copy, behind its three streams.
ANSWERS, REPORT = 3, 4


# the lesson -------------------------------------------------------------------------------------


def make_shell() -> Any:
    """What runs cells as a kernel does, in this process; it keeps no history."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    config = Config()
    config.HistoryManager.enabled = False
    return InteractiveShell.instance(config=config)


def run_cell(shell: Any, code: str) -> tuple[list[Facts], BaseException | None]:
    """Run a cell: what it put on record, and the error that ended it."""
    from IPython.utils.capture import capture_output

    with capture_output() as shown:
        result = shell.run_cell(code)
    records = [output.data.get(RECORD_TYPE) for output in shown.outputs]
    error = result.error_before_exec or result.error_in_exec
    return [record for record in records if record], error


def grade(task: Facts, tell: Any) -> None:
    """Run a lesson, and at each check the answers of all that have handed in."""
    shell = make_shell()
    for cell in task["cells"]:
        for submission in task["submissions"] if cell["exercise"] else ():
            facts = judge(shell, cell, submission["file"], LIMITS)
            facts |= {"who": submission["who"], "exercise": cell["exercise"]}
            tell(facts)
        _, error = run_cell(shell, cell["source"])
        if error:
            what = f"the lesson itself stopped: {type(error).__name__}: {error}"
            raise CourseError(what, task["lesson"], "run it by itself first")


def judge(shell: Any, cell: Facts, file: str, limits: Limits) -> Facts:
    """The verdict on one answer, from a caged copy of this process."""
    begun = time.monotonic()
    answers = os.open(file, os.O_RDONLY)
    mine, theirs = socket.socketpair()
    mapped, written = os.pipe()
    pid = kernel.clone(kernel.NAMESPACES)
    if pid == 0:
        os.close(written)
        os.read(mapped, 1)
        be_caged(shell, cell, answers, theirs, limits)
    for one in (answers, mapped):
        os.close(one)
    theirs.close()
    folder = os.open(f"/proc/{pid}", os.O_RDONLY)
    try:
        warden.map_users(folder)
        os.close(written)
        facts = listen(mine, limits.seconds)
    finally:
        os.close(folder)
        mine.close()
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    if not facts:
        facts = {"verdict": "crashed", "hint": ended_by(status)}
    facts["seconds"] = round(time.monotonic() - begun, 1)
    return facts


def listen(control: socket.socket, seconds: float) -> Facts:
    """What the copy says in its time; nothing if it ended without a word."""
    end = time.monotonic() + seconds
    said = b""
    while len(said) <= LONGEST_REPORT:
        left = end - time.monotonic()
        ready, _, _ = select.select([control], [], [], max(0, left))
        if not ready:
            return {"verdict": "timeout", "hint": f"not done in {seconds:g} s"}
        part = control.recv(LONGEST_REPORT)
        if not part:
            break
        said += part
    return read_report(said)


def read_report(said: bytes) -> Facts:
    """A verdict as two plain lines, whatever the copy has sent.

    >>> read_report(b'{"verdict": "fail", "hint": "no\\\\u001b[2J"}')
    {'verdict': 'fail', 'hint': 'no?[2J'}
    >>> read_report(b"?")
    {}
    """
    try:
        facts = json.loads(said)
        words = [str(facts["verdict"])[:20], str(facts["hint"])]
    except (ValueError, LookupError, TypeError):
        return {}
    lines = [plain(word) for word in words]
    return dict(zip(("verdict", "hint"), lines))


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
    code = os.waitstatus_to_exitcode(status)
    if code < 0 and -code != signal.SIGKILL:
        return f"signal {-code} ended it"
    return "it ended without a verdict"


# the cage ---------------------------------------------------------------------------------------


def be_caged(
    shell: Any, cell: Facts, answers: int, control: socket.socket, limits: Limits
) -> NoReturn:
    """Enter the cage, judge one answer there, say how it went."""
    facts = {"verdict": "no cage", "hint": ""}
    where = control.detach()
    try:
        enter_cage(answers, where, limits)
        where = REPORT
        facts = verdict_on(shell, cell)
    except BaseException as error:
        facts["hint"] = f"{type(error).__name__}: {error}"
    finally:
        with contextlib.suppress(OSError):
            os.write(where, json.dumps(facts).encode())
        os._exit(0)


def enter_cage(answers: int, control: int, limits: Limits) -> None:
    """View, scratch, descriptors, rights, limits, filter: in this order, and for good."""
    os.setsid()
    socket.sethostname("cage")
    nothing = os.open(os.devnull, os.O_WRONLY)
    guard = warden.Warden(socket.socket())
    enter_view(visible_paths())
    size = f"size={limits.files_mb}m,nr_inodes=1024,mode=777"
    flags = kernel.NO_SUID | kernel.NO_DEVICES | kernel.NO_EXEC
    kernel.mount("scratch", view.SCRATCH, "tmpfs", flags, size)
    os.chdir(view.SCRATCH)
    warden.keep_only([answers, nothing, control])
    with contextlib.suppress(OSError):
        os.close(warden.TELLS)
    kernel.prctl(kernel.SECURE_BITS, kernel.LOCKED_BITS)
    warden.give_up_rights()
    kernel.prctl(kernel.DUMPABLE, 0)
    guard.set_limits(asdict(limits))
    filter.install(guard.filters[limits.processes > 0])


def visible_paths() -> list[str]:
    """What a check may read: packages, the course's code, assets, artifacts."""
    from utils.assets import home

    wanted = [*sys.path, ROOT / "utils", ROOT / "stages", home()]
    wanted.append(build_folder() / "artifacts")
    paths = {os.path.realpath(path) for path in wanted if path}
    # The checkout itself holds more than its code.
    paths -= {str(ROOT), os.getcwd()}
    there = {path for path in paths if os.path.isdir(path)}
    return view.without_nested({*view.visible_paths(), *there})


def enter_view(paths: list[str]) -> None:
    """Make a small file system in memory the root, with those paths in it, read-only."""
    kernel.mount("none", "/", "", kernel.RECURSIVE | kernel.PRIVATE)
    safe = kernel.NO_SUID | kernel.NO_DEVICES
    kernel.mount("view", view.PLACE, "tmpfs", safe, "size=4m,mode=755")
    os.mkdir(view.PLACE + view.SCRATCH)
    for path in paths:
        view.show(path)
    kernel.restrict_mount(view.PLACE, view.SEALED, deep=False)
    kernel.enter_root(view.PLACE)


def verdict_on(shell: Any, cell: Facts) -> Facts:
    """Run an answer and the check behind it."""
    with os.fdopen(ANSWERS, "rb") as file:
        answer = json.load(file).get(cell["exercise"])
    if answer is None:
        return {"verdict": "missing", "hint": "no such exercise in the notebook"}
    torch = sys.modules.get("torch")
    if torch:
        # The threads of the process that was copied are not here.
        torch.set_num_threads(1)
    for code in (answer, cell["source"]):
        records, error = run_cell(shell, code)
        if error:
            hint = f"{type(error).__name__}: {error}"
            return {"verdict": "error", "hint": hint}
    made = [record for record in records if record["kind"] == "exercise"]
    if not made:
        return {"verdict": "error", "hint": "the check gave no verdict"}
    return {"verdict": made[-1]["verdict"], "hint": made[-1]["hint"]}


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
