"""What a process really sends: the bytes that have left through its TCP sockets, as Linux counts them."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys

from stages.launch import count_gpus

# Where `tcpi_bytes_sent` and `tcpi_bytes_retrans` stand in the kernel's `struct tcp_info`.
BYTES_SENT = 200


def can_count(world: int) -> bool:
    """Whether `world` processes of this machine would speak through TCP, on a system that counts it.

    >>> can_count(world=2) <= (sys.platform == "linux")
    True
    """
    return sys.platform == "linux" and count_gpus() < world


def wire_bytes() -> int:
    """Bytes that left this process through its TCP sockets, each counted once.

    >>> wire_bytes() >= 0                                          # doctest: +SKIP
    True
    """
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    return sum(sent_through(number) for number in numbers)


def sent_through(number: int) -> int:
    """Bytes sent through one open file, without those sent again; none if it is no TCP socket."""
    if sys.platform != "linux":
        return 0
    # A number may be closed by now, and a socket may be of another kind.
    with contextlib.suppress(OSError):
        if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
            with socket.socket(fileno=os.dup(number)) as copy:
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            sent, again = struct.unpack_from("QQ", info, BYTES_SENT)
            return sent - again
    return 0
