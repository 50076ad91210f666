"""The system calls of Linux that Python has no function for, each with its name in an error."""

from __future__ import annotations

import ctypes
import itertools
import operator
import os
import platform
import sys
from functools import partial

if sys.platform != "linux":
    raise ImportError("these are system calls of Linux")

NUMBERS = {
    "x86_64": {"clone": 56, "pivot_root": 155, "capset": 126, "mount_setattr": 442},
    "aarch64": {"clone": 220, "pivot_root": 41, "capset": 91, "mount_setattr": 442},
}

# Number inside, number outside.
Map = list[tuple[int, int]]

# namespaces
NEW_CGROUP, NEW_UTS, NEW_IPC = 0x02000000, 0x04000000, 0x08000000
NEW_USER, NEW_PID, NEW_NET = 0x10000000, 0x20000000, 0x40000000
NEW_MOUNT = 0x00020000
NAMESPACES = (
    NEW_USER | NEW_PID | NEW_MOUNT | NEW_NET | NEW_IPC | NEW_UTS | NEW_CGROUP
)
SIGCHLD = 17

# mounts
READ_ONLY, NO_SUID, NO_DEVICES, NO_EXEC = 1, 2, 4, 8
BIND, RECURSIVE, PRIVATE = 4096, 16384, 1 << 18
DETACH = 2
AT_RECURSIVE = 0x8000

# prctl
PDEATHSIG, DUMPABLE, SECCOMP, BOUNDING_DROP = 1, 4, 22, 24
SECURE_BITS, NO_NEW_PRIVILEGES, AMBIENT, AMBIENT_CLEAR = 28, 38, 47, 4
# Root gets no capability by being root, and neither this nor the keeping of them can be undone.
LOCKED_BITS = 0x2F

# With the interpreter's lock held, so that a clone is taken between two of its steps.
libc = ctypes.PyDLL(None, use_errno=True)


class KernelError(OSError):
    """A system call that was refused; the text names the call."""


def checked(result: int, what: str) -> int:
    """The result of a call, or the error that the kernel gave."""
    if result < 0:
        number = ctypes.get_errno()
        raise KernelError(number, f"{what}: {os.strerror(number)}")
    return result


def machine() -> str:
    """The architecture, by the kernel's name for it."""
    name = platform.machine()
    if name not in NUMBERS:
        raise KernelError(0, f"the system calls of {name} are not known here")
    return name


def system_call(name: str, *arguments: object) -> int:
    """A system call by its number."""
    numbers = NUMBERS[machine()]
    number = ctypes.c_long(numbers[name])
    result = libc.syscall(number, *arguments)
    return checked(result, name)


def clone(flags: int) -> int:
    """A fork whose child stands in new namespaces: 0 in the child, its number in the parent.

    Between the call and the repairs that Python makes in a child, no step of Python may be taken. If
    another thread has just asked for the interpreter's lock, the child would give it away at that step,
    to a thread that it does not have, and wait for ever. So the call and what follows it are a chain of
    iterators, which `list` draws through without a step between.
    """
    hooks = ctypes.pythonapi
    # Whether it is the parent says which of the two follows.
    repairs = (hooks.PyOS_AfterFork_Child, hooks.PyOS_AfterFork_Parent)
    number = ctypes.c_long(NUMBERS[machine()]["clone"])
    arguments = (ctypes.c_long(flags | SIGCHLD), 0, 0, 0, 0)
    call = partial(libc.syscall, number, *arguments)
    results, known = itertools.tee(map(operator.call, [call]))
    chosen = map(repairs.__getitem__, map(bool, results))
    hooks.PyOS_BeforeFork()
    list(map(operator.call, chosen))
    (pid,) = known
    return checked(pid, "clone")


def mount(
    source: str, target: str, kind: str, flags: int, options: str = ""
) -> None:
    """mount(2); a refusal names the target."""
    words = [text.encode() for text in (source, target, kind)]
    result = libc.mount(*words, ctypes.c_ulong(flags), options.encode())
    checked(result, f"mount {kind or 'bind'} on {target}")


def restrict_mount(target: str, flags: int, deep: bool) -> None:
    """Add read-only, nosuid, nodev to a mount, and with `deep` to all mounts below it."""
    attributes = (ctypes.c_uint64 * 4)(flags, 0, 0, 0)
    where = ctypes.c_int(-100)
    depth = ctypes.c_uint(AT_RECURSIVE if deep else 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    path = target.encode()
    system_call("mount_setattr", where, path, depth, attributes, size)


def enter_root(folder: str) -> None:
    """Make a mount the root, and let go of the old root."""
    os.chdir(folder)
    system_call("pivot_root", b".", b".")
    checked(libc.umount2(b".", DETACH), "umount2")
    os.chdir("/")


def prctl(option: int, *values: int) -> None:
    """prctl(2)."""
    padded = (*values, 0, 0, 0, 0)
    words = [ctypes.c_ulong(value) for value in padded[:4]]
    result = libc.prctl(option, *words)
    checked(result, f"prctl {option}")


def drop_bounding() -> None:
    """Give up every capability for all that will ever be executed; wants CAP_SETPCAP."""
    for capability in range(64):
        try:
            prctl(BOUNDING_DROP, capability)
        except KernelError:
            break


def drop_capabilities() -> None:
    """Give up the capabilities of this process, and never gain a privilege again."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    nothing = (ctypes.c_uint32 * 6)()
    prctl(AMBIENT, AMBIENT_CLEAR)
    system_call("capset", header, nothing)
    prctl(NO_NEW_PRIVILEGES, 1)


def write_maps(folder: int, users: Map, groups: Map, may_set_groups: bool) -> None:
    """The users and groups of a user namespace, which `folder` (a process in /proc) has made.

    Without privileges a process may map its group only if it gives up to set its groups.
    """
    if not may_set_groups:
        write_fact(folder, "setgroups", "deny")
    write_fact(folder, "uid_map", map_text(users))
    write_fact(folder, "gid_map", map_text(groups))


def map_text(lines: Map) -> str:
    """A map as the kernel reads it.

    >>> map_text([(0, 1000)])
    '0 1000 1\\n'
    """
    text = ""
    for inside, outside in lines:
        text += f"{inside} {outside} 1\n"
    return text


def write_fact(folder: int, name: str, text: str) -> None:
    """Write a file of /proc in one go."""
    descriptor = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.write(descriptor, text.encode())
    except OSError as error:
        raise KernelError(error.errno, f"{name}: {error.strerror}") from None
    finally:
        os.close(descriptor)
