"""An engine that plays what it is given, and the official client in front of a server that uses it.

Whether a streaming endpoint is right shows in what the client makes of it: no model is needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import FastAPI
from starlette.requests import ClientDisconnect

from stages.serving import serve_app
from stages.serving_engine import Piece, QueueFull

TALK: list[Any] = [{"role": "user", "content": "What now?"}]
LATE = Piece("(nothing was sent before the second piece)", "stop")
# So many pieces may be written for a client that has left until somebody notices.
PATIENCE = 400
# Turns of the server's own loop after which nothing more is expected to happen in it.
# They are counted, and no clock is read: a machine that stalls holds the turns up too.
TURNS = 300
TURN_SECONDS = 0.01
# A loop that an answer never gives back has no turns; after so long it is left alone.
STUCK_SECONDS = 60


async def happens_within_the_turns(has_happened: Callable[[], bool]) -> bool:
    """Whether something happens in the loop that runs, in as many turns as are waited for."""
    for _ in range(TURNS):
        if has_happened():
            return True
        await asyncio.sleep(TURN_SECONDS)
    return has_happened()


class Played:
    """A request whose pieces are given; the second one comes when the first has been sent."""

    usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self.pieces = iter(pieces)
        self.count = 0
        self.cancelled = False
        self.sent = threading.Event()

    async def next(self) -> Piece:
        """The next piece of the answer."""
        await asyncio.sleep(0.002)
        self.count += 1
        if self.count == 2 and not await happens_within_the_turns(self.sent.is_set):
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


class Overheard:
    """An application of which a request is told when the first part of an answer goes out."""

    def __init__(self, app: FastAPI, request: Played) -> None:
        self.app = app
        self.request = request
        self.loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass everything on."""
        self.loop = asyncio.get_running_loop()

        async def overhear(message: Any) -> None:
            await send(message)
            if message.get("body"):
                self.request.sent.set()

        await self.app(scope, receive, overhear)


def stream(
    build: Build, player: Player, leave: bool = False, **how: Any
) -> list[Any]:
    """The chunks that the official client gets; with `leave` it hangs up behind the first."""
    overheard = Overheard(build(player), player.request)
    app: Any = overheard
    with serve_app(app) as url:
        client = official_client().with_options(base_url=url + "/v1")
        chunks = client.chat.completions.create(
            model="m", messages=TALK, stream=True, **how
        )
        parts = [next(iter(chunks))]
        if not leave:
            parts += list(chunks)
        chunks.close()
        if leave:
            assert overheard.loop is not None
            wait_in(overheard.loop, player.request)
    return parts


@functools.cache
def official_client() -> Any:
    """One for all: it reads certificates when it is made, which takes longer than an answer."""
    from openai import OpenAI

    return OpenAI(api_key="none", max_retries=0, timeout=60)


def vanish(build: Build, player: Player) -> None:
    """The same from a client that is gone before the answer begins."""
    app = build(player)
    body = {"model": "m", "messages": TALK, "stream": True}
    send_and_vanish(app, "/v1/chat/completions", body)


def send_and_vanish(app: Any, path: str, body: dict[str, Any]) -> None:
    """Hand a request to an application whose answer nobody takes, not even its head."""
    letters = [{"type": "http.request", "body": json.dumps(body).encode()}]
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope: Any = {"type": "http", "method": "POST", "path": path}
    scope["headers"] = headers
    scope |= {"http_version": "1.1", "query_string": b""}
    # From this edition on a server says by an OSError that a client is gone.
    scope |= {"asgi": {"version": "3.0", "spec_version": "2.4"}}

    async def receive() -> Any:
        return letters.pop() if letters else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        raise OSError("the client is gone")

    async def run() -> None:
        with contextlib.suppress(OSError, ClientDisconnect):
            await app(scope, receive, send)

    # In a thread of its own, because a notebook has a loop that runs already.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, run()).result()


def wait_in(loop: asyncio.AbstractEventLoop, request: Played) -> None:
    """Wait in the server's loop, from another thread, until a request has ended."""
    waited = asyncio.run_coroutine_threadsafe(wait_for_the_end(request), loop)
    with contextlib.suppress(TimeoutError):
        waited.result(STUCK_SECONDS)


async def wait_for_the_end(request: Played) -> None:
    """Until somebody ends a request, it has written far too much for nobody, or it stands still."""
    far_too_much = request.count + PATIENCE
    moves = True
    while moves and not request.cancelled and request.count < far_too_much:
        moves = await happens_within_the_turns(moved_since(request, request.count))


def moved_since(request: Played, count: int) -> Callable[[], bool]:
    """The question whether a request was ended, or has written more than so many pieces."""
    return lambda: request.cancelled or request.count > count
