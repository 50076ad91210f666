"""Many answers at once from one model: continuous batching over a cache with a row for each answer.

    engine = Engine(model, tokenizer, rows=8, length=1024)
    engine.submit(Request(ids, most=20, sink=print))
    while engine.busy:
        engine.step()

A request joins as soon as a row is free and leaves with its last token; nobody waits for the slowest of
a batch. Prompts are read in pieces between the steps, so that a long one holds nobody up for long.
What a request draws depends on its own seed and never on its neighbours.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

from stages.serving_cache import SlotLayer, mask_of
from stages.serving_text import Text
from utils.errors import CourseError

log = logging.getLogger(__name__)
# Below this temperature float32 would divide by nought.
COLD = 1e-5


@dataclass(frozen=True)
class Piece:
    """A part of an answer; the last one says why it is the last.

    Reasons are "stop" and "length", as the protocol has them, or "cancelled", "timeout", "error".
    """

    text: str
    reason: str = ""


def nobody(piece: Piece) -> None:
    """A sink for those who look at the request itself."""


@dataclass(eq=False)
class Request:
    """What is asked of the engine, and what has come of it."""

    ids: list[int]
    most: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    caller: str = ""
    # Called from the engine's thread with each piece.
    sink: Callable[[Piece], None] = nobody
    deadline: float = float("inf")
    cancelled: bool = False
    made: list[int] = field(default_factory=list)
    reason: str = ""


@dataclass(eq=False)
class Running:
    """A request in a row of the cache: how many of its tokens are there, and its text."""

    request: Request
    text: Text
    cache: Any
    place: int = 0
    draw: torch.Generator | None = None


class QueueFull(Exception):
    """There are as many waiting as may wait."""


class Engine:
    """A model, the requests in its rows, and those that wait; `step` is all it does."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        rows: int = 8,
        length: int = 1024,
        waiting: int = 32,
        chunk: int = 128,
    ) -> None:
        self.model = model.eval()
        # A copy: the server reads prompts with its own, at the same time.
        self.tokenizer = copy.deepcopy(tokenizer)
        self.rows = rows
        self.length = length
        self.room = waiting
        self.chunk = chunk
        self.waiting: deque[Request] = deque()
        self.filling: Running | None = None
        self.running: list[Running] = []
        self.cache: Cache | None = None
        self.slots: list[SlotLayer] = []
        self.ends = end_tokens(model, tokenizer)
        self.counts = dict.fromkeys(("steps", "tokens", "prompt_tokens"), 0)
        self.lock = threading.Condition()
        self.stopping = False
        self.thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether anything is left to do."""
        return bool(self.waiting or self.filling or self.running)

    def submit(self, request: Request) -> None:
        """Queue a request; an error if it can never fit, or if too many wait."""
        if len(request.ids) + request.most > self.length:
            what = f"{len(request.ids)} tokens and {request.most} to come"
            raise ValueError(f"{what} are more than {self.length}")
        with self.lock:
            if len(self.waiting) >= self.room:
                raise QueueFull(f"{self.room} requests are waiting")
            self.waiting.append(request)
            self.lock.notify()

    @torch.inference_mode()
    def step(self) -> None:
        """Let go who has left, admit one, read a piece of its prompt, write a token of each answer."""
        self.drop_the_gone()
        self.admit()
        if self.filling:
            self.fill(self.filling)
        if self.running:
            self.write()

    def drop_the_gone(self) -> None:
        """End what was cancelled or is out of time, wherever it is."""
        now = time.monotonic()
        with self.lock:
            gone = [one for one in self.waiting if why_gone(one, now)]
            for request in gone:
                self.waiting.remove(request)
        for request in gone:
            finish(request, "", why_gone(request, now))
        if self.filling and why_gone(self.filling.request, now):
            finish(self.filling.request, "", why_gone(self.filling.request, now))
            self.filling = None
        for one in list(self.running):
            if why_gone(one.request, now):
                self.leave(one, why_gone(one.request, now))

    def admit(self) -> None:
        """Take the next request that waits, if a row is free and no prompt is being read."""
        with self.lock:
            if self.filling or len(self.running) >= self.rows or not self.waiting:
                return
            request = self.next_waiting()
            self.waiting.remove(request)
        text = Text(self.tokenizer, request.stop)
        self.filling = Running(request, text, DynamicCache())
        if request.temperature > 0 and request.seed is not None:
            # `seed` alone decides what is drawn, whoever else is served.
            draw = torch.Generator(self.model.device).manual_seed(request.seed)
            self.filling.draw = draw

    def next_waiting(self) -> Request:
        """The oldest request of those whose caller has the fewest rows.

        So whoever asks once does not wait behind somebody who asks all the time.
        """
        rows: Counter[str] = Counter()
        for one in self.running:
            rows[one.request.caller] += 1
        return min(self.waiting, key=lambda request: rows[request.caller])

    def fill(self, one: Running) -> None:
        """Read the next piece of a prompt; behind the last one comes the first token."""
        try:
            piece = one.request.ids[one.place : one.place + self.chunk]
            logits = self.model(
                torch.tensor([piece], device=self.model.device),
                past_key_values=one.cache,
                logits_to_keep=1,
                use_cache=True,
            ).logits
            one.place += len(piece)
            self.counts["prompt_tokens"] += len(piece)
            if one.place == len(one.request.ids):
                self.filling = None
                self.join(one)
                self.take(one, choose(logits[0, -1].float(), one))
        except Exception:
            log.exception("a prompt could not be read")
            self.filling = None
            if one in self.running:
                self.leave(one, "error")
            else:
                finish(one.request, "", "error")

    def join(self, one: Running) -> None:
        """Give a request whose prompt is read the first free row."""
        if self.cache is None:
            layers = one.cache.layers
            if any(type(layer) is not DynamicLayer for layer in layers):
                kinds = ", ".join(
                    sorted({type(layer).__name__ for layer in layers})
                )
                fix = "serve it by `transformers serve` or vLLM"
                raise CourseError(
                    "this model's cache has no plain rows", kinds, fix
                )
            self.slots = [SlotLayer(self.rows, self.length, one) for one in layers]
            self.cache = Cache(layers=list(self.slots))
        for slots, filled in zip(self.slots, one.cache.layers, strict=True):
            slots.put(len(self.running), filled)
        one.cache = None
        self.running.append(one)

    def write(self) -> None:
        """One more token for each answer."""
        batch = list(self.running)
        device = self.model.device
        try:
            last = torch.tensor(
                [[one.request.made[-1]] for one in batch], device=device
            )
            places = torch.tensor([one.place for one in batch], device=device)
            for layer in self.slots:
                layer.places = places
            logits = self.model(
                last,
                attention_mask=mask_of(places, self.model.dtype),
                position_ids=places[:, None],
                past_key_values=self.cache,
                use_cache=True,
            ).logits[:, -1]
        except Exception:
            log.exception("a step failed")
            for one in batch:
                self.leave(one, "error")
            return
        self.counts["steps"] += 1
        # All of them first: a row that moves into a gap takes its newest token along.
        for one in batch:
            one.place += 1
        for one, row in zip(batch, logits.float(), strict=True):
            try:
                self.take(one, choose(row, one))
            except Exception:
                # What one request asks for is paid by this request alone.
                log.exception("a token could not be chosen")
                self.leave(one, "error")

    def take(self, one: Running, token: int) -> None:
        """Add a token to an answer, and end it where it ends."""
        request = one.request
        request.made.append(token)
        self.counts["tokens"] += 1
        if token in self.ends:
            self.leave(one, "stop")
            return
        piece = one.text.add(token)
        if one.text.stopped:
            self.leave(one, "stop", piece)
        elif len(request.made) == request.most:
            self.leave(one, "length", piece)
        elif piece:
            request.sink(Piece(piece))

    def leave(self, one: Running, reason: str, piece: str = "") -> None:
        """End an answer and free its row; the last row moves into the gap."""
        row = self.running.index(one)
        last = self.running.pop()
        if last is not one:
            self.running[row] = last
            for layer in self.slots:
                layer.move(len(self.running), row, last.place)
        finish(one.request, piece + one.text.rest(), reason)

    def start(self) -> Engine:
        """Step in a thread of its own until `stop`."""
        self.thread = threading.Thread(target=self.run, daemon=True, name="engine")
        self.thread.start()
        return self

    def run(self) -> None:
        """Step while there is something to do, and wait while there is not."""
        while not self.stopping:
            with self.lock:
                if not self.busy:
                    self.lock.wait(timeout=1)
                    continue
            try:
                self.step()
            except Exception:
                # Whatever it was, those who are here pay for it and those who come do not.
                log.exception("the engine begins anew")
                self.end_all("error")

    def stop(self) -> None:
        """End the thread, and with it whatever is not finished."""
        self.stopping = True
        with self.lock:
            self.lock.notify()
        if self.thread:
            self.thread.join(timeout=60)
        self.end_all("cancelled")

    def end_all(self, reason: str) -> None:
        """End every request, wherever it is, and forget the cache."""
        with self.lock:
            requests = [one.request for one in self.running]
            requests += [self.filling.request] if self.filling else []
            requests += self.waiting
            self.waiting.clear()
        self.running, self.filling, self.cache = [], None, None
        for request in requests:
            if not request.reason:
                finish(request, "", reason)


def finish(request: Request, text: str, reason: str) -> None:
    """Hand over the last piece of an answer."""
    request.reason = reason
    request.sink(Piece(text, reason))


def why_gone(request: Request, now: float) -> str:
    """Why nobody wants this answer any more; empty if somebody does."""
    if request.cancelled:
        return "cancelled"
    return "timeout" if now > request.deadline else ""


def choose(logits: torch.Tensor, one: Running) -> int:
    """The next token of one answer: the likeliest, or one that is drawn."""
    request = one.request
    if request.temperature == 0:
        return int(logits.argmax())
    # The largest is nought, and so remains a number however cold it gets.
    scores = logits - logits.max()
    scores /= max(request.temperature, COLD)
    odds = torch.softmax(scores, dim=-1)
    ranked, order = odds.sort(descending=True)
    # Of the likeliest as many as together have `top_p`; before the first there are none.
    before = ranked.cumsum(0) - ranked
    before[0] = 0
    ranked[before >= request.top_p] = 0
    place = torch.multinomial(ranked, 1, generator=one.draw)
    return int(order[place])


def end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """The tokens that end an answer: those of the model's generation settings and the tokenizer's own."""
    ends = model.generation_config.eos_token_id
    if not isinstance(ends, list):
        ends = [ends]
    known = {*ends, tokenizer.eos_token_id}
    return known - {None}
