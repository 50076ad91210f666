# Wrong answers that the checks of lesson 04 must refuse. The runner tries each in the
# executed notebook, behind the solution of the same number.


# %% 04.1
def one_read_a_row(read, offsets, start, stop):
    lengths = [offsets[i + 1] - offsets[i] for i in range(start, stop)]
    return [read(offsets[start + i], length).decode() for i, length in enumerate(lengths)]


def reads_all(read, offsets, start, stop):
    data = read(0, offsets[-1])
    return [data[offsets[i] : offsets[i + 1]].decode() for i in range(start, stop)]


def reads_to_the_end(read, offsets, start, stop):
    begin = offsets[start]
    data = read(begin, offsets[-1] - begin)
    rows = range(start, len(offsets) - 1)
    return [data[offsets[i] - begin : offsets[i + 1] - begin].decode() for i in rows]


lesson.refuse("04.1", rows_between=[one_read_a_row, reads_all, reads_to_the_end])


# %% 04.2
def every_worker_the_same(count, node, nodes, worker, workers):
    return range(node, count, nodes)


def numbers_meet(count, node, nodes, worker, workers):
    return range(node + worker, count, nodes * workers)


def blocks_without_the_rest(count, node, nodes, worker, workers):
    block = count // (nodes * workers)
    own = node * workers + worker
    return range(own * block, (own + 1) * block)


lesson.refuse("04.2", my_rows=[every_worker_the_same, numbers_meet, blocks_without_the_rest])


# %% 04.3
generator = np.random.default_rng(SEED)


def draws_anew(step, count, size, seed):
    return generator.permutation(count)[:size].tolist()


def same_every_epoch(step, count, size, seed):
    order = np.random.default_rng(seed).permutation(count)
    place = step % (count // size) * size
    return order[place : place + size].tolist()


def as_it_lies(step, count, size, seed):
    return [(step * size + i) % count for i in range(size)]


lesson.refuse("04.3", rows_at=[draws_anew, same_every_epoch, as_it_lies])


# %% 04.4
def trusts_the_cache(rows, path):
    return rows.map(count_word, fn_kwargs={"path": path})


def never_uses_it(rows, path):
    return rows.map(count_word, fn_kwargs={"path": path}, load_from_cache_file=False)


lesson.refuse("04.4", counted=[trusts_the_cache, never_uses_it])
