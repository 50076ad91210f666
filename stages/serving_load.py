"""Clients for a server: one that counts its seconds, arrivals that wait for nobody, and bad manners.

They speak HTTP by hand over plain sockets, because what is measured is the server and not a client,
and because no library lets one stop in the middle of a request.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np

Body = dict[str, Any]
Maker = Callable[[int], Body]


@dataclass
class Outcome:
    """What became of one request; times in seconds, on one clock."""

    due: float  # when it should have been sent
    status: int = 0  # 0: no answer came
    times: list[float] = field(default_factory=list)  # of each piece of the text
    text: str = ""
    reason: str = ""
    error: str = ""
    ended: float = 0.0

    @property
    def whole(self) -> bool:
        """Whether the answer came to its end."""
        return self.reason in ("stop", "length")

    @property
    def first(self) -> float:
        """Seconds to the first token, counted from when the request was due."""
        return self.times[0] - self.due if self.times else float("nan")

    @property
    def gaps(self) -> list[float]:
        """Seconds from each token to the next."""
        gaps = np.diff(self.times)
        return gaps.tolist()


def head(url: str, path: str, length: int, key: str = "") -> bytes:
    """The head of a request, in the oldest dialect, whose answers come without chunks."""
    lines = [f"POST {path} HTTP/1.0", f"Host: {urlsplit(url).netloc}"]
    lines += ["Content-Type: application/json", f"Content-Length: {length}"]
    if key:
        lines.append(f"Authorization: Bearer {key}")
    return "\r\n".join([*lines, "", ""]).encode()


def path_of(body: Body) -> str:
    """Where a request belongs."""
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


async def ask(
    url: str, body: Body, key: str = "", due: float | None = None
) -> Outcome:
    """Send one request and read its answer, streamed or not."""
    outcome = Outcome(time.monotonic() if due is None else due)
    data = json.dumps(body).encode()
    writer = None
    try:
        reader, writer = await connect(url)
        writer.write(head(url, path_of(body), len(data), key) + data)
        await read_answer(reader, outcome)
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        outcome.error = outcome.error or f"{type(error).__name__}: {error}"
    finally:
        if writer:
            writer.close()
    outcome.ended = time.monotonic()
    return outcome


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to a server."""
    place = urlsplit(url)
    return await asyncio.open_connection(place.hostname, place.port)


async def read_answer(reader: asyncio.StreamReader, outcome: Outcome) -> None:
    """Status, headers, and then events or one object."""
    outcome.status = int((await reader.readline()).split()[1])
    events = False
    while (line := await reader.readline()).strip():
        events |= line.lower().startswith(b"content-type: text/event-stream")
    if not events:
        take(json.loads(await reader.read()), outcome)
        return
    while line := await reader.readline():
        data = line.removeprefix(b"data: ").strip()
        if data and data != b"[DONE]":
            take(json.loads(data), outcome)


def take(value: Body, outcome: Outcome) -> None:
    """Note what an event, or a whole answer, says."""
    if "error" in value:
        outcome.error = value["error"]["message"]
        return
    for choice in value.get("choices", []):
        part = choice.get("delta") or choice.get("message") or {}
        text = part.get("content") or choice.get("text") or ""
        if text:
            outcome.times.append(time.monotonic())
        outcome.text += text
        outcome.reason = choice.get("finish_reason") or outcome.reason


def poisson(rate: float, seconds: float, seed: int) -> list[float]:
    """When requests arrive that know nothing of each other: at random, `rate` a second on average.

    >>> 150 < len(poisson(10, 20, seed=0)) < 250
    True
    """
    draw = np.random.default_rng(seed)
    plenty = int(2 * rate * seconds) + 20
    gaps = draw.exponential(1 / rate, plenty)
    times = np.cumsum(gaps)
    due = times[times < seconds]
    return due.tolist()


