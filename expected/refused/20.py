# Wrong answers that the checks of lesson 20 must refuse. The runner tries each in the
# executed notebook, behind the solution of the same number.

# %% 20.1
schedule_well = schedule


def in_batches(jobs, slots, room):
    ends, step = [], 0
    for first in range(0, len(jobs), slots):
        some = jobs[first : first + slots]
        step = max(step, max(arrival for arrival, _, _ in some))
        ends += [step + answer for _, _, answer in some]
        step += max(answer for _, _, answer in some)
    return ends


def no_memory(jobs, slots, room):
    schedule_well(jobs, len(jobs), room)
    return schedule_well(jobs, slots, 10**9)


def only_prompts(jobs, slots, room):
    schedule_well(jobs, slots, room)
    halves = [(arrival, 0, answer) for arrival, _, answer in jobs]
    return schedule_well(halves, slots, room)


def before_arrival(jobs, slots, room):
    return schedule_well([(0, prompt, answer) for _, prompt, answer in jobs], slots, room)


def overtaking(jobs, slots, room):
    schedule_well(jobs, slots, room)
    ends, left = [0] * len(jobs), [answer for _, _, answer in jobs]
    waiting, running, step = list(range(len(jobs))), [], 0
    while waiting or running:
        for k in list(waiting):
            used = sum(jobs[one][1] + jobs[one][2] for one in [*running, k])
            if jobs[k][0] <= step and len(running) < slots and used <= room:
                running.append(k)
                waiting.remove(k)
        step += 1
        for k in running:
            left[k] -= 1
            ends[k] = step
        running = [k for k in running if left[k]]
    return ends


def never_refuses(jobs, slots, room):
    try:
        return schedule_well(jobs, slots, room)
    except ValueError:
        return [0] * len(jobs)


def one_late(jobs, slots, room):
    return [end + 1 for end in schedule_well(jobs, slots, room)]


lesson.refuse(
    "20.1",
    schedule=[
        in_batches,
        no_memory,
        only_prompts,
        before_arrival,
        overtaking,
        never_refuses,
        one_late,
        lambda jobs, slots, room: schedule_well(jobs, 1, room),
    ],
)

# %% 20.2
verify_well = verify


def from_the_model(p, q, guesses, draw):
    for place, token in enumerate(guesses):
        if draw.random() >= p[place][token] / q[place][token]:
            return [*guesses[:place], draw.choice(len(p[place]), p=p[place])]
    return [*guesses, draw.choice(len(p[-1]), p=p[-1])]


def no_replacement(p, q, guesses, draw):
    written = verify_well(p, q, guesses, draw)
    return written[:-1] if len(written) <= len(guesses) else written


def no_bonus(p, q, guesses, draw):
    return verify_well(p, q, guesses, draw)[: len(guesses)]


def goes_on(p, q, guesses, draw):
    written = []
    for place, token in enumerate(guesses):
        written.append(verify_well(p[place : place + 2], q[[place]], [token], draw)[0])
    return [*written, draw.choice(len(p[-1]), p=p[-1])]


def accepts_half(p, q, guesses, draw):
    """Right tokens, but twice as many refusals as needed."""
    for place, token in enumerate(guesses):
        if draw.random() >= 0.5 * p[place][token] / q[place][token]:
            rest = p[place] - q[place] * np.minimum(1, 0.5 * p[place] / q[place])
            return [*guesses[:place], draw.choice(len(rest), p=rest / rest.sum())]
    return [*guesses, draw.choice(len(p[-1]), p=p[-1])]


def ratio_upside_down(p, q, guesses, draw):
    for place, token in enumerate(guesses):
        if draw.random() >= q[place][token] / p[place][token]:
            rest = np.maximum(p[place] - q[place], 0) + 1e-12
            return [*guesses[:place], draw.choice(len(rest), p=rest / rest.sum())]
    return [*guesses, draw.choice(len(p[-1]), p=p[-1])]


def likeliest_last(p, q, guesses, draw):
    written = verify_well(p, q, guesses, draw)
    if len(written) > len(guesses):
        written[-1] = int(p[-1].argmax())
    return written


lesson.refuse(
    "20.2",
    verify=[
        from_the_model,
        no_replacement,
        no_bonus,
        goes_on,
        accepts_half,
        ratio_upside_down,
        likeliest_last,
        lambda p, q, guesses, draw: [*guesses, draw.choice(4, p=p[-1])],
        lambda p, q, guesses, draw: [draw.choice(4, p=p[0])],
    ],
)


# %% 20.3
def interleaved(block):
    step, low = block[:4].view(np.float16).astype(np.float32)
    codes = np.stack([block[4:] & 15, block[4:] >> 4], 1).ravel()
    return step * codes + low


def upper_first(block):
    step, low = block[:4].view(np.float16).astype(np.float32)
    return step * np.concatenate([block[4:] >> 4, block[4:] & 15]) + low


def swapped(block):
    low, step = block[:4].view(np.float16).astype(np.float32)
    return step * np.concatenate([block[4:] & 15, block[4:] >> 4]) + low


def symmetric(block):
    step = block[:2].view(np.float16).astype(np.float32)
    return step * (np.concatenate([block[4:] & 15, block[4:] >> 4]) - 8.0)


lesson.refuse(
    "20.3",
    unpack=[
        interleaved,
        upper_first,
        swapped,
        symmetric,
        lambda block: np.zeros(32),
        lambda block: np.zeros(16),
    ],
)

# %% 20.4
lesson.refuse(
    "20.4",
    capacity=[
        lambda m, b, w, p, n: ((m - w) / (p * n), (m - w) / (p * n) * b / m),
        lambda m, b, w, p, n: (m // (p * n), m // (p * n) * b / (w + m)),
        lambda m, b, w, p, n: (max(0, (m - w) // (p * n)), b / w),
        lambda m, b, w, p, n: (
            max(0, int((m - w) // (p * n))),
            max(0, int((m - w) // (p * n))) * b / w,
        ),
        lambda m, b, w, p, n: (
            int((m - w) // (p * n)),
            int((m - w) // (p * n)) * b / (w + int((m - w) // (p * n)) * p * n),
        ),
        lambda m, b, w, p, n: (
            max(0, int((m - w) // (p * n))),
            max(0, int((m - w) // (p * n))) * b / m,
        ),
    ],
)
