"""What travels between a client and the server: requests in, answers, events and errors out.

It is the part of OpenAI's interface that nearly every server and client speaks. What we do not support
is refused by name, because a server that ignores a field gives an answer to another question.
"""

from __future__ import annotations

import hmac
import json
import os
import time
import uuid
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

# Where a server finds its callers: "alice:her-key,bob:his-key". Not on the command line, which every
# user of a machine can read, and not in a file of ours.
KEYS = "COURSE_SERVE_KEYS"
KINDS = {401: "authentication_error", 429: "rate_limit_error"}
EVENTS = "text/event-stream"
END = b"data: [DONE]\n\n"


Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]


class Limits(pydantic.BaseModel):
    """How much of a server one request, one caller and all together may have."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    rows: Count = 8  # answers at once
    length: Count = 1024  # tokens of a prompt and its answer
    most: Count = 256  # tokens of an answer
    waiting: Annotated[int, Field(ge=0)] = 32  # requests in the queue
    per_caller: Count = 4  # requests of one caller, waiting or served
    seconds: Positive = 60  # from a request's arrival to its last token
    body: Count = 262_144  # bytes of a request
    read_seconds: Positive = 10  # to send a request
    write_seconds: Positive = 10  # to take what was sent
    connections: Count = 512


class Refusal(Exception):
    """A request that is not served, and why, in words for whoever sent it."""

    def __init__(
        self, status: int, message: str, param: str | None = None, wait: int = 0
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.headers = {"Retry-After": str(wait)} if wait else {}

    def body(self) -> dict[str, Any]:
        """The error as the protocol has it.

        >>> Refusal(429, "too many").body()["error"]["type"]
        'rate_limit_error'
        """
        kind = "invalid_request_error"
        if self.status >= 500:
            kind = "server_error"
        kind = KINDS.get(self.status, kind)
        error: dict[str, Any] = {"message": str(self), "type": kind}
        error |= {"param": self.param, "code": None}
        return {"error": error}


class Message(pydantic.BaseModel):
    """One turn of a conversation."""

    model_config = pydantic.ConfigDict(extra="forbid")

    role: Literal["system", "user", "assistant"]
    content: str


class StreamOptions(pydantic.BaseModel):
    """What a stream says beside the text."""

    model_config = pydantic.ConfigDict(extra="forbid")

    include_usage: bool = False


class Ask(pydantic.BaseModel):
    """What both endpoints take."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    model: str
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    n: Literal[1] = 1

    @property
    def most(self) -> int | None:
        """How many tokens the answer may have, if the caller says."""
        return self.max_tokens

    @property
    def characters(self) -> int:
        """The length of what the caller wrote."""
        raise NotImplementedError

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings at which the answer ends."""
        given = self.stop or []
        if isinstance(given, str):
            given = [given]
        return tuple(filter(None, given))


class Chat(Ask):
    """A request for the next message of a conversation."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None

    @property
    def characters(self) -> int:
        """The length of what the caller wrote."""
        return sum(len(message.content) for message in self.messages)

    @property
    def most(self) -> int | None:
        """The newer name of the same limit goes first."""
        return self.max_completion_tokens or self.max_tokens


class Completion(Ask):
    """A request to continue a text."""

    prompt: str

    @property
    def characters(self) -> int:
        """The length of what the caller wrote."""
        return len(self.prompt)


def parse(body: bytes, kind: type[Ask]) -> Ask:
    """A request from the bytes of its body, or the first thing that is wrong with it.

    >>> parse(b'{"model": "m", "prompt": "a", "top_k": 5}', Completion)
    Traceback (most recent call last):
    stages.serving_protocol.Refusal: top_k: this server does not know it
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise Refusal(400, "the body is not JSON") from None
    if not isinstance(value, dict):
        raise Refusal(400, "the body is not a JSON object")
    # A field that is null is one that was not sent.
    value = {name: one for name, one in value.items() if one is not None}
    try:
        return kind.model_validate(value)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part)[:40] for part in first["loc"])
        words = first["msg"]
        if first["type"] == "extra_forbidden":
            words = "this server does not know it"
        raise Refusal(400, f"{place}: {words}", param=place) from None


@dataclass
class Callers:
    """Who may ask, and how many of their requests are being served.

    Of a key only its hash is kept. Every hash is compared, and in constant time, so that how long a
    refusal takes tells nothing of how much of a key was right.
    """

    hashes: dict[str, bytes] = field(default_factory=dict)
    active: dict[str, int] = field(default_factory=dict)

    @classmethod
    def from_environment(cls) -> Callers:
        """The callers that the environment names; with none, everyone is `anyone`."""
        hashes = {}
        for pair in filter(None, os.environ.get(KEYS, "").split(",")):
            name, _, key = pair.partition(":")
            hashes[name] = digest(key)
        return cls(hashes)

    def identify(self, authorization: str) -> str:
        """The name of a caller."""
        if not self.hashes:
            return "anyone"
        given = digest(authorization.removeprefix("Bearer ").strip())
        name = ""
        for known, kept in self.hashes.items():
            if hmac.compare_digest(kept, given):
                name = known
        if not name:
            raise Refusal(401, "this key is not one of ours")
        return name

    def enter(self, name: str, most: int) -> None:
        """Count one more request of a caller, unless they have enough already."""
        if self.active.get(name, 0) >= most:
            what = f"you have {most} requests here already, which is the limit"
            raise Refusal(429, what, wait=1)
        self.active[name] = self.active.get(name, 0) + 1

    def leave(self, name: str) -> None:
        """One of a caller's requests has ended."""
        self.active[name] -= 1
        if not self.active[name]:
            del self.active[name]


def digest(key: str) -> bytes:
    """What is kept of a key."""
    return sha256(key.encode()).digest()


@dataclass
class Answer:
    """An answer on its way out, in the words of either endpoint."""

    kind: type[Ask]
    model: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def envelope(self, chunk: bool = False) -> dict[str, Any]:
        """What stands around each answer and each part of one."""
        name = "text_completion"
        if self.kind is Chat:
            name = "chat.completion.chunk" if chunk else "chat.completion"
        prefix = "chatcmpl" if self.kind is Chat else "cmpl"
        facts: dict[str, Any] = {"id": f"{prefix}-{self.id}", "object": name}
        return {**facts, "created": self.created, "model": self.model}

    def whole(
        self, text: str, reason: str, usage: dict[str, int]
    ) -> dict[str, Any]:
        """The answer in one piece."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
        choice["logprobs"] = None
        if self.kind is Chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        return {**self.envelope(), "choices": [choice], "usage": usage}

    def event(self, text: str, reason: str = "", first: bool = False) -> bytes:
        """A part of the answer as an event."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason or None}
        if self.kind is Chat:
            role = {"role": "assistant"} if first else {}
            choice["delta"] = {**role, "content": text}
        else:
            choice["text"] = text
        return event({**self.envelope(chunk=True), "choices": [choice]})

    def usage(self, usage: dict[str, int]) -> bytes:
        """The event that says what it took."""
        parts = self.envelope(chunk=True)
        parts["choices"] = []
        parts["usage"] = usage
        return event(parts)


def event(value: Any) -> bytes:
    r"""A value as a server-sent event.

    >>> event({"a": 1})
    b'data: {"a":1}\n\n'
    """
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def usage_of(prompt: int, made: int) -> dict[str, int]:
    """Tokens read, tokens written, and both.

    >>> usage_of(3, 4)["total_tokens"]
    7
    """
    counts = {"prompt_tokens": prompt, "completion_tokens": made}
    return {**counts, "total_tokens": prompt + made}
