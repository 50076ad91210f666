"""The server as an application: endpoints around one engine.

    app = build_app(folder, "course-model", Limits(), Callers.from_environment())

A request passes five gates before it costs anything: its caller, its size, its form, its length in
tokens, and the queue. Then the engine writes, and whatever becomes of the client, its row is freed.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi import Request as Http
from fastapi.middleware.trustedhost import TrustedHostMiddleware
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from transformers import AutoModelForCausalLM, AutoTokenizer

from stages.serving_engine import Engine, Piece, QueueFull, Request
from stages.serving_page import policy, read_page
from stages.serving_protocol import (
    END,
    EVENTS,
    Answer,
    Ask,
    Callers,
    Chat,
    Completion,
    Limits,
    Refusal,
    event,
    parse,
    usage_of,
)
from stages.serving_text import widest_token

log = logging.getLogger("course.serving")
HOSTS = ["127.0.0.1", "localhost"]
# How an answer ends that nobody should take for a whole one.
FAILED = {
    "timeout": Refusal(504, "the answer took longer than the server allows"),
    "error": Refusal(500, "the model could not answer; the server's log says why"),
    "cancelled": Refusal(499, "the client has left, or the server is stopping"),
}


class Serving:
    """A model behind a web server: its engine, its callers, and what it counts."""

    def __init__(
        self, folder: Path, name: str, limits: Limits, callers: Callers
    ) -> None:
        self.name = name
        self.limits = limits
        self.callers = callers
        self.counts: Counter[str] = Counter()
        self.started = time.time()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        # While a prompt is read with its control tokens switched off, nobody else may read one.
        self.reading = threading.Lock()
        self.widest = widest_token(self.tokenizer)
        room = {"rows": limits.rows, "length": limits.length}
        self.engine = Engine(model, self.tokenizer, waiting=limits.waiting, **room)

    def read(self, ask: Ask) -> list[int]:
        """The tokens of a prompt; what a caller wrote never becomes a mark of the template."""
        with self.reading:
            if isinstance(ask, Completion):
                ids: list[int] = self.tokenizer(ask.prompt)["input_ids"]
                return ids
            assert isinstance(ask, Chat)
            if not self.tokenizer.chat_template:
                raise Refusal(
                    400, "this model has no chat template: use completions"
                )
            messages = [message.model_dump() for message in ask.messages]
            try:
                rendered = self.tokenizer.apply_chat_template(
                    messages,
                    add_generation_prompt=True,
                    sanitize_control_tokens=True,
                )
            except Exception as error:  # a template is a program of its own
                raise Refusal(400, f"the chat template refuses: {error}") from None
            ids = rendered["input_ids"]
            return ids

    async def admit(self, ask: Ask, caller: str) -> Ticket:
        """Queue a request with the engine, if it can be served at all."""
        if ask.model != self.name:
            what = f"there is no model {ask.model[:80]!r} here, only {self.name!r}"
            raise Refusal(404, what, param="model")
        limits = self.limits
        if ask.most and ask.most > limits.most:
            raise Refusal(400, f"at most {limits.most} tokens", param="max_tokens")
        if self.widest and ask.characters > limits.length * self.widest:
            # Cutting it into tokens would only hold up whoever is read next.
            what = f"the prompt has {ask.characters:,} characters; no"
            raise Refusal(413, f"{what} {limits.length} tokens hold so much")
        ids = await asyncio.to_thread(self.read, ask)
        if not ids:
            raise Refusal(400, "the prompt is empty", param="prompt")
        if len(ids) >= limits.length:
            what = f"the prompt has {len(ids)} tokens; prompt and answer together"
            raise Refusal(413, f"{what} may have {limits.length}")
        most = ask.most or limits.most
        ticket = Ticket(asyncio.get_running_loop())
        ticket.request = Request(
            ids,
            # Where the caller set no number, the answer has what is left.
            most=min(most, limits.length - len(ids)),
            temperature=ask.temperature,
            top_p=ask.top_p,
            seed=ask.seed,
            stop=ask.stops,
            caller=caller,
            sink=ticket.put,
            deadline=time.monotonic() + limits.seconds,
        )
        try:
            self.engine.submit(ticket.request)
        except QueueFull:
            raise Refusal(
                429, "too many are waiting; come back soon", wait=2
            ) from None
        return ticket

    async def answer(self, http: Http, kind: type[Ask]) -> Response:
        """Serve one request from its headers to its last byte."""
        caller = self.callers.identify(http.headers.get("authorization", ""))
        http.state.caller = caller
        if not http.headers.get("content-type", "").startswith("application/json"):
            # A form on another site can send text, but not this without asking first.
            raise Refusal(415, "send application/json")
        self.callers.enter(caller, self.limits.per_caller)
        try:
            body = await read_body(http, self.limits)
            ask = parse(body, kind)
            ticket = await self.admit(ask, caller)
        except BaseException:
            self.callers.leave(caller)
            raise
        ticket.watch = asyncio.create_task(leave_with(http, ticket.request))
        answer = Answer(kind, self.name)
        if ask.stream:
            return Events(parts(ask, answer, ticket), lambda: self.release(ticket))
        try:
            text = "".join([piece.text async for piece in ticket.pieces()])
        finally:
            self.release(ticket)
        request = ticket.request
        if request.reason in FAILED:
            raise FAILED[request.reason]
        usage = usage_of(len(request.ids), len(request.made))
        return JSONResponse(answer.whole(text, request.reason, usage))

    def release(self, ticket: Ticket) -> None:
        """Whatever became of a client: its row is freed, it is counted, and one line is logged."""
        request = ticket.request
        # The engine drops what is cancelled; an answer that has ended does not mind.
        request.cancelled = True
        if ticket.watch:
            ticket.watch.cancel()
        self.callers.leave(request.caller)
        reason = request.reason or "cancelled"
        self.counts[f"answers_{reason}"] += 1
        # Who, how much and how long; never what.
        spent = time.monotonic() - ticket.begun
        sizes = f"{len(request.ids)} + {len(request.made)} tokens"
        log.info("%s: %s, %s, %.2f s", request.caller, reason, sizes, spent)

    def metrics(self) -> str:
        """What Prometheus reads: one line a number."""
        engine = self.engine
        numbers: dict[str, float] = {
            "uptime_seconds": round(time.time() - self.started, 1),
            "requests_running": len(engine.running) + bool(engine.filling),
            "requests_waiting": len(engine.waiting),
            "requests_open": sum(self.callers.active.values()),
        }
        numbers |= {f"{name}_total": n for name, n in engine.counts.items()}
        numbers |= {f"{name}_total": n for name, n in sorted(self.counts.items())}
        lines = [f"course_{name} {number:g}" for name, number in numbers.items()]
        return "\n".join(lines) + "\n"


class Events(StreamingResponse):
    """A stream that calls `done` however it ends, even if it never began."""

    def __init__(
        self, content: AsyncIterator[bytes], done: Callable[[], None]
    ) -> None:
        headers = {"Cache-Control": "no-store"}
        super().__init__(content, media_type=EVENTS, headers=headers)
        self.done = done

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send all of it, or as much as the client takes."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.done()


async def parts(ask: Ask, answer: Answer, ticket: Ticket) -> AsyncIterator[bytes]:
    """The events of a stream."""
    first = True
    async for piece in ticket.pieces():
        if piece.reason in FAILED:
            yield event(FAILED[piece.reason].body())
            return
        if piece.text or piece.reason:
            yield answer.event(piece.text, piece.reason, first)
            first = False
    if ask.stream_options and ask.stream_options.include_usage:
        request = ticket.request
        yield answer.usage(usage_of(len(request.ids), len(request.made)))
    yield END


class Ticket:
    """A request with the queue in which its pieces arrive, from the engine's thread to the server's."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.begun = time.monotonic()
        self.queue: asyncio.Queue[Piece] = asyncio.Queue()
        self.request = Request([])
        self.watch: asyncio.Task[None] | None = None

    def put(self, piece: Piece) -> None:
        """Called by the engine; where the server is gone, so is whoever asked."""
        try:
            self.loop.call_soon_threadsafe(self.queue.put_nowait, piece)
        except RuntimeError:
            self.request.cancelled = True

    async def pieces(self) -> AsyncIterator[Piece]:
        """The pieces of the answer as they come; the last one has a reason."""
        reason = ""
        while not reason:
            piece = await self.queue.get()
            reason = piece.reason
            yield piece


