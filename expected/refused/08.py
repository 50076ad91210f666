# Wrong answers that the checks of lesson 08 must refuse. The runner tries each in the
# executed notebook, behind the solution of the same number.

# %% 08.1
lesson.refuse(
    "08.1",
    answer_labels=[
        lambda prompt, answer, end: [-100] * (len(prompt) - 1) + [*answer, end, -100],
        lambda prompt, answer, end: [-100] * len(prompt) + [*answer, -100],
    ],
)

# %% 08.2
lesson.refuse(
    "08.2",
    position_of=[feistel, lambda row, size, keys: feistel(row, size, keys[::-1])],
)


# %% 08.3
def all_before(ids, end):
    return np.tri(len(ids), dtype=bool).tolist()


def both_ways(ids, end):
    document = np.cumsum(np.array(ids) == end)
    return np.equal.outer(document, document).tolist()


lesson.refuse("08.3", may_look=[all_before, both_ways])

# %% 08.4
lesson.refuse(
    "08.4",
    better="A",
    bits=[
        lambda loss, bytes_per_token: loss / bytes_per_token,
        lambda loss, bytes_per_token: loss * bytes_per_token / np.log(2),
    ],
)


# %% 08.5
def without_world(steps, batch, world, new_batch, new_world, size):
    start = steps * batch
    return start, -(-(size - start % size) // (new_batch * new_world))


def past_the_end(steps, batch, world, new_batch, new_world, size):
    start = steps * batch * world
    return start, (size - start) // (new_batch * new_world)


lesson.refuse("08.5", move=[without_world, past_the_end])
