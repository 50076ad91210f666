"""Continuous batching: an answer in company is the answer alone; text that is out stays out."""

import random
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_server import small_model, small_tokenizer, truth

from conftest import wait_until
from stages.serving_engine import Engine, QueueFull, Request
from stages.serving_text import Text


@pytest.fixture(scope="module")
def model():
    return small_model()


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer()


def run(engine, requests):
    """All of them to their ends."""
    for request in requests:
        engine.submit(request)
    while engine.busy:
        engine.step()


def mixed_requests(count, seed):
    draw = random.Random(seed)
    requests = []
    for _ in range(count):
        ids = [draw.randrange(2, 258) for _ in range(draw.randrange(1, 50))]
        requests.append(Request(ids, most=draw.randrange(1, 40)))
    return requests


@pytest.mark.parametrize("rows, chunk", [(1, 128), (3, 7), (5, 128)])
def test_an_answer_in_company_is_the_answer_alone(model, tokenizer, rows, chunk):
    requests = mixed_requests(24, seed=rows)
    engine = Engine(model, tokenizer, rows, length=96, waiting=24, chunk=chunk)
    run(engine, requests)
    for request in requests:
        assert request.made == truth(model, request.ids, request.most)
        assert request.reason in ("stop", "length")


def test_rows_that_are_used_again_hold_nothing_of_the_past(model, tokenizer):
    engine = Engine(model, tokenizer, rows=2, length=96, waiting=24)
    run(engine, mixed_requests(12, seed=7))
    later = mixed_requests(6, seed=8)
    run(engine, later)
    assert [one.made for one in later] == [
        truth(model, one.ids, one.most) for one in later
    ]


def test_what_is_drawn_depends_on_the_seed_and_on_no_neighbour(model, tokenizer):
    def drawn(company):
        engine = Engine(model, tokenizer, rows=4, length=96)
        request = Request([5, 6, 7], most=20, temperature=1.0, top_p=0.9, seed=11)
        run(engine, [*mixed_requests(company, seed=3), request])
        return request.made

    assert drawn(0) == drawn(3)


def test_top_p_of_almost_nothing_takes_the_likeliest(model, tokenizer):
    engine = Engine(model, tokenizer, rows=2, length=96)
    request = Request([9, 8], most=12, temperature=1.5, top_p=1e-6, seed=1)
    run(engine, [request])
    assert request.made == truth(model, [9, 8], 12)


@pytest.mark.parametrize("cold", [1e-3, 1e-40, 1e-320])
def test_no_temperature_is_so_low_that_it_costs_the_others(model, tokenizer, cold):
    engine = Engine(model, tokenizer, rows=2, length=96)
    frozen = Request([9, 8], most=12, temperature=cold, seed=1)
    other = Request([3], most=12)
    run(engine, [frozen, other])
    assert frozen.made == truth(model, [9, 8], 12)
    assert other.made == truth(model, [3], 12)


def test_a_token_that_cannot_be_chosen_costs_its_own_answer_alone(
    model, tokenizer, monkeypatch
):
    doomed, other = Request([9], most=9, seed=1), Request([3], most=9)

    def choose(logits, one):
        return (
            1 / 0 if one.request is doomed and doomed.made else int(logits.argmax())
        )

    monkeypatch.setattr("stages.serving_engine.choose", choose)
    engine = Engine(model, tokenizer, rows=2, length=96)
    run(engine, [doomed, other])
    assert doomed.reason == "error"
    assert other.made == truth(model, [3], 9)


def test_draws_follow_the_distribution(model, tokenizer):
    with torch.no_grad():
        odds = torch.softmax(model(torch.tensor([[4, 5]])).logits[0, -1], -1)
    engine = Engine(model, tokenizer, rows=8, length=8, waiting=1000)
    requests = [
        Request([4, 5], most=1, temperature=1.0, seed=k) for k in range(800)
    ]
    run(engine, requests)
    best = int(odds.argmax())
    share = sum(one.made == [best] for one in requests) / 800
    assert share == pytest.approx(float(odds[best]), abs=0.06)


def test_a_client_that_leaves_frees_its_row_and_disturbs_nobody(model, tokenizer):
    engine = Engine(model, tokenizer, rows=3, length=96)
    requests = [Request([20 + k], most=40) for k in range(3)]
    for request in requests:
        engine.submit(request)
    for _ in range(8):
        engine.step()
    requests[0].cancelled = True
    engine.step()
    assert requests[0].reason == "cancelled" and len(engine.running) == 2
    while engine.busy:
        engine.step()
    for request in requests[1:]:
        assert request.made == truth(model, request.ids, 40)


