"""The warm parent: an interpreter that stands in the view and forks a caged child for each program.

    launcher    the reader's user; makes the outer namespaces and waits
    warden      process 1 of them: sees only the view, is nobody, holds no text of any program or test
    child       process 1 of namespaces of its own, without capabilities, behind the filter

The judge hands over pipes and a file with the text to each child, and reads the pipes itself.
"""

from __future__ import annotations

import gc
import importlib
import io
import json
import os
import resource
import signal
import socket
import sys
from typing import Any, NoReturn

from . import examiner, filter, kernel, program, values, view

if sys.platform != "linux":
    raise ImportError("only Linux has namespaces")

Facts = dict[str, Any]

NOBODY = 65534
WARM = (
    "abc array base64 bisect bz2 calendar cmath collections contextlib copy dataclasses"
    " datetime decimal enum fractions functools hashlib heapq io itertools json lzma math"
    " numbers operator queue random re sqlite3 statistics string struct textwrap time"
    " traceback types typing unicodedata zlib"
)
# The descriptors of a child, behind its three streams.
SOURCE, ASKS, ANSWERS, VERDICT = 3, 4, 5, 6
# Over this one, above all that it keeps, it says that its cage stands.
TELLS = 99
BUILT = b"built"
OPEN_FILES = 64
MEGABYTE = 1 << 20


def main(number: int) -> None:
    """Be the launcher, with a socket to the judge."""
    control = socket.socket(fileno=number)
    try:
        launch(control)
    except (OSError, ValueError) as error:
        tell(control, {"error": str(error)})


def launch(control: socket.socket) -> None:
    """Start the warden in its namespaces, and wait for its end."""
    mapped, written = os.pipe()
    pid = kernel.clone(kernel.NAMESPACES)
    if pid == 0:
        os.close(written)
        os.read(mapped, 1)
        become_warden(control)
    folder = os.open(f"/proc/{pid}", os.O_RDONLY)
    map_users(folder)
    os.close(written)
    control.close()
    os.waitpid(pid, 0)


def map_users(folder: int) -> None:
    """Root becomes nobody behind the view, where it may; every other user is nobody at once."""
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        both = [(0, 0), (NOBODY, NOBODY)]
        try:
            kernel.write_maps(folder, both, both, may_set_groups=True)
            return
        except OSError:
            pass
    kernel.write_maps(folder, [(NOBODY, user)], [(NOBODY, group)], False)


def become_warden(control: socket.socket) -> NoReturn:
    """Warm up, build the view, give up every right, then fork for whom the judge asks."""
    try:
        kernel.prctl(kernel.PDEATHSIG, signal.SIGKILL)
        for name in WARM.split():
            warm_up(name)
        warden = Warden(control)
        view.enter_view()
        give_up_rights()
        gc.collect()
        gc.freeze()
        tell(control, {"ready": True})
        warden.work()
    except BaseException as error:
        tell(control, {"error": f"{error}"})
    os._exit(1)


def warm_up(name: str) -> None:
    """Import a module before the fork; some interpreters were built without one or the other."""
    try:
        importlib.import_module(name)
    except ImportError:
        return


def give_up_rights() -> None:
    """From here on nobody, with no capability and no way to one."""
    kernel.drop_bounding()
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    kernel.drop_capabilities()
    # Else /proc/self belongs to root, and a child could not write its own map of users.
    kernel.prctl(kernel.DUMPABLE, 1)
    kernel.prctl(kernel.PDEATHSIG, signal.SIGKILL)


def tell(control: socket.socket, facts: Facts, files: tuple[int, ...] = ()) -> None:
    """Answer the judge."""
    text = json.dumps(facts)
    data = text.encode()
    socket.send_fds(control, [data], list(files))


