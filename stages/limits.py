"""A bound on what an answer may compute, so that a check ends where the answer would not."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class TooMuch(BaseException):
    """Raised inside a block that has computed for too long; no `except Exception` catches it."""


@contextmanager
def at_most(seconds: float, hint: str) -> Iterator[None]:
    """Let the block compute for so many seconds; behind them an AssertionError gives the hint.

    Processor time counts and not the clock, because another program may keep the machine busy. No
    signal is used, because a process may ignore them, as those of a parallel test run do.
    """
    done = threading.Event()
    thread = ctypes.c_ulong(threading.get_ident())

    def watch() -> None:
        begin = time.process_time()
        while not done.wait(0.05):
            if time.process_time() - begin > seconds:
                too_much = ctypes.py_object(TooMuch)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, too_much)
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
        done.set()
        watcher.join()
    except TooMuch:
        raise AssertionError(hint) from None
    finally:
        done.set()