def test_one_caller_does_not_keep_the_others_waiting(model, tokenizer):
    engine = Engine(model, tokenizer, rows=2, length=96)
    ends = []
    hog = [Request([3], most=4, caller="hog") for _ in range(8)]
    ann = Request([4], most=4, caller="ann")
    for request in [*hog, ann]:
        request.sink = lambda piece, one=request: ends.append(one)
        engine.submit(request)
    while engine.busy:
        engine.step()
    order = list(dict.fromkeys(map(id, ends)))
    assert order.index(id(ann)) <= 2


def test_time_runs_out_wherever_a_request_is(model, tokenizer):
    engine = Engine(model, tokenizer, rows=1, length=96)
    running, waiting = (Request([3], most=90), Request([4], most=9))
    for request in (running, waiting):
        engine.submit(request)
    engine.step()
    running.deadline = waiting.deadline = time.monotonic() - 1
    engine.step()
    assert (running.reason, waiting.reason) == ("timeout", "timeout")
    assert not engine.busy


def test_a_full_queue_and_what_can_never_fit_are_refused(model, tokenizer):
    engine = Engine(model, tokenizer, rows=1, length=16, waiting=2)
    for _ in range(2):
        engine.submit(Request([3], most=2))
    with pytest.raises(QueueFull):
        engine.submit(Request([3], most=2))
    with pytest.raises(ValueError, match="more than 16"):
        engine.submit(Request([3] * 10, most=7))


def test_a_failing_step_ends_its_answers_and_not_the_engine(
    model, tokenizer, monkeypatch
):
    engine = Engine(model, tokenizer, rows=2, length=96)
    doomed = Request([3], most=9)
    engine.submit(doomed)
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr("stages.serving_engine.mask_of", lambda *given: 1 / 0)
        engine.step()
    assert doomed.reason == "error" and not engine.busy
    after = Request([3], most=9)
    run(engine, [after])
    assert after.made == truth(model, [3], 9)


def test_an_engine_that_stumbles_begins_anew(model, tokenizer, monkeypatch):
    engine = Engine(model, tokenizer, rows=2, length=96).start()
    doomed, after = Request([3], most=9), Request([3], most=9)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "admit", lambda: 1 / 0)
        engine.submit(doomed)
        wait_until(lambda: doomed.reason, "an end")
    engine.submit(after)
    wait_until(lambda: after.reason, "an answer")
    engine.stop()
    assert doomed.reason == "error"
    assert after.made == truth(model, [3], 9)


def test_a_long_prompt_is_read_in_pieces_between_the_steps(model, tokenizer):
    engine = Engine(model, tokenizer, rows=2, length=96, chunk=8)
    short, long = Request([3], most=30), Request([5] * 64, most=2)
    engine.submit(short)
    engine.step()
    engine.submit(long)
    before = len(short.made)
    for _ in range(8):
        engine.step()
    # Eight pieces of eight tokens, and a token for the other answer in each step.
    assert len(short.made) == before + 8 and len(long.made) == 2


SIGNS = st.text("ab\n東", max_size=20)
STOPS = st.lists(st.text("ab\n東", min_size=1, max_size=4), max_size=3)


@given(st.text(max_size=30) | SIGNS, STOPS)
@settings(max_examples=120, deadline=None)
def test_text_comes_out_whole_and_ends_at_the_first_stop(text, stops):
    tokenizer = small_tokenizer()
    decoder = Text(tokenizer, tuple(stops))
    given_out = ""
    for token in tokenizer(text).input_ids:
        given_out += decoder.add(token)
        assert "\ufffd" not in given_out.replace("\ufffd", "", text.count("\ufffd"))
        if decoder.stopped:
            break
    given_out += decoder.rest()
    found = [
        (text.find(stop) + len(stop), text.find(stop))
        for stop in stops
        if stop in text
    ]
    assert given_out == (text[: min(found)[1]] if found else text)


def test_half_a_character_at_the_end_is_what_the_tokenizer_writes():
    tokenizer = small_tokenizer()
    ids = tokenizer("a東").input_ids[:-1]
    decoder = Text(tokenizer)
    pieces = [decoder.add(token) for token in ids]
    assert pieces == ["a", "", ""]
    assert "a" + decoder.rest() == tokenizer.decode(ids)
