# Wrong answers that the checks of lesson 21 must refuse. The runner tries each in the
# executed notebook, behind the solution of the same number.

# %% 21.1
import uuid as ids_of


async def freed_inside(content, request):
    """What never begins has no end."""
    try:
        async for one in content:
            yield one
    finally:
        request.cancelled = True


def variant(**fault):
    """The solution with one thing wrong."""

    def build(engine):
        app = FastAPI()

        async def chunks(body, request):
            first, text, reason = True, "", ""
            identity = ids_of.uuid4().hex
            while not reason:
                piece = await request.next()
                reason = piece.reason
                if reason == "error" and not fault.get("no_error"):
                    yield event({"error": {"message": "the model failed"}})
                    return
                text += piece.text
                if fault.get("at_once") and not reason:
                    continue
                delta = {"content": text if fault.get("at_once") else piece.text}
                if fault.get("whole_text"):
                    delta = {"content": text}
                if (first or fault.get("role_always")) and not fault.get("no_role"):
                    delta["role"] = "assistant"
                first = False
                shown = None if fault.get("no_reason") else reason or None
                if fault.get("reason_always"):
                    shown = "stop"
                yield event(
                    {
                        "id": ids_of.uuid4().hex if fault.get("new_ids") else identity,
                        "object": fault.get("object", "chat.completion.chunk"),
                        "choices": [
                            {"index": 0, "delta": delta, "finish_reason": shown}
                        ],
                    }
                )
            wanted = (body.get("stream_options") or {}).get("include_usage")
            if wanted and not fault.get("no_usage"):
                yield event({"id": identity, "choices": [], "usage": request.usage,
                             "object": "chat.completion.chunk"})
            if not fault.get("no_done"):
                yield b"data: [DONE]\n\n"

        @app.post("/v1/chat/completions")
        async def chat(body: dict):
            try:
                request = engine.submit(body)
            except QueueFull as error:
                raise HTTPException(fault.get("full", 429), str(error)) from None
            content = chunks(body, request)
            if fault.get("in_the_generator"):
                content = freed_inside(content, request)
            if fault.get("no_cancel") or fault.get("in_the_generator"):
                return StreamingResponse(content, media_type="text/event-stream")
            stream = Stream(content)
            stream.request = request
            return stream

        return app

    return build


lesson.refuse(
    "21.1",
    build=[
        variant(no_role=True),
        variant(at_once=True),
        variant(whole_text=True),
        variant(no_reason=True),
        variant(reason_always=True),
        variant(new_ids=True),
        variant(object="chat.completion"),
        variant(no_usage=True),
        variant(no_done=True),
        variant(no_cancel=True),
        variant(in_the_generator=True),
        variant(no_error=True),
        variant(full=503),
    ],
)

# %% 21.2
admit_well = admit_next


def first_come(waiting, running, room):
    return 0 if waiting and waiting[0][1] <= room else None


def first_that_fits(waiting, running, room):
    busy = Counter(caller for caller, _ in running)
    order = sorted(range(len(waiting)), key=lambda at: (busy[waiting[at][0]], at))
    return next((at for at in order if waiting[at][1] <= room), None)


def smallest_first(waiting, running, room):
    order = sorted(range(len(waiting)), key=lambda at: waiting[at][1])
    return order[0] if order and waiting[order[0]][1] <= room else None


def newest_of_equals(waiting, running, room):
    busy = Counter(caller for caller, _ in running)
    order = sorted(range(len(waiting)), key=lambda at: (busy[waiting[at][0]], -at))
    return order[0] if order and waiting[order[0]][1] <= room else None


def without_room(waiting, running, room):
    busy = Counter(caller for caller, _ in running)
    order = sorted(range(len(waiting)), key=lambda at: (busy[waiting[at][0]], at))
    return order[0] if order else None


lesson.refuse(
    "21.2",
    admit_next=[
        first_come,
        first_that_fits,
        smallest_first,
        newest_of_equals,
        without_room,
        lambda waiting, running, room: None,
    ],
)

# %% 21.3
lesson.refuse(
    "21.3",
    as_callers_see_it=[
        lambda durations, interval: list(durations),
        # the missing ones are there, but all as long as the stall
        lambda durations, interval: [
            d for d in durations for _ in range(max(1, int(np.ceil(d / interval))))
        ],
        # a wait of nothing at the end
        lambda durations, interval: [
            d - k * interval
            for d in durations
            for k in range(int(d / interval + 1e-9) + 1)
        ],
        # the first is taken away as well
        lambda durations, interval: [
            d - k * interval
            for d in durations
            for k in range(1 if d > interval else 0, max(1, int(np.ceil(d / interval))))
        ],
    ],
)

# %% 21.4
until_well = until


def within_a_piece(pieces, stops):
    for piece in pieces:
        places = [piece.find(stop) for stop in stops if stop in piece]
        if places:
            yield piece[: min(places)]
            return
        yield piece


def all_at_the_end(pieces, stops):
    text = "".join(pieces)
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    yield text[: min(ends, default=(0, len(text)))[1]]


def first_of_the_list(pieces, stops):
    held = ""
    for piece in pieces:
        held += piece
        for stop in stops:
            if stop in held:
                yield held[: held.find(stop)]
                return
        most = max(map(len, stops), default=1) - 1
        cut = max(0, len(held) - most)
        if cut:
            yield held[:cut]
        held = held[cut:]
    yield held


def stop_included(pieces, stops):
    yield from until_well(pieces, stops)
    if stops:
        yield stops[0]


def rest_forgotten(pieces, stops):
    held = ""
    for piece in pieces:
        held += piece
        ends = [(held.find(s) + len(s), held.find(s)) for s in stops if s in held]
        if ends:
            yield held[: min(ends)[1]]
            return
        doubt = max(
            [n for stop in stops for n in range(1, len(stop)) if held.endswith(stop[:n])],
            default=0,
        )
        yield held[: len(held) - doubt]
        held = held[len(held) - doubt :]


lesson.refuse(
    "21.4",
    until=[
        within_a_piece,
        all_at_the_end,
        first_of_the_list,
        stop_included,
        rest_forgotten,
    ],
)

# %% 21.5
cards_well = cards


def of_all(rate, gap, model, traffic, machine, share):
    load = planner.carry(model, traffic, machine, share)
    return int(np.ceil(rate / load.requests)) if load.gap <= gap else None


def largest_batch_only(rate, gap, model, traffic, machine, share):
    load = planner.carry(model, traffic, machine, share)
    return int(np.ceil(rate / (2 / 3 * load.requests)))


def promise_or_nothing(rate, gap, model, traffic, machine, share):
    load = planner.carry(model, traffic, machine, share)
    if load.gap > gap:
        return None
    return int(np.ceil(rate / (2 / 3 * load.requests)))


def one_at_a_time(rate, gap, model, traffic, machine, share):
    load = planner.carry(model, traffic, machine, share, 1)
    return int(np.ceil(rate / (2 / 3 * load.requests))) if load.gap <= gap else None


def nobody_reads(rate, gap, model, traffic, machine, share):
    most = planner.largest_batch(model, traffic, machine)
    loads = [planner.carry(model, traffic, machine, share, b) for b in range(1, most + 1)]
    carried = [load.requests for load in loads if load.step <= gap]
    return int(np.ceil(rate / (2 / 3 * max(carried)))) if carried else None


lesson.refuse(
    "21.5",
    cards=[
        nobody_reads,
        of_all,
        largest_batch_only,
        promise_or_nothing,
        one_at_a_time,
        # nobody rents a third of a card
        lambda *given: (cards_well(*given) or 0) - 1 or None,
    ],
)
