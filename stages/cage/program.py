"""The program's side: run it, then answer the calls that the tests' process makes of it.

Everything here runs in the interpreter of a hostile program, which may change any of it. So
nothing here is believed: what the other side gets from it is data, and wrong data fails tests.
"""

from __future__ import annotations

import atexit
import sys
import traceback
from types import ModuleType
from typing import Any

from .values import NotPlain, decode, encode, receive, send

LONGEST_TEXT = 500


def text_of(error: BaseException) -> str:
    """What an exception says, if it says anything."""
    try:
        return str(error)[:LONGEST_TEXT]
    except BaseException:
        return ""


def flush() -> None:
    """Let out what was printed."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        return


class Program:
    """A program that has run, and the objects of it that the tests hold by a number."""

    def __init__(self, name: str) -> None:
        self.module = ModuleType(name)
        self.objects: list[object] = []
        sys.modules[name] = self.module

    def run(self, source: bytes) -> None:
        """Run the program's text."""
        text = source.decode("utf-8", "surrogatepass")
        code = compile(text, "program", "exec")
        exec(code, self.module.__dict__)

    def mark(self, value: object) -> list:
        """A number for an object that is no plain value."""
        number = len(self.objects)
        self.objects.append(value)
        kind = type(value)
        iterates = hasattr(kind, "__next__")
        word = "iterator" if iterates else "handle"
        return [word, number, kind.__name__]

    def encode(self, value: object) -> Any:
        """A value as it crosses."""
        return encode(value, self.mark)

    def decode(self, data: Any) -> Any:
        """A value as it came."""
        return decode(data, lambda parts: self.objects[parts[1]])

    def answer(self, verb: str, *parts: Any) -> list:
        """What is to be said to one request."""
        if verb == "call":
            return self.call(*parts)
        values = [self.decode(part) for part in parts]
        try:
            return ["value", self.encode(VERBS[verb](self, *values))]
        except StopIteration:
            return ["stop"]

    def call(self, target: Any, positional: list, named: list) -> list:
        """Call a function; its result, and those arguments that it changed."""
        values = [self.decode(part) for part in positional]
        names = {name: self.decode(part) for name, part in named}
        before = [self.encode(value) for value in values]
        result = self.decode(target)(*values, **names)
        changed = []
        for place, value in enumerate(values):
            after = self.encode(value)
            if after != before[place]:
                changed.append([place, after])
        return ["value", self.encode(result), changed]


VERBS: dict[str, Any] = {
    "name": lambda program, name: getattr(program.module, name),
    "get": lambda program, thing, name: getattr(thing, name),
    "set": lambda program, thing, name, value: setattr(thing, name, value),
    "iter": lambda program, thing: iter(thing),
    "next": lambda program, thing: next(thing),
}


def raised(error: BaseException) -> list:
    """An exception as it crosses."""
    return ["raise", type(error).__name__, text_of(error)]


def deliver(answers: int, message: list) -> None:
    """Send a message, or why it cannot be sent."""
    try:
        send(answers, message)
    except (NotPlain, MemoryError) as error:
        send(answers, raised(error))


def serve(source: bytes, asks: int, answers: int) -> None:
    """Run a program, say what it defines, and answer until nobody asks any more."""
    program = Program("program")
    try:
        program.run(source)
        message = ["ready", sorted(filter(str.isidentifier, vars(program.module)))]
    except BaseException as error:
        message = raised(error)
    while True:
        flush()
        deliver(answers, message)
        try:
            request = receive(asks)
        except EOFError:
            return
        try:
            message = program.answer(*request)
        except BaseException as error:
            message = raised(error)


def run_script(source: bytes) -> int:
    """Run a program by itself; its exit status."""
    status = 0
    try:
        Program("__main__").run(source)
    except SystemExit as error:
        status = (
            error.code if isinstance(error.code, int) else int(bool(error.code))
        )
    except BaseException:
        traceback.print_exc(limit=-5)
        status = 1
    atexit._run_exitfuncs()
    flush()
    return status & 0xFF
