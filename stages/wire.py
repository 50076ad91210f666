"""How many bytes this process has sent over its connections, as Linux counts them."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys

# Where the kernel's `struct tcp_info` has `tcpi_bytes_sent` and `tcpi_bytes_retrans`, and its end.
SENT_AND_AGAIN = 200
ENOUGH = 256


def can_count() -> bool:
    """Whether this system counts what a connection has sent: Linux does, and NCCL's links have none."""
    return sys.platform == "linux"


def sent_bytes() -> int:
    """Bytes that have left through this process's TCP connections; what was sent twice counts once.

    >>> sent_bytes() >= 0 or not can_count()
    True
    """
    total = 0
    for number in map(int, os.listdir("/proc/self/fd")):
        # Some are files, or have closed since they were listed.
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{number}")
            if target.startswith("socket:"):
                total += sent_through(number)
    return total


def sent_through(number: int) -> int:
    """Bytes that have left through one connection, by its file descriptor."""
    with socket.socket(fileno=os.dup(number)) as connection:
        option = (socket.IPPROTO_TCP, socket.TCP_INFO)
        told = connection.getsockopt(*option, ENOUGH)
    sent, again = struct.unpack_from("QQ", told, SENT_AND_AGAIN)
    return sent - again
