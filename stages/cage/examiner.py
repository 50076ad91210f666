"""The tests' side: a process of its own, which never shares an interpreter with the program.

The tests call the program's functions through proxies. Their arguments and results cross as plain
values, so that nothing of the program can touch an `assert`, a comparison or the verdict.
"""

from __future__ import annotations

import builtins
import contextlib
import symtable
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NoReturn

from .values import NotPlain, encode, rebuild, receive, send

LONGEST_TEXT = 300
LONGEST_RESULT = 100_000
Verdict = dict[str, Any]


class Ended(BaseException):
    """The tests cannot go on, whatever they catch: an outcome and why."""


class ProgramError(Exception):
    """An exception of the program that is none of Python's own."""


class Remote:
    """The program in the other process."""

    def __init__(self, asks: int, answers: int) -> None:
        self.asks, self.answers = asks, answers
        # Why no verdict of the tests counts any more.
        self.ended: Ended | None = None
        self.errors: list[BaseException] = []

    def end(self, outcome: str, message: str) -> NoReturn:
        """Nothing that the tests do from now on can make them pass."""
        if self.ended is None:
            self.ended = Ended(outcome, message)
        raise self.ended

    def listen(self) -> list:
        """The next message of the program."""
        try:
            message = receive(self.answers)
        except EOFError:
            self.end("crashed", "the program ended before its tests did")
        except NotPlain as error:
            self.end("refused", f"the program sent {error}")
        if not isinstance(message, list) or not message:
            self.end("refused", "the program sent a message that makes no sense")
        return message

    def ask(self, verb: str, *parts: Any) -> list:
        """Ask the program; what it raised is raised here."""
        if self.ended:
            raise self.ended
        try:
            send(self.asks, [verb, *parts])
        except OSError:
            self.end("crashed", "the program ended before its tests did")
        message = self.listen()
        if message[0] == "raise":
            self.raise_again(*message[1:])
        if message[0] == "stop":
            raise StopIteration
        return message

    def raise_again(self, *parts: Any) -> NoReturn:
        """Raise here what the program raised there."""
        name, text = (str(part)[:LONGEST_TEXT] for part in (*parts, "", "")[:2])
        error = error_of(name, text)
        self.errors.append(error)
        raise error

    def value(self, verb: str, *parts: Any) -> Any:
        """Ask, and rebuild the value that comes."""
        message = self.ask(verb, *parts)
        return self.rebuild(message[1])

    def rebuild(self, data: Any) -> Any:
        """A value of the program; what is none ends the tests."""
        try:
            return rebuild(data, self.make)
        except NotPlain as error:
            return self.end("refused", f"the program sent {error}")

    def make(self, data: list) -> Handle:
        """What stands here for an object of the program."""
        word, number, kind = data
        known = {"handle": Handle, "iterator": RemoteIterator}
        if word not in known or not isinstance(number, int):
            raise NotPlain("a value of an unknown kind")
        return known[word](self, number, str(kind)[:40])

    def encode(self, value: object) -> Any:
        """A value of the tests as it crosses to the program."""
        return encode(value, self.mark)

    def mark(self, value: object) -> list:
        """Back over goes only what came from there."""
        if isinstance(value, Handle):
            return ["handle", handle_number(value)]
        kind = type(value).__name__
        return self.end("refused", f"the tests hand over a {kind}, no plain value")


def error_of(name: str, text: str) -> Exception:
    """An exception of Python by its name; any other as text.

    >>> error_of("KeyError", "a"), error_of("SystemExit", "0")
    (KeyError('a'), ProgramError('SystemExit: 0'))
    """
    kind: Any = getattr(builtins, name, None)
    plain = isinstance(kind, type) and issubclass(kind, Exception)
    if plain and kind is not AssertionError:
        with contextlib.suppress(TypeError):
            return kind(text)
    return ProgramError(f"{name}: {text}")


def remote_of(handle: Handle) -> Remote:
    """The program that an object belongs to."""
    return object.__getattribute__(handle, "_remote")


def handle_number(handle: Handle) -> int:
    """The number by which the program knows an object."""
    return object.__getattribute__(handle, "_number")


def plain_only() -> Any:
    """A method that ends the tests: only the program could answer, and its word does not count."""

    def method(self: Handle, *others: object) -> NoReturn:
        remote = remote_of(self)
        kind = object.__getattribute__(self, "_kind")
        message = f"the program's {kind!r} object is no plain value to judge"
        remote.end("refused", message)

    return method


