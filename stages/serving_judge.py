"""An engine that plays what it is given, and the official client in front of a server that uses it.

Whether a streaming endpoint is right shows in what the client makes of it: no model is needed.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from fastapi import FastAPI

from stages.serving import serve_app
from stages.serving_engine import Piece, QueueFull

TALK: list[Any] = [{"role": "user", "content": "What now?"}]
LATE = Piece("(nothing was sent before the second piece)", "stop")


class Played:
    """A request whose pieces are given; behind the first one it waits until the client has it."""

    usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self.pieces = iter(pieces)
        self.count = 0
        self.cancelled = False
        self.seen = threading.Event()

    async def next(self) -> Piece:
        """The next piece of the answer."""
        await asyncio.sleep(0.002)
        self.count += 1
        if self.count == 2 and not await asyncio.to_thread(self.seen.wait, 20):
            return LATE
        return next(self.pieces)


class Player:
    """An engine for one request, or with no room for any."""

    def __init__(self, pieces: Iterable[Piece], full: bool = False) -> None:
        self.request = Played(pieces)
        self.full = full

    def submit(self, body: dict[str, Any]) -> Played:
        """Queue a request."""
        if self.full:
            raise QueueFull("too many are waiting")
        return self.request


Build = Callable[[Player], FastAPI]


def stream(
    build: Build, player: Player, leave: bool = False, **how: Any
) -> list[Any]:
    """The chunks that the official client gets; with `leave` it hangs up behind the first."""
    from openai import OpenAI

    with serve_app(build(player)) as url:
        options = {"api_key": "none", "max_retries": 0, "timeout": 60}
        client = OpenAI(base_url=url + "/v1", **options)  # type: ignore[arg-type]
        chunks = client.chat.completions.create(
            model="m", messages=TALK, stream=True, **how
        )
        parts = [next(iter(chunks))]
        player.request.seen.set()
        if not leave:
            parts += list(chunks)
        chunks.close()
        late = time.monotonic() + 10
        while leave and not player.request.cancelled and time.monotonic() < late:
            time.sleep(0.01)
        client.close()
    return parts
