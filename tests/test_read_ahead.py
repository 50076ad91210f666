"""What is read ahead is what would have been read: in order, once, with its errors in their place."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from stages.read_ahead import read_ahead


@pytest.mark.parametrize("size", [0, 1, 7])
@pytest.mark.parametrize("count", [1, 3, 100])
def test_the_items_and_their_order_are_the_same(size: int, count: int) -> None:
    assert list(read_ahead(iter(range(size)), count)) == list(range(size))


def test_what_comes_next_is_read_while_nobody_asks() -> None:
    read = threading.Event()
    reader = []

    def items() -> Iterator[int]:
        yield from range(4)
        reader.append(threading.current_thread())
        read.set()
        yield 4

    ahead = read_ahead(items(), 4)
    assert next(ahead) == 0
    assert read.wait(60), "the fifth item is read although one was asked for"
    assert reader != [threading.current_thread()]
    assert list(ahead) == [1, 2, 3, 4]


def test_no_more_is_read_than_was_asked_for() -> None:
    read = []

    def items() -> Iterator[int]:
        for number in range(100):
            read.append(number)
            yield number

    ahead = read_ahead(items(), 3)
    for number in range(5):
        assert next(ahead) == number
    ahead.close()
    assert len(read) <= 8


def test_an_error_comes_where_its_item_would_have_come() -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise OSError("the disk is gone")

    ahead = read_ahead(items(), 10)
    assert [next(ahead), next(ahead)] == [1, 2]
    with pytest.raises(OSError, match="the disk is gone"):
        next(ahead)


def test_a_reader_that_nobody_needs_ends() -> None:
    def mine() -> list[threading.Thread]:
        return [one for one in threading.enumerate() if one not in before]

    before = threading.enumerate()
    ahead = read_ahead(iter(range(10)), 2)
    next(ahead)
    assert len(mine()) == 1
    del ahead
    end = time.monotonic() + 60
    while mine() and time.monotonic() < end:
        time.sleep(0.01)
    assert mine() == []
