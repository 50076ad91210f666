# Wrong answers that the checks of lesson 08 must refuse. The runner tries each in the
# executed notebook, behind the solution of the same number.

# %% 08.1
def no_overlap(documents, end, block):
    waiting = [end]
    for document in documents:
        waiting += [*document, end]
        while len(waiting) > block:
            yield waiting[: block + 1]
            waiting = waiting[block + 1 :]


def no_first_end(documents, end, block):
    waiting = []
    for document in documents:
        waiting += [*document, end]
        while len(waiting) > block:
            yield waiting[: block + 1]
            waiting = waiting[block:]


def all_at_once(documents, end, block):
    stream = [end]
    for document in documents:
        stream += [*document, end]
    for start in range(0, len(stream) - block, block):
        yield stream[start : start + block + 1]


def a_row_late(documents, end, block):
    waiting = [end]
    for document in documents:
        waiting += [*document, end]
        while len(waiting) > block + 1:
            yield waiting[: block + 1]
            waiting = waiting[block:]


def a_row_a_document(documents, end, block):
    waiting = [end]
    for document in documents:
        waiting += [*document, end]
        if len(waiting) > block:
            yield waiting[: block + 1]
            waiting = waiting[block:]


def all_ranks(batch, world):
    return batch * world


def one_rank(batch, world):
    return batch


def flow_of(order, step, advance=all_ranks):
    """Loaders that differ in the order of an epoch and in how positions are dealt."""

    def flow(path, block, batch, seed, start=0, rank=0, world=1):
        strip = np.memmap(path, np.uint16, mode="r")
        windows = sliding_window_view(strip, block + 1)[::block]
        while True:
            positions = step(start, rank, world, batch)
            numbers = np.array(
                [order(seed, *divmod(int(p), len(windows)), len(windows)) for p in positions]
            )
            yield numbers, windows[numbers]
            start += advance(batch, world)

    return flow


def dealt(start, rank, world, batch):
    return start + rank + world * np.arange(batch)


def in_pieces(start, rank, world, batch):
    return start + rank * batch + np.arange(batch)


def start_of_rank(start, rank, world, batch):
    return start * world + rank + world * np.arange(batch)


def from_zero(start, rank, world, batch):
    return start * batch + rank + world * np.arange(batch)


def shuffled_once(seed, epoch, place, size):
    return permute(np.array([place]), size, seed)[0]


def shuffled(seed, epoch, place, size):
    return permute(np.array([place]), size, seed, epoch)[0]


def turned(seed, epoch, place, size):
    return (place + epoch) % size


def turned_by_seed(seed, epoch, place, size):
    return (place + 101 * seed + epoch) % size


def turned_backwards(seed, epoch, place, size):
    return (101 * seed + epoch - place) % size


def within_blocks(seed, epoch, place, size):
    start = place // 64 * 64
    order = np.random.default_rng([seed, epoch, start]).permutation(min(64, size - start))
    return start + order[place - start]


def drawn(seed, epoch, place, size):
    return np.random.default_rng([seed, epoch, place]).integers(size)


def one_by_one(path, block, seed, epochs):
    strip = np.memmap(path, np.uint16, mode="r")
    windows = sliding_window_view(strip, block + 1)[::block]
    for epoch in epochs:
        for number in np.random.default_rng([seed, epoch]).permutation(len(windows)):
            yield number, windows[number]


def in_batches(flow, batch):
    while part := list(islice(flow, batch)):
        yield np.array([number for number, _ in part]), np.stack([row for _, row in part])


def reads_and_drops(path, block, batch, seed, start=0, rank=0, world=1):
    rows = one_by_one(path, block, seed, range(10**15))
    return in_batches(islice(rows, start + rank, None, world), batch)


def one_epoch(path, block, batch, seed, start=0, rank=0, world=1):
    rows = one_by_one(path, block, seed, range(1))
    return in_batches(islice(rows, start + rank, None, world), batch)


def one_order_for_ranks(path, block, batch, seed, start=0, rank=0, world=1):
    def order(seed, epoch, place, size):
        return shuffled(seed, epoch if world == 1 else 0, place, size)

    return flow_of(order, dealt)(path, block, batch, seed, start, rank, world)


lesson.refuse(
    "08.1",
    pack=[no_overlap, no_first_end, all_at_once, a_row_late, a_row_a_document],
    batches=[
        flow_of(shuffled_once, dealt),
        flow_of(drawn, dealt),
        flow_of(turned_backwards, dealt),
        flow_of(within_blocks, dealt),
        flow_of(turned, dealt),
        flow_of(turned_by_seed, dealt),
        flow_of(shuffled, in_pieces),
        flow_of(shuffled, from_zero),
        flow_of(shuffled, dealt, one_rank),
        flow_of(shuffled, start_of_rank),
        reads_and_drops,
        one_epoch,
        one_order_for_ranks,
    ],
)


# %% 08.2
def all_before(edges):
    return np.tri(edges[-1], dtype=bool).tolist()


def both_ways(edges):
    document = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
    return np.equal.outer(document, document).tolist()


def edge_before(edges):
    document = np.searchsorted(edges, np.arange(edges[-1]))
    return np.tril(np.equal.outer(document, document)).tolist()


def in_ones_and_zeros(edges, right=may_look):
    return [[int(see) for see in row] for row in right(edges)]


def in_numpy(edges, right=may_look):
    return np.array(right(edges))


# These are right answers, too, and are taken.
for may_look in (in_ones_and_zeros, in_numpy):
    lesson.solution("08.2")
lesson.refuse("08.2", may_look=[all_before, both_ways, edge_before])

# %% 08.3
lesson.refuse(
    "08.3",
    prediction=["same", "higher"],
    crowding=[
        lambda ids, block, end: (ids == end).sum() / (len(ids) // block),
        lambda ids, block, end: (ids[: len(ids) // block * block] == end)
        .reshape(-1, block)
        .any(1)
        .mean(),
    ],
    share_with_end=[
        lambda block, mean_length: block / mean_length,
        lambda block, mean_length: min(1, mean_length / block),
    ],
)


# %% 08.4
def without_world(steps, batch, world, new_batch, new_world, size):
    start, together = steps * batch, new_batch * new_world
    return start, -(-(size - start % size) // together), batch == new_batch


def past_the_end(steps, batch, world, new_batch, new_world, size):
    start, together = steps * batch * world, new_batch * new_world
    return start, (size - start) // together, batch * world == together


def same_numbers(steps, batch, world, new_batch, new_world, size):
    start, together = steps * batch * world, new_batch * new_world
    same = (batch, world) == (new_batch, new_world)
    return start, -(-(size - start % size) // together), same


lesson.refuse("08.4", move=[without_world, past_the_end, same_numbers])
