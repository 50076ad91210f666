"""A check ends although an answer would not."""

import contextlib
import signal
import time

import pytest

from stages.limits import at_most


def test_an_answer_that_does_not_end_gets_the_hint():
    with pytest.raises(AssertionError, match="compute it"):
        with at_most(0.2, "compute it"):
            while True:
                pass


def test_no_signal_is_needed():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(AssertionError, match="compute it"):
            with at_most(0.2, "compute it"):
                while True:
                    with contextlib.suppress(Exception):
                        sum(range(1000))
    finally:
        signal.signal(signal.SIGINT, before)


def test_waiting_is_not_computing():
    with at_most(0.2, "compute it"):
        time.sleep(0.8)


def test_an_interruption_from_outside_stays_one():
    with pytest.raises(KeyboardInterrupt):
        with at_most(60, "compute it"):
            raise KeyboardInterrupt


def test_what_the_answer_raises_passes_unchanged():
    with pytest.raises(ZeroDivisionError):
        with at_most(60, "compute it"):
            1 / 0  # noqa: B018
