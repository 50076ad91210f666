"""The load's own honesty: requests leave when they are due, and seconds count from then."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse, StreamingResponse

from stages.serving import serve_app
from stages.serving_load import (
    Outcome,
    ask,
    closed_loop,
    open_loop,
    poisson,
    summary,
)
from stages.serving_protocol import Callers, Refusal, event

STALL = 0.5


def slow_app() -> FastAPI:
    """One answer of two tokens at a time, each of which takes a while."""
    app = FastAPI()
    turn = asyncio.Lock()
    app.state.open, app.state.most = 0, 0

    async def events() -> Any:
        async with turn:
            await asyncio.sleep(STALL)
            for text, reason in (("a", None), ("b", "stop")):
                yield event({"choices": [{"text": text, "finish_reason": reason}]})
        app.state.open -= 1

    @app.post("/v1/completions")
    async def complete(body: dict[str, Any]) -> Any:
        if body["prompt"] == "no":
            return JSONResponse({"error": {"message": "full"}}, 429)
        app.state.open += 1
        app.state.most = max(app.state.most, app.state.open)
        return StreamingResponse(events(), media_type="text/event-stream")

    return app


@pytest.fixture
def app() -> FastAPI:
    return slow_app()


@pytest.fixture
def url(app: FastAPI) -> Iterator[str]:
    with serve_app(app) as url:
        yield url


def make(number: int) -> dict[str, Any]:
    return {"prompt": str(number), "stream": True}


def test_an_open_loop_waits_for_nobody(app: FastAPI, url: str) -> None:
    done = asyncio.run(open_loop(url, [0, 0.01, 0.02, 0.03], make))
    assert [one.text for one in done] == ["ab"] * 4
    assert app.state.most == 4
    # One at a time: the last of four has waited for the three before it.
    waits = [one.first for one in done]
    assert waits == sorted(waits)
    assert waits[-1] > 4 * STALL - 0.1


def test_a_closed_loop_sends_its_next_request_when_it_has_its_answer(
    app: FastAPI, url: str
) -> None:
    done = asyncio.run(closed_loop(url, 2, 2, make))
    assert len(done) == 4 and app.state.most == 2


def test_seconds_count_from_when_a_request_was_due(url: str) -> None:
    """Also where the client itself was late in sending it."""
    late = time.monotonic() - 2
    outcome = asyncio.run(ask(url, make(0), due=late))
    assert outcome.first > 2 + STALL - 0.1

    async def with_a_stall() -> list[Outcome]:
        async def stall() -> None:
            time.sleep(1)

        task = asyncio.create_task(stall())
        outcomes = await open_loop(url, [0.0, 0.2], make)
        await task
        return outcomes

    second = asyncio.run(with_a_stall())[1]
    assert second.first > 0.8 + STALL


def test_arrivals_are_random_and_as_many_as_the_rate_says() -> None:
    times = np.array(poisson(50, 200, seed=1))
    assert len(times) == pytest.approx(50 * 200, rel=0.05)
    gaps = np.diff(times)
    # The spread of a Poisson process's gaps is its mean.
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)
    assert poisson(50, 200, seed=1) == times.tolist()


def test_a_summary_counts_the_refused_apart_from_the_answered(url: str) -> None:
    async def both() -> list[Outcome]:
        refused = {"prompt": "no", "stream": True}
        return [await ask(url, make(0)), await ask(url, refused)]

    row = summary(asyncio.run(both()))
    assert (row["sent"], row["answered"], row["refused"]) == (2, 1, 1)
    assert row["first p50"] == pytest.approx(row["first p99"])
    outcomes = [Outcome(3.0, reason="stop", ended=4.0), Outcome(4.0, ended=4.5)]
    assert summary(outcomes)["answered a second"] == pytest.approx(1 / 1.5)


def test_a_caller_has_as_many_as_the_limit_and_not_one_more() -> None:
    callers = Callers()
    for _ in range(3):
        callers.enter("ann", 3)
    with pytest.raises(Refusal, match="3 requests here"):
        callers.enter("ann", 3)
    callers.enter("bob", 3)
    callers.leave("ann")
    callers.enter("ann", 3)
    assert callers.active == {"ann": 3, "bob": 1}
    assert json.dumps(Refusal(429, "x", wait=1).headers) == '{"Retry-After": "1"}'