async def open_loop(
    url: str, arrivals: Sequence[float], make: Maker, key: str = ""
) -> list[Outcome]:
    """Send each request when it is due, whether or not the earlier ones have been answered."""
    begin = time.monotonic()
    tasks = []
    for number, at in enumerate(arrivals):
        due = begin + at
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        tasks.append(asyncio.create_task(ask(url, make(number), key, due)))
    return list(await asyncio.gather(*tasks))


async def closed_loop(
    url: str, clients: int, each: int, make: Maker
) -> list[Outcome]:
    """The same from clients of which each sends its next request when it has its answer."""

    async def client(number: int) -> list[Outcome]:
        outcomes = []
        for turn in range(each):
            body = make(number * each + turn)
            outcomes.append(await ask(url, body))
        return outcomes

    done = await asyncio.gather(*map(client, range(clients)))
    return [outcome for one in done for outcome in one]


def summary(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Percentiles over what was answered, and how much was."""
    whole = [one for one in outcomes if one.whole]
    firsts, gaps = [], []
    for one in whole:
        firsts.append(one.first)
        gaps += one.gaps
    numbers: dict[str, float] = {"sent": len(outcomes), "answered": len(whole)}
    numbers["refused"] = 0
    for one in outcomes:
        numbers["refused"] += one.status == 429
    ends = [one.ended for one in outcomes]
    begins = [one.due for one in outcomes]
    numbers["answered a second"] = len(whole) / (max(ends) - min(begins))
    for share in (50, 95, 99):
        numbers[f"first p{share}"] = percentile(firsts, share)
        numbers[f"gap p{share}"] = percentile(gaps, share)
    return numbers


def percentile(values: list[float], share: float) -> float:
    """What so many of a hundred do not exceed; of nothing there is none.

    >>> percentile([1, 2, 3], 50), percentile([], 50)
    (2.0, nan)
    """
    if not values:
        return math.nan
    return float(np.percentile(values, share))


# --- bad manners: each takes an address, a body that would be in order, and a key -------------------

SMALL = 2048  # bytes that the system takes for a client that does not read
Manner = Callable[[str, Body, str], Awaitable[Outcome]]


async def raw(url: str, data: bytes, patience: float = 30) -> Outcome:
    """Send these bytes and read what comes."""
    outcome = Outcome(time.monotonic())
    reader, writer = await connect(url)
    try:
        writer.write(data)
        async with asyncio.timeout(patience):
            await read_answer(reader, outcome)
    except IndexError:
        outcome.error = "(closed without a word)"
    except (OSError, ValueError, TimeoutError) as error:
        outcome.error = outcome.error or type(error).__name__
    finally:
        writer.close()
    return outcome


async def bad_json(url: str, body: Body, key: str) -> Outcome:
    """A body that ends in the middle."""
    path = path_of(body)
    text = json.dumps(body)
    data = text[:-9].encode()
    start = head(url, path, len(data), key)
    return await raw(url, start + data)


async def giant_prompt(url: str, body: Body, key: str) -> Outcome:
    """A prompt that no model here could read."""
    text = "very long " * 20_000
    longer = with_text(body, text)
    return await ask(url, longer, key)


async def giant_body(url: str, body: Body, key: str) -> Outcome:
    """A request that says it has a gigabyte."""
    path = path_of(body)
    start = head(url, path, 10**9, key)
    return await raw(url, start + b"{")


async def wrong_key(url: str, body: Body, key: str) -> Outcome:
    """A key of nobody."""
    return await ask(url, body, "not-a-key")


async def unknown_field(url: str, body: Body, key: str) -> Outcome:
    """Something that this server does not do."""
    bias = {"5": 100}
    strange = {**body, "logit_bias": bias}
    return await ask(url, strange, key)


async def greedy(url: str, body: Body, key: str) -> Outcome:
    """A million tokens, please."""
    million = 10**6
    wanted = {**body, "max_tokens": million}
    return await ask(url, wanted, key)


async def half_request(url: str, body: Body, key: str) -> Outcome:
    """A head without a body, and then silence until the server has had enough."""
    path = path_of(body)
    start = head(url, path, 500, key)
    return await raw(url, start + b'{"model"')


async def silence(url: str, body: Body, key: str) -> Outcome:
    """A connection on which nothing comes."""
    return await raw(url, b"POST /v1/comp")


async def drops(url: str, body: Body, key: str) -> Outcome:
    """A client that goes away after the first token."""
    outcome = Outcome(time.monotonic())
    data = json.dumps({**body, "stream": True, "max_tokens": 200}).encode()
    reader, writer = await connect(url)
    writer.write(head(url, path_of(body), len(data), key) + data)
    try:
        outcome.status = int((await reader.readline()).split()[1])
        while b"data:" not in (line := await reader.readline()) and line:
            pass
    except (OSError, IndexError) as error:
        outcome.error = type(error).__name__
    writer.transport.abort()
    outcome.error = outcome.error or "(it left by itself)"
    return outcome


async def never_reads(
    url: str, body: Body, key: str, patience: float = 60
) -> Outcome:
    """A client that asks for forty answers on one connection and takes nothing of them.

    It stays until the server has had enough. Where that does not happen, it reads in the end, and its
    status says so.
    """
    outcome = Outcome(time.monotonic())
    data = json.dumps({**body, "stream": True, "max_tokens": 200}).encode()
    start = head(url, path_of(body), len(data), key)
    start = start.replace(b"HTTP/1.0", b"HTTP/1.1")  # which keeps the connection
    loop, place = asyncio.get_running_loop(), urlsplit(url)
    with socket.socket() as mute:
        mute.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
        mute.setblocking(False)
        await loop.sock_connect(mute, (place.hostname, place.port))
        await loop.sock_sendall(mute, 40 * (start + data))
        while time.monotonic() - outcome.due < patience:
            # What was reset shows here, without a byte being read.
            if mute.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                outcome.error = "(its connection was reset)"
                return outcome
            await asyncio.sleep(0.05)
        outcome.status, outcome.error = await late_status(mute)
    return outcome


async def late_status(place: socket.socket) -> tuple[int, str]:
    """The status of an answer that nobody has read so far; none where the connection was reset."""
    loop, got = asyncio.get_running_loop(), b""
    try:
        async with asyncio.timeout(5):
            while part := await loop.sock_recv(place, 65_536):
                got += part
    except TimeoutError:
        pass  # the server still waits
    except OSError:
        return 0, "(its connection was reset)"
    return (int(got.split()[1]) if got else 0), "(all is kept for it)"


async def hammers(url: str, body: Body, key: str) -> Outcome:
    """Twenty requests at once."""
    longer = {**body, "max_tokens": 200}
    tasks = []
    for _ in range(20):
        tasks.append(ask(url, longer, key))
    outcomes = await asyncio.gather(*tasks)
    for one in outcomes:
        if one.status == 429:
            return one
    return outcomes[0]


def with_text(body: Body, text: str) -> Body:
    """The same request with another text."""
    changed = dict(body)
    if "messages" in body:
        turn = {"role": "user", "content": text}
        changed["messages"] = [turn]
    else:
        changed["prompt"] = text
    return changed


# What each earns: a status, or 0 where the connection ends without one.
BAD_MANNERS: dict[str, tuple[Manner, set[int]]] = {
    "bad JSON": (bad_json, {400}),
    "a giant prompt": (giant_prompt, {413}),
    "a giant body": (giant_body, {413}),
    "a wrong key": (wrong_key, {401}),
    "an unknown field": (unknown_field, {400}),
    "too many tokens": (greedy, {400}),
    "half a request": (half_request, {408}),
    "silence": (silence, {0}),
    "a dropped connection": (drops, {200}),
    "a client that never reads": (never_reads, {0}),
    "twenty requests at once": (hammers, {429}),
}
