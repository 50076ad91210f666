"""Plain values as JSON, which is how the two caged processes speak to each other.

Nothing but data crosses: no code, no class, no pickle. What a value is, is said by a mark in front
of its parts, and whoever reads rebuilds it from the types of Python itself; so an object with a
lying `__eq__` arrives as what it holds, or as a handle that cannot be compared at all.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

# The longest message: of a call, or of its result.
LONGEST = 4_000_000
WORD = 1 << 63
SEQUENCES: dict[str, Callable[[list], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
}
PAIRS: dict[str, Callable[[Any], Any]] = {"dict": dict, "Counter": Counter}
MarkObject = Callable[[object], list]
MakeObject = Callable[[list], object]


class NotPlain(ValueError):
    """Something that is no plain value, or a message that is none."""


def encode(value: object, mark_object: MarkObject) -> Any:
    """A value as what JSON can hold; `mark_object` says what to put for what is no plain value."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (int, float, complex)):
        return encode_number(value)
    if isinstance(value, (bytes, bytearray)):
        return [
            type_name(value, "bytes", "bytearray"),
            bytes(value).decode("latin-1"),
        ]
    if isinstance(value, range):
        return ["range", *map(encode_number, (value.start, value.stop, value.step))]
    for name, kind in SEQUENCES.items():
        if isinstance(value, kind):  # type: ignore[arg-type]
            return [name, *(encode(item, mark_object) for item in value)]  # type: ignore[attr-defined]
    if isinstance(value, dict):
        pairs = [
            [encode(key, mark_object), encode(item, mark_object)]
            for key, item in value.items()
        ]
        return [type_name(value, "Counter", "dict"), *pairs]
    return mark_object(value)


def type_name(value: object, *names: str) -> str:
    """The first of the names that one of the value's classes has."""
    known = [kind.__name__ for kind in type(value).__mro__]
    return next(name for name in names if name in known)


def encode_number(value: complex) -> Any:
    """A number: as it is where JSON knows it, else by a mark."""
    if isinstance(value, int):
        whole = int.__int__(value)
        return whole if -WORD < whole < WORD else ["int", hex(whole)]
    if isinstance(value, float):
        real = float.__float__(value)
        return real if math.isfinite(real) else ["float", repr(real)]
    return ["complex", encode_number(value.real), encode_number(value.imag)]


def rebuild(data: Any, make_object: MakeObject) -> Any:
    """The value of what was sent; what makes no sense is `NotPlain`.

    >>> rebuild(["tuple", 1, ["set", 2], ["float", "inf"]], refuse)
    (1, {2}, inf)
    """
    try:
        return decode(data, make_object)
    except NotPlain:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise NotPlain("a value that makes no sense") from error


def decode(data: Any, make_object: MakeObject) -> Any:
    """What `rebuild` does, while nobody lies."""
    if not isinstance(data, list):
        return decode_scalar(data)
    if not data or not isinstance(data[0], str):
        raise NotPlain("a value without a mark")
    mark, *parts = data
    if mark in SEQUENCES:
        return SEQUENCES[mark]([decode(part, make_object) for part in parts])
    if mark in PAIRS:
        return PAIRS[mark](dict(decode_pairs(parts, make_object)))
    if mark in SCALARS:
        return SCALARS[mark](*parts)
    return make_object(data)


def decode_scalar(data: Any) -> Any:
    """What JSON itself knows, but for its objects."""
    if data is None or isinstance(data, (bool, int, float, str)):
        return data
    raise NotPlain("a value without a mark")


def decode_pairs(parts: list, make_object: MakeObject) -> Iterator[tuple[Any, Any]]:
    """The items of a dictionary."""
    for pair in parts:
        key, value = pair
        yield decode(key, make_object), decode(value, make_object)


def decode_complex(real: Any, imaginary: Any) -> complex:
    """A complex number of its two parts."""
    parts = [decode(part, refuse) for part in (real, imaginary)]
    return complex(*parts)


def refuse(data: object) -> Any:
    """For where only plain values can stand."""
    raise NotPlain("an object that is no plain value")


SCALARS: dict[str, Callable[..., Any]] = {
    "int": lambda text: int(text, 16),
    "float": float,
    "complex": decode_complex,
    "bytes": lambda text: text.encode("latin-1"),
    "bytearray": lambda text: bytearray(text.encode("latin-1")),
    "range": range,
}


def send(descriptor: int, message: Any) -> None:
    """Write a message to a pipe, its length before it."""
    data = json.dumps(message).encode("ascii")
    if len(data) > LONGEST:
        raise NotPlain(f"a value of {len(data):,} bytes, more than {LONGEST:,}")
    rest = memoryview(struct.pack("<I", len(data)) + data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def receive(descriptor: int) -> Any:
    """Read a message; EOFError where the other side is gone, NotPlain where it is none."""
    (length,) = struct.unpack("<I", read_exactly(descriptor, 4))
    if length > LONGEST:
        raise NotPlain(f"a message of {length:,} bytes, more than {LONGEST:,}")
    data = read_exactly(descriptor, length)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise NotPlain("a message that is no JSON") from error


def read_exactly(descriptor: int, length: int) -> bytes:
    """That many bytes of a pipe."""
    parts = []
    while length:
        part = os.read(descriptor, min(length, 1 << 16))
        if not part:
            raise EOFError
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
