"""How long the judge of a streaming endpoint waits: in turns of the loop, and never by a clock."""

import asyncio
import threading
import time

import pytest

from stages import serving_judge
from stages.serving_engine import Piece
from stages.serving_judge import LATE, Played, wait_for_the_end, wait_in

TURNS = 5


@pytest.fixture(autouse=True)
def short_turns(monkeypatch):
    """A turn is one round of the loop, and few are waited for."""
    monkeypatch.setattr(serving_judge, "TURNS", TURNS)
    monkeypatch.setattr(serving_judge, "TURN_SECONDS", 0)


async def beside(waiting, work):
    """What is waited for, while something else is done in the same loop."""
    task = asyncio.create_task(work)
    await asyncio.sleep(0)
    result = await waiting
    task.cancel()
    return result


async def rounds(count):
    """So many rounds of the loop."""
    for _ in range(count):
        await asyncio.sleep(0)


async def write(request, pieces, pause):
    """Somebody who takes pieces, with some rounds of the loop before each."""
    for _ in range(pieces):
        await rounds(pause)
        request.count += 1


async def write_and_end(request, pieces):
    """The same, who ends the request at last."""
    await write(request, pieces, TURNS - 2)
    request.cancelled = True


def test_an_answer_that_stands_still_is_waited_for_no_longer():
    turned = []

    async def count():
        while True:
            turned.append(1)
            await asyncio.sleep(0)

    asyncio.run(beside(wait_for_the_end(Played([])), count()))
    assert TURNS <= len(turned) <= TURNS + 2


def test_an_answer_that_moves_is_waited_for_until_somebody_ends_it():
    request = Played([])
    asyncio.run(beside(wait_for_the_end(request), write_and_end(request, 20)))
    assert request.cancelled


def test_an_answer_for_nobody_is_waited_for_until_it_has_written_far_too_much(
    monkeypatch,
):
    monkeypatch.setattr(serving_judge, "PATIENCE", 5)
    request = Played([])
    asyncio.run(beside(wait_for_the_end(request), write(request, 100, 1)))
    assert 5 <= request.count < 10
    assert not request.cancelled


def test_a_machine_that_stalls_is_not_taken_for_an_answer_that_stands_still(
    monkeypatch,
):
    monkeypatch.setattr(serving_judge, "TURN_SECONDS", 0.001)
    request = Played([])

    async def stall_and_end():
        await rounds(2)
        time.sleep(0.2)
        await rounds(2)
        request.cancelled = True

    asyncio.run(beside(wait_for_the_end(request), stall_and_end()))
    assert request.cancelled


def second_piece(meanwhile):
    """What comes behind the first piece while something is done in the same loop."""
    request = Played([Piece("a"), Piece("b")])

    async def ask():
        await request.next()
        return await beside(request.next(), meanwhile(request))

    return asyncio.run(ask())


def test_the_second_piece_waits_for_the_first_also_on_a_machine_that_stalls(
    monkeypatch,
):
    monkeypatch.setattr(serving_judge, "TURN_SECONDS", 0.001)

    async def send_after_a_stall(request):
        await rounds(2)
        time.sleep(0.2)
        await rounds(2)
        request.sent.set()

    assert second_piece(send_after_a_stall).text == "b"


def test_a_second_piece_before_the_first_was_sent_says_so():
    async def send_nothing(request):
        await rounds(1)

    assert second_piece(send_nothing) is LATE


def test_a_loop_that_an_answer_never_gives_back_does_not_hold_the_judge(
    monkeypatch,
):
    monkeypatch.setattr(serving_judge, "STUCK_SECONDS", 0.1)
    loop, freed = asyncio.new_event_loop(), threading.Event()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    loop.call_soon_threadsafe(freed.wait, 600)
    judging = threading.Thread(target=wait_in, args=(loop, Played([])), daemon=True)
    judging.start()
    judging.join(60)
    held = judging.is_alive()
    freed.set()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    assert not held
