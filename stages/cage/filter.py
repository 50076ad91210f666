"""The seccomp filter: which system calls a caged program may make, as a program of the kernel's BPF.

It is a list of what is allowed and not of what is forbidden, because every release of Linux brings
calls that nobody has looked at here (io_uring was one). What is not on the list fails with EPERM.
A call of another architecture (32-bit, x32) has other numbers, so it kills the process.
"""

from __future__ import annotations

import ctypes
import struct
import sys
import tomllib
from pathlib import Path

from . import kernel

if sys.platform != "linux":
    raise ImportError("seccomp is Linux's")

Instruction = tuple[int, int, int, int]
Numbers = dict[str, dict[str, dict[str, int]]]

ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, KILL = 0x7FFF0000, 0x80000000
REFUSE = 0x00050001  # EPERM
# ENOSYS: the C library then takes an older call, and a library of threads works without any
ABSENT = 0x00050026
# load a word of the call; jump if equal, if greater or equal, if a bit is set; return
LOAD, EQUAL, ABOVE, BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCH = 0, 4
X32 = 0x40000000
MODE_FILTER = 2
THREAD = 0x00010000  # of clone's flags

TERMINAL_ASKS = [0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451]
THREAD_NAMES = [15, 16]
ALWAYS = ["files", "memory", "signals", "time", "self", "interpreter"]


def argument(position: int, high: bool = False) -> int:
    """Where a half of an argument stands in what the filter is given."""
    return 16 + 8 * position + 4 * high


def give(action: int) -> Instruction:
    """End with an action."""
    return (RETURN, 0, 0, action)


def allow(number: int) -> list[Instruction]:
    """Allow a call whatever its arguments."""
    return [(EQUAL, 0, 1, number), give(ALLOW)]


def allow_values(
    number: int, position: int, values: list[int]
) -> list[Instruction]:
    """Allow a call only if one argument is one of some values."""
    checks: list[Instruction] = [(LOAD, 0, 0, argument(position))]
    for value in values:
        checks += [(EQUAL, 0, 1, value), give(ALLOW)]
    checks.append(give(REFUSE))
    return [(EQUAL, 0, len(checks), number), *checks]


def allow_reading(number: int) -> list[Instruction]:
    """Allow prlimit64 to tell a limit (no new one is given), not to set it."""
    low, high = argument(2), argument(2, high=True)
    checks = [(LOAD, 0, 0, low), (EQUAL, 0, 3, 0), (LOAD, 0, 0, high)]
    checks += [(EQUAL, 0, 1, 0), give(ALLOW), give(REFUSE)]
    return [(EQUAL, 0, len(checks), number), *checks]


def allow_plain_clone(number: int) -> list[Instruction]:
    """Allow clone for processes and threads, not into new namespaces."""
    checks = [(LOAD, 0, 0, argument(0)), (BITS, 0, 1, kernel.NAMESPACES)]
    checks += [give(REFUSE), give(ALLOW)]
    return [(EQUAL, 0, len(checks), number), *checks]


def refuse_clone(number: int) -> list[Instruction]:
    """Refuse a process, and answer as a kernel without threads to who asks for one."""
    checks = [(LOAD, 0, 0, argument(0)), (BITS, 0, 1, THREAD)]
    checks += [give(ABSENT), give(REFUSE)]
    return [(EQUAL, 0, len(checks), number), *checks]


def read_calls() -> Numbers:
    """The lists of calls.toml: group, architecture, name, number."""
    text = Path(__file__).with_name("calls.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def instructions(
    calls: Numbers, machine: str, processes: bool
) -> list[Instruction]:
    """The whole filter, one instruction after the other."""
    program = [(LOAD, 0, 0, ARCH), (EQUAL, 1, 0, ARCHITECTURE[machine])]
    program += [give(KILL), (LOAD, 0, 0, NUMBER)]
    if machine == "x86_64":
        program += [(ABOVE, 0, 1, X32), give(KILL)]
    groups = [*ALWAYS, "processes"] if processes else ALWAYS
    for group in groups:
        for number in calls[group][machine].values():
            program += allow(number)
    judged = calls["conditions"][machine]
    program += allow_values(judged["ioctl"], 1, TERMINAL_ASKS)
    program += allow_values(judged["prctl"], 0, THREAD_NAMES)
    program += allow_reading(judged["prlimit64"])
    if processes:
        program += allow_plain_clone(judged["clone"])
    else:
        program += refuse_clone(judged["clone"])
    program += [(EQUAL, 0, 1, judged["clone3"]), give(ABSENT)]
    return [*program, give(REFUSE)]


def pack(program: list[Instruction]) -> bytes:
    """As the kernel reads it."""
    parts = [struct.pack("HBBI", *one) for one in program]
    return b"".join(parts)


def install(program: bytes) -> None:
    """Put the filter on this process, for good; wants no_new_privs."""
    code = ctypes.create_string_buffer(program, len(program))
    length = len(program) // 8
    header = struct.pack("HxxxxxxQ", length, ctypes.addressof(code))
    place = ctypes.create_string_buffer(header, len(header))
    kernel.prctl(kernel.SECCOMP, MODE_FILTER, ctypes.addressof(place))
