"""What comes next is read while what is here is used: a slow disk then holds nobody up."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Item = TypeVar("Item")
END: Any = object()


def read_ahead(items: Iterator[Item], count: int) -> Iterator[Item]:
    """The same items in the same order; a thread takes `count` of them before they are asked for.

    What goes wrong while it reads is raised where the item would have come.

    >>> list(read_ahead(iter("abc"), 2))
    ['a', 'b', 'c']
    """
    reader = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
    try:
        waiting = deque(reader.submit(next, items, END) for _ in range(count))
        while True:
            item = waiting.popleft().result()
            if item is END:
                return
            waiting.append(reader.submit(next, items, END))
            yield item
    finally:
        reader.shutdown(wait=False, cancel_futures=True)