class Handle:
    """An object of the program: it can be called, asked for attributes and passed back."""

    def __init__(self, remote: Remote, number: int, kind: str) -> None:
        object.__setattr__(self, "_remote", remote)
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_kind", kind)

    def __repr__(self) -> str:
        return "<an object of the program>"

    def __call__(self, *values: Any, **named: Any) -> Any:
        """Have the program call it; what it changed of its arguments is changed here too."""
        remote = remote_of(self)
        target = ["handle", handle_number(self)]
        positional = [remote.encode(value) for value in values]
        pairs = [[name, remote.encode(value)] for name, value in named.items()]
        message = remote.ask("call", target, positional, pairs)
        for place, data in message[2]:
            change_in_place(values[place], remote.rebuild(data))
        return remote.rebuild(message[1])

    def __getattr__(self, name: str) -> Any:
        remote = remote_of(self)
        if name.startswith("__"):
            raise AttributeError(name)
        return remote.value("get", remote.mark(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        remote = remote_of(self)
        target = remote.mark(self)
        data = remote.encode(value)
        remote.ask("set", target, name, data)

    def __iter__(self) -> Any:
        remote = remote_of(self)
        target = remote.mark(self)
        return remote.value("iter", target)


UNANSWERED = ["eq", "ne", "lt", "le", "gt", "ge", "bool", "hash", "contains"]
UNANSWERED += ["getitem", "add", "sub", "int", "float"]
for _word in UNANSWERED:
    setattr(Handle, f"__{_word}__", plain_only())


class RemoteIterator(Handle):
    """An iterator of the program, asked for one item at a time."""

    def __iter__(self) -> RemoteIterator:
        return self

    def __next__(self) -> Any:
        remote = remote_of(self)
        target = remote.mark(self)
        return remote.value("next", target)


def change_in_place(old: Any, new: Any) -> None:
    """Make an argument what the program has made of its copy."""
    if type(old) is not type(new):
        return
    if isinstance(old, (list, bytearray)):
        old[:] = new
    elif isinstance(old, (dict, set)):
        old.clear()
        old.update(new)


def free_names(source: str) -> set[str]:
    """The names that tests use and define nowhere, but for Python's own.

    >>> sorted(free_names("def check(f): assert f(len(x)) == y"))
    ['x', 'y']
    """
    top = symtable.symtable(source, "tests", "exec")
    bound = set()
    for symbol in top.get_symbols():
        if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace():
            bound.add(symbol.get_name())
    used = set()
    for table in tables(top):
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (table is top or symbol.is_global()):
                used.add(symbol.get_name())
    return used - bound - set(dir(builtins))


def tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    """A table of names and all below it."""
    yield table
    for child in table.get_children():
        yield from tables(child)


class RemoteModule(ModuleType):
    """`from program import name`, for tests that ask for a name by force."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__dict__["_remote"].value("name", name)


def line_of(error: BaseException, source: str) -> str:
    """The line of the tests at which an exception rose."""
    number = 0
    trace = error.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename == "tests":
            number = trace.tb_lineno
        trace = trace.tb_next
    lines = source.splitlines()
    return lines[number - 1].strip() if 0 < number <= len(lines) else ""


def verdict(outcome: str, *words: object) -> Verdict:
    """An outcome and a plain line about it."""
    text = ": ".join(str(word) for word in words if str(word))
    return {"outcome": outcome, "message": " ".join(text.split())[:LONGEST_TEXT]}


def of_error(error: BaseException, source: str, remote: Remote) -> Verdict:
    """The verdict where the tests ended with an exception."""
    name = type(error).__name__
    if isinstance(error, Ended):
        return verdict(*error.args)
    if isinstance(error, SystemExit):
        return verdict("refused", "the tests ended themselves")
    if isinstance(error, AssertionError):
        return verdict("failed", line_of(error, source), error)
    if any(error is one for one in remote.errors):
        outcome = "memory" if isinstance(error, MemoryError) else "error"
        name = "" if isinstance(error, ProgramError) else name
        return verdict(outcome, name, error)
    if isinstance(error, NameError):
        return verdict("error", name, error)
    return verdict("failed", line_of(error, source), name, error)


def prepare(source: str, remote: Remote) -> dict[str, Any]:
    """Wait for the program; the names with which its tests begin."""
    wanted = free_names(source)
    message = remote.listen()
    if message[0] == "raise":
        remote.raise_again(*message[1:])
    defined = message[1] if isinstance(message[-1], list) else []
    module = RemoteModule("program")
    module.__dict__["_remote"] = remote
    sys.modules["program"] = module
    names: dict[str, Any] = {"__name__": "tests"}
    for name in wanted.intersection(map(str, defined)):
        names[name] = remote.value("name", name)
    return names


def examine(source: str, remote: Remote) -> Verdict:
    """Run the tests; they pass if they came to their end and nothing was wrong on the way."""
    try:
        code = compile(source, "tests", "exec")
        names = prepare(source, remote)
        exec(code, names)
    except BaseException as error:
        if isinstance(error, SyntaxError) and not remote.errors:
            return verdict("refused", "the tests do not compile", error)
        return of_error(error, source, remote)
    if remote.ended:
        return verdict(*remote.ended.args)
    return verdict("passed", "all tests passed")


def evaluate(calls: list[str], remote: Remote) -> Verdict:
    """What each call gives, as text; passed if none raised."""
    results: list[str] = []
    whole = verdict("passed", "all calls came back")
    source = "\n".join(calls)
    try:
        names = prepare(source, remote)
    except BaseException as error:
        return of_error(error, source, remote)
    for call in calls:
        try:
            value = eval(compile(call, "tests", "eval"), names)
            results.append(repr(value)[:LONGEST_RESULT])
        except BaseException as error:
            reason = of_error(error, call, remote)
            results.append(f"raised {reason['message']}")
            whole = reason
    return {**whole, "results": results}
