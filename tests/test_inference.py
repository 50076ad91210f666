"""The engine of lesson 20: nobody's tokens depend on who shares the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_decoder import small_decoder

from stages.inference import Engine, Request, run_all
from utils.errors import CourseError


@pytest.fixture(scope="module")
def model() -> Any:
    return small_decoder(3)


def requests(many: int) -> list[Request]:
    draw = torch.Generator().manual_seed(1)
    made = []
    for k in range(many):
        prompt = torch.randint(60, (2 + 5 * k % 17,), generator=draw).tolist()
        made.append(Request(prompt, most=3 + 7 * k % 20))
    return made


def alone(model: Any, request: Request) -> list[int]:
    ids = torch.tensor([request.prompt])
    how: dict[str, Any] = {
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    how["attention_mask"] = torch.ones_like(ids)
    made = model.generate(ids, max_new_tokens=request.most, **how)
    return made[0, len(request.prompt) :].tolist()


@pytest.mark.parametrize("slots", [1, 3, 8, 20])
def test_the_tokens_are_those_of_each_request_alone(model: Any, slots: int) -> None:
    asked = requests(12)
    written = run_all(Engine(model, slots), asked)
    assert written == [alone(model, request) for request in asked]
    assert {request.ended for request in asked} == {"length"}


def test_one_that_comes_late_joins_those_that_run(model: Any) -> None:
    first, second = requests(6)[4:6]
    engine = Engine(model, 4)
    engine.add(first)
    for _ in range(4):
        engine.step()
    engine.add(second)
    seen = [request for request, _ in engine.step()]
    assert seen == [second]
    both = {request for request, _ in engine.step()}
    assert both == {first, second}
    while engine.busy:
        engine.step()
    for request in (first, second):
        assert request.written == alone(model, request)


def test_a_slot_is_taken_again_as_soon_as_it_is_free(model: Any) -> None:
    short = [Request([1, 2], most=2) for _ in range(5)]
    long = Request([3], most=30)
    engine = Engine(model, 2)
    for request in (long, *short):
        engine.add(request)
    while not all(request.ended for request in short):
        engine.step()
    assert not long.ended, "the short ones have waited for the long one"
    while engine.busy:
        engine.step()
    assert long.written == alone(model, long)


def test_a_caller_who_leaves_takes_the_row_along(model: Any) -> None:
    asked = requests(4)
    engine = Engine(model, 4)
    for request in asked:
        engine.add(request)
    engine.step()
    engine.step()
    engine.cancel(asked[1])
    engine.cancel(asked[2])
    before = len(asked[1].written)
    engine.step()
    assert len(engine.rows.mask) == 2
    while engine.busy:
        engine.step()
    assert len(asked[1].written) == before and asked[1].ended == "cancelled"
    for request in (asked[0], asked[3]):
        assert request.written == alone(model, request)


def test_one_that_is_cancelled_while_it_waits_is_never_read(model: Any) -> None:
    first, second = requests(2)
    engine = Engine(model, 1)
    engine.add(first)
    engine.add(second)
    engine.cancel(second)
    while engine.busy:
        engine.step()
    assert second.written == [] and len(first.written) == first.most


def test_a_stop_ends_a_request_and_padding_goes_with_the_longest(
    model: Any,
) -> None:
    long = Request(list(range(40)), most=3)
    short = Request([7, 8], most=12)
    stop = alone(model, short)[6]
    stopped = Request([7, 8], most=12, stops=frozenset([stop]))
    engine = Engine(model, 3)
    for request in (long, short, stopped):
        engine.add(request)
    while not long.ended:
        engine.step()
    assert engine.rows.mask.shape[1] > 40
    engine.step()
    assert engine.rows.mask.shape[1] < 10
    while engine.busy:
        engine.step()
    end = short.written.index(stop)
    assert stopped.written == short.written[: end + 1] and stopped.ended == "stop"


def test_each_request_chooses_its_own_way(model: Any) -> None:
    def least(logits: torch.Tensor) -> int:
        return int(logits.argmin())

    asked = [Request([5, 6], most=5), Request([5, 6], most=5, choose=least)]
    usual, odd = run_all(Engine(model, 2), asked)
    assert usual == alone(model, asked[0]) and usual != odd


@pytest.mark.parametrize("request_", [Request([]), Request([1], most=0)])
def test_nothing_to_read_or_write_is_an_error(
    model: Any, request_: Request
) -> None:
    with pytest.raises(CourseError):
        Engine(model).add(request_)


def test_more_than_the_model_has_places_is_an_error(model: Any) -> None:
    with pytest.raises(CourseError, match="may have 65 tokens"):
        Engine(model).add(Request([1] * 60, most=5))