class Warden:
    """Forks a child where the judge asks for one, and reaps it."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        # /proc is not in the view; a child needs it to map its user.
        self.proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        calls, machine = filter.read_calls(), kernel.machine()
        self.filters = {
            processes: filter.pack(filter.instructions(calls, machine, processes))
            for processes in (False, True)
        }
        with open("/proc/self/statm", encoding="ascii") as file:
            self.own_memory = int(file.read().split()[0]) * resource.getpagesize()

    def work(self) -> NoReturn:
        """Do what the judge asks until it is gone; then all children go too."""
        while True:
            data, files, _, _ = socket.recv_fds(self.control, 4096, 8)
            if not data:
                os._exit(0)
            request = json.loads(data)
            try:
                if request["do"] == "start":
                    self.start(request, files)
                else:
                    tell(self.control, reap(request["pid"]))
            except OSError as error:
                tell(self.control, {"error": str(error)})

    def start(self, request: Facts, files: list[int]) -> None:
        """Fork a child, give it the files, and hand the judge a hold on it once its cage stands."""
        told, tells = os.pipe()
        pid = kernel.clone(kernel.NAMESPACES)
        if pid == 0:
            self.be_child(request, files, tells)
        for file in (*files, tells):
            os.close(file)
        words = os.read(told, 4096)
        os.close(told)
        if words != BUILT:
            reap(pid)
            raise OSError(words.decode() or "the caged process ended at once")
        hold = os.pidfd_open(pid)
        tell(self.control, {"pid": pid}, (hold,))
        os.close(hold)

    def be_child(self, request: Facts, files: list[int], tells: int) -> NoReturn:
        """Build the cage around this process, then run what it is for."""
        status = 1
        built = False
        os.dup2(tells, TELLS)
        try:
            self.build_cage(request["limits"], files)
            built = True
            os.write(TELLS, BUILT)
            os.close(TELLS)
            status = run(request["role"])
        except BaseException as error:
            if not built:
                os.write(TELLS, str(error).encode()[:4000])
        finally:
            os._exit(status)

    def build_cage(self, limits: Facts, files: list[int]) -> None:
        """Users, scratch, descriptors, limits, rights, filter: in this order."""
        own = os.open("self", os.O_RDONLY, dir_fd=self.proc)
        nobody = [(NOBODY, NOBODY)]
        kernel.write_maps(own, nobody, nobody, may_set_groups=False)
        os.setsid()
        socket.sethostname("cage")
        view.mount_scratch(limits["files_mb"])
        keep_only(files)
        self.set_limits(limits)
        kernel.drop_bounding()
        kernel.prctl(kernel.SECURE_BITS, kernel.LOCKED_BITS)
        kernel.drop_capabilities()
        # No core dump, which a handler outside of the cage could keep.
        kernel.prctl(kernel.DUMPABLE, 0)
        kernel.prctl(kernel.PDEATHSIG, signal.SIGKILL)
        filter.install(self.filters[limits["processes"] > 0])

    def set_limits(self, limits: Facts) -> None:
        """What the kernel counts for each process, and for all of the cage's user."""
        seconds = int(limits["seconds"]) + 2
        most = {
            resource.RLIMIT_CPU: seconds,
            resource.RLIMIT_AS: self.own_memory + limits["memory_mb"] * MEGABYTE,
            resource.RLIMIT_NPROC: limits["processes"] + 1,
            resource.RLIMIT_FSIZE: limits["files_mb"] * MEGABYTE,
            resource.RLIMIT_NOFILE: OPEN_FILES,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_MEMLOCK: 0,
            resource.RLIMIT_MSGQUEUE: 0,
        }
        for name, value in most.items():
            _, hard = resource.getrlimit(name)
            allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(name, (allowed, allowed))


def keep_only(files: list[int]) -> None:
    """The descriptors of a child: an input at its end, the output twice, and what follows."""
    empty, end = os.pipe()
    os.close(end)
    source, output, *channels = files
    wanted = [empty, output, output, source, *channels]
    aside = range(TELLS + 1, TELLS + 1 + len(wanted))
    for number, file in zip(aside, wanted):
        os.dup2(file, number)
    os.closerange(0, TELLS)
    for place, number in enumerate(aside):
        os.dup2(number, place)
    os.closerange(TELLS + 1, os.sysconf("SC_OPEN_MAX"))


def open_streams() -> None:
    """Python's own three streams, on the descriptors of the cage."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        raw = io.FileIO(number, "w" if number else "r", closefd=False)
        wrap: Any = io.BufferedWriter if number else io.BufferedReader
        stream = io.TextIOWrapper(
            wrap(raw),
            encoding="utf-8",
            errors="backslashreplace",
            line_buffering=True,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


EXAMINATIONS = {
    "tests": examiner.examine,
    "calls": lambda text, remote: examiner.evaluate(json.loads(text), remote),
}


def run(role: str) -> int:
    """Do what this child is for; its exit status."""
    open_streams()
    with os.fdopen(SOURCE, "rb") as file:
        file.seek(0)
        source = file.read()
    if role == "script":
        return program.run_script(source)
    if role == "program":
        program.serve(source, ASKS, ANSWERS)
        return 0
    # The tests' process speaks where the program's listens.
    remote = examiner.Remote(asks=ANSWERS, answers=ASKS)
    text = source.decode("utf-8", "surrogatepass")
    work: Any = EXAMINATIONS[role]
    found = work(text, remote)
    program.flush()
    values.send(VERDICT, found)
    return 0


def reap(pid: int) -> Facts:
    """End a child and with it all of its namespace; how it ended and what it used."""
    os.kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return {"status": code, "seconds": usage.ru_utime + usage.ru_stime}