async def leave_with(http: Http, request: Request) -> None:
    """Cancel a request when its client goes away."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
    request.cancelled = True


async def read_body(http: Http, limits: Limits) -> bytes:
    """The body of a request, if it is not too long and does not take too long to come."""
    too_long = Refusal(413, f"a request may have {limits.body:,} bytes")
    said = http.headers.get("content-length", "0")
    if said.isdecimal() and int(said) > limits.body:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(limits.read_seconds):
            async for part in http.stream():
                body += part
                if len(body) > limits.body:
                    raise too_long
    except TimeoutError:
        raise Refusal(408, "the request took too long to arrive") from None
    return bytes(body)


def build_app(
    folder: Path | str,
    name: str,
    limits: Limits,
    callers: Callers,
    hosts: tuple[str, ...] = (),
) -> FastAPI:
    """The application that serves the model of a folder."""
    serving = Serving(Path(folder), name, limits, callers)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, Any]]:
        serving.engine.start()
        yield {"limits": limits}
        await asyncio.to_thread(serving.engine.stop)

    quiet: dict[str, Any] = {
        "docs_url": None,
        "redoc_url": None,
        "openapi_url": None,
    }
    app = FastAPI(lifespan=lifespan, **quiet)
    # A page of another site may point its own name at this address, but it cannot lie in this header.
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*HOSTS, *hosts])
    app.state.serving = serving
    add_routes(app, serving)
    add_errors(app, serving)
    return app


def add_routes(app: FastAPI, serving: Serving) -> None:
    """What can be asked."""

    @app.post("/v1/chat/completions")
    async def chat(http: Http) -> Response:
        return await serving.answer(http, Chat)

    @app.post("/v1/completions")
    async def complete(http: Http) -> Response:
        return await serving.answer(http, Completion)

    @app.get("/v1/models")
    async def models() -> Any:
        facts = {"id": serving.name, "object": "model", "owned_by": "course"}
        return {"object": "list", "data": [{**facts, "created": 0}]}

    @app.get("/health")
    async def health() -> Response:
        thread = serving.engine.thread
        well = thread is not None and thread.is_alive()
        words = {"status": "ok" if well else "the engine has stopped"}
        return JSONResponse(words, status_code=200 if well else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(serving.metrics(), media_type="text/plain; version=0.0.4")

    @app.get("/")
    async def page() -> Response:
        text = read_page()
        rules = policy(text) + "; frame-ancestors 'none'"
        headers = {"Content-Security-Policy": rules}
        headers |= {"X-Content-Type-Options": "nosniff"}
        headers |= {"Referrer-Policy": "no-referrer"}
        return Response(text, media_type="text/html", headers=headers)


def add_errors(app: FastAPI, serving: Serving) -> None:
    """Every error has the same plain form."""

    @app.exception_handler(Refusal)
    async def refuse(http: Http, error: Refusal) -> Response:
        status = error.status
        serving.counts[f"refused_{status}"] += 1
        # What failed on its way had its line when its row was freed.
        if error not in FAILED.values():
            log.info("%s: refused, %d", getattr(http.state, "caller", "-"), status)
        body = error.body()
        return JSONResponse(body, status, headers=error.headers)

    @app.exception_handler(HTTPException)
    async def unknown(http: Http, error: HTTPException) -> Response:
        words = str(error.detail)
        refusal = Refusal(error.status_code, words)
        return await refuse(http, refusal)

    @app.exception_handler(Exception)
    async def broken(http: Http, error: Exception) -> Response:
        return JSONResponse(FAILED["error"].body(), 500)
