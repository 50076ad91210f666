"""Lesson 21's small server, as its cells write it, in front of a small model."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request as Letter
from urllib.request import urlopen

import openai
import pytest
from lesson_cells import cell, run_cells
from small_server import small_model, small_tokenizer, truth

from stages.serving import serve_app
from stages.serving_engine import Engine, QueueFull, Request
from stages.serving_judge import send_and_vanish
from stages.serving_text import Text

SERVER = ("small-admit", "small-flow", "small-answer", "small-health")
PROMPT = "def f"
TALK = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    given = {"model": small_model(), "tokenizer": small_tokenizer()}
    # The second part of this cell reads data that no server needs.
    source = cell("21", "questions").split("\n\ncount = ")[0]
    exec(source, given)
    given |= {"Engine": Engine, "Request": Request, "QueueFull": QueueFull}
    return run_cells("21", " ".join(["whole", *SERVER]), given)


@pytest.fixture(scope="module")
def url(names: dict[str, Any]) -> Iterator[str]:
    engine = names["served"].start()
    with serve_app(names["small"]) as url:
        yield url
    engine.stop()


def post(url: str, body: dict[str, Any], place: str = "/v1/completions") -> Any:
    """Status, headers and JSON of one request."""
    data = json.dumps(body).encode()
    letter = Letter(url + place, data, {"Content-Type": "application/json"})
    try:
        with urlopen(letter, timeout=60) as answer:
            return answer.status, answer.headers, json.load(answer)
    except HTTPError as error:
        return error.code, error.headers, json.load(error)


def wanted(prompt: str, most: int = 12) -> str:
    tokenizer = small_tokenizer()
    made = truth(small_model(), tokenizer(prompt).input_ids, most)
    return tokenizer.decode(made, skip_special_tokens=True)


def test_some_fifty_lines_are_some_fifty() -> None:
    """Every line that is not empty counts, imports and docstrings with the others."""
    lines = "\n".join(cell("21", name) for name in SERVER).splitlines()
    assert 50 <= sum(bool(line.strip()) for line in lines) < 60


def test_the_small_server_answers_as_generate_does_on_both_endpoints(
    url: str,
) -> None:
    body = {"prompt": PROMPT, "max_tokens": 12}
    assert post(url, body)[2]["choices"][0]["text"] == wanted(PROMPT)
    chat = {"messages": TALK, "max_tokens": 12}
    answer = post(url, chat, "/v1/chat/completions")[2]["choices"][0]
    assert answer["message"]["content"] == wanted("<s>user hi</s><s>assistant ")


def test_the_official_client_reads_the_small_servers_stream(url: str) -> None:
    options: dict[str, Any] = {"max_retries": 0, "timeout": 60}
    with openai.OpenAI(base_url=url + "/v1", api_key="none", **options) as client:
        talk: list[Any] = TALK
        parts = list(
            client.chat.completions.create(
                model="small", messages=talk, max_tokens=12, stream=True
            )
        )
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == wanted("<s>user hi</s><s>assistant ")
    assert [bool(part.choices[0].finish_reason) for part in parts].count(True) == 1


def test_a_client_that_leaves_the_small_servers_stream_frees_its_row(
    url: str, names: dict[str, Any]
) -> None:
    engine = names["served"]
    # At its own speed this model would be done before anybody could leave.
    step = engine.step
    engine.step = lambda: (time.sleep(0.02), step())
    before = engine.counts["tokens"]
    body = {"prompt": PROMPT, "max_tokens": 128, "stream": True}
    letter = Letter(
        url + "/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urlopen(letter, timeout=60) as answer:
            assert answer.readline().startswith(b"data: ")
        end = time.monotonic() + 30
        while engine.busy and time.monotonic() < end:
            time.sleep(0.02)
    finally:
        engine.step = step
    assert not engine.busy
    assert engine.counts["tokens"] - before < 100


def test_the_small_server_frees_the_row_of_a_stream_that_never_began(
    names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[Request] = []
    monkeypatch.setattr(names["served"], "submit", requests.append)
    body = {"prompt": PROMPT, "stream": True}
    send_and_vanish(names["small"], "/v1/completions", body)
    (request,) = requests
    assert request.cancelled


def test_the_small_server_refuses_what_it_has_no_room_for(
    url: str, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, answer = post(url, {"prompt": "x" * 300})
    assert code == 413 and "300 tokens" in answer["detail"]
    monkeypatch.setattr(names["served"], "room", 0)
    code, headers, _ = post(url, {"prompt": PROMPT})
    assert code == 429 and headers["Retry-After"] == "1"


@pytest.mark.parametrize("text", ["naïve → 東京 🦙", "plain", "é", "🦙🦙"])
def test_whole_characters_by_hand_are_the_engines(
    names: dict[str, Any], text: str
) -> None:
    ids = small_tokenizer()(text).input_ids
    decoder = Text(small_tokenizer())
    engine = [piece for piece in map(decoder.add, ids) if piece]
    assert list(names["whole_characters"](ids)) == engine
    assert "".join(engine) == text
