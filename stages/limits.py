"""A bound on what an answer may compute, so that a check ends where the answer would not."""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def at_most(seconds: float, hint: str) -> Iterator[None]:
    """Let the block compute for so many seconds; behind them an AssertionError gives the hint.

    Processor time counts and not the clock, because another program may keep the machine busy.
    It works in the main thread, where the cells of a notebook run.
    """
    done = threading.Event()
    late = threading.Event()

    def watch() -> None:
        begin = time.process_time()
        while not done.wait(0.05):
            if time.process_time() - begin > seconds:
                late.set()
                _thread.interrupt_main()
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
        done.set()
        watcher.join()
    except KeyboardInterrupt:
        if not late.is_set():  # somebody has really interrupted
            raise
        raise AssertionError(hint) from None
    finally:
        done.set()
