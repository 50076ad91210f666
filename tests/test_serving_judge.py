"""How long the judge of a streaming endpoint waits for a client that has left."""

import threading
import time

from stages import serving_judge
from stages.serving_judge import Played, wait_for_the_end


def wait(request):
    """How long the waiting takes."""
    begun = time.monotonic()
    wait_for_the_end(request)
    return time.monotonic() - begun


def test_an_answer_that_stands_still_is_waited_for_no_longer(monkeypatch):
    monkeypatch.setattr(serving_judge, "STILL", 0.3)
    assert 0.3 <= wait(Played([])) < 10


def test_an_answer_that_moves_is_waited_for_until_somebody_ends_it(monkeypatch):
    monkeypatch.setattr(serving_judge, "STILL", 2)
    request = Played([])

    def write():
        for _ in range(50):
            request.count += 1
            time.sleep(0.06)
        request.cancelled = True

    writer = threading.Thread(target=write)
    writer.start()
    assert wait(request) > 2.5
    assert request.cancelled
    writer.join()


def test_an_answer_for_nobody_is_waited_for_until_it_has_written_far_too_much(
    monkeypatch,
):
    monkeypatch.setattr(serving_judge, "PATIENCE", 5)
    request = Played([])
    done = threading.Event()

    def write():
        while not done.is_set():
            request.count += 1
            time.sleep(0.01)

    writer = threading.Thread(target=write)
    writer.start()
    assert wait(request) < serving_judge.STILL
    done.set()
    writer.join()
    assert not request.cancelled
