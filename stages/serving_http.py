"""HTTP that waits for a client only as long as the limits say, and how uvicorn is set up."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import threading
import time
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from stages.serving_protocol import Limits

# Bytes that the system may keep of what a client does not take; left to itself it keeps megabytes.
BUFFER = 8192
# On, and for no second: what is closed so is reset, and nobody tries to deliver the rest.
NO_LINGER = struct.pack("HH" if os.name == "nt" else "ii", 1, 0)


class PatientProtocol(H11Protocol):
    """HTTP that waits for a client only as long as the limits say.

    Without it a client that sends half a request, or reads nothing of its answer, keeps a connection,
    and what was written for it, until it goes away by itself.
    """

    timer: asyncio.TimerHandle | None = None

    def limits(self) -> Limits:
        """The limits of the application behind this connection."""
        limits: Limits = self.app_state["limits"]
        return limits

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A request must be there within its time; its body has a limit of its own."""
        super().connection_made(transport)
        place = transport.get_extra_info("socket")
        place.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        # Beyond that any byte that waits here means a client that does not read.
        transport.set_write_buffer_limits(high=0)
        seconds = self.limits().read_seconds
        self.timer = self.loop.call_later(seconds, self.hang_up_if_silent)

    def hang_up_if_silent(self) -> None:
        """End a connection on which no request has come."""
        if self.cycle is None:
            self.transport.abort()

    def pause_writing(self) -> None:
        """The client does not read: it has its time to begin again."""
        self.flow.pause_writing()
        self.stop_timer()
        seconds = self.limits().write_seconds
        self.timer = self.loop.call_later(seconds, self.hang_up)

    def hang_up(self) -> None:
        """End the connection, and forget what the client has not taken."""
        place = self.transport.get_extra_info("socket")
        place.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        self.transport.abort()

    def resume_writing(self) -> None:
        """The client reads again."""
        self.stop_timer()
        self.flow.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has left, or was made to."""
        self.stop_timer()
        super().connection_lost(exc)

    def stop_timer(self) -> None:
        """Wait for nothing any more."""
        if self.timer:
            self.timer.cancel()
            self.timer = None


def options(limits: Limits) -> dict[str, Any]:
    """How uvicorn is set up, whoever starts it."""
    quiet = {"log_level": "warning", "access_log": False, "server_header": False}
    ways = {"http": PatientProtocol, "ws": "none", "proxy_headers": False}
    patience = {"timeout_keep_alive": 5, "timeout_graceful_shutdown": 5}
    bounds = {"limit_concurrency": limits.connections, "backlog": 256}
    return {**quiet, **ways, **patience, **bounds}


def end_with_parent(parent: int) -> None:
    """End this worker when the process that started it is gone: nobody else would.

    `parent` is told and not asked for, because it may be gone before we could ask.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    if os.name != "nt":  # there nobody tells whose child one is
        threading.Thread(target=watch, daemon=True).start()
