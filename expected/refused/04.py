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
    rows = range(start, stop)
    return [data[offsets[i] - begin : offsets[i + 1] - begin].decode() for i in rows]


def gives_all_to_the_end(read, offsets, start, stop):
    begin = offsets[start]
    data = read(begin, offsets[-1] - begin)
    rows = range(start, len(offsets) - 1)
    return [data[offsets[i] - begin : offsets[i + 1] - begin].decode() for i in rows]


lesson.refuse(
    "04.1", rows_between=[one_read_a_row, reads_all, reads_to_the_end, gives_all_to_the_end]
)


# %% 04.2
def cuts_shards():
    return 600, 2, 7200


def forgets_the_second_machine():
    return 675, 1, 7200


def forgets_the_first_division():
    return 675, 0, 7200


def two_machines_read_all():
    return 675, 2, 3600


def each_row_is_read_once():
    return 675, 2, 1800


lesson.refuse(
    "04.2",
    predictions=[
        cuts_shards,
        forgets_the_second_machine,
        forgets_the_first_division,
        two_machines_read_all,
        each_row_is_read_once,
    ],
)


# %% 04.3
class LosesItsBuffer(ShuffleBuffer):
    """As the library's: the state holds no rows."""

    def state_dict(self):
        return super().state_dict() | {"buffer": []}


class ForgetsItsChoices(ShuffleBuffer):
    """Begins to draw anew behind a stop."""

    def state_dict(self):
        return super().state_dict() | {"given": 0}


class LendsItsBuffer(ShuffleBuffer):
    """Its state is no snapshot: it changes when the stream goes on."""

    def state_dict(self):
        return super().state_dict() | {"buffer": self.buffer}


class ChangesAfterTheYield(ShuffleBuffer):
    """At a stop the row that was just given is still in its buffer."""

    def __iter__(self):
        for row in super().__iter__():
            self.buffer.append(row)
            yield row
            self.buffer.pop()


class KeepsItsOldBuffer(ShuffleBuffer):
    """A second pass begins with the rows that a first one left."""

    def __iter__(self):
        self.start = self.start | {"buffer": self.buffer, "given": self.given}
        return super().__iter__()


class GoesOnForEver(ShuffleBuffer):
    """Every pass after a resume begins where the first one did."""

    def load_state_dict(self, state):
        self.begin = state
        super().load_state_dict(state)


class ResetsOnlyItsBuffer(ShuffleBuffer):
    """The pass after a resume has an empty buffer, and the stream's old position."""

    def load_state_dict(self, state):
        self.begin = self.begin | {"rows": state["rows"]}
        super().load_state_dict(state)


class TellsTheStateBeforeTheLoad(ShuffleBuffer):
    """As the library's: until the first row its state is the old one."""

    def state_dict(self):
        self.loaded = None
        return super().state_dict()


class ReadsFromTheStart(ShuffleBuffer):
    """Goes on by giving all rows again, and dropping those that were given."""

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.drop = state["given"]

    def __iter__(self):
        yield from itertools.islice(super().__iter__(), getattr(self, "drop", 0), None)


class ShufflesByBlocks(ShuffleBuffer):
    """Drops the rows that fill no block."""

    def __iter__(self):
        block = []
        for row in self.rows:
            block.append(row)
            if len(block) == self.size - 1:
                yield from random.Random(self.seed).sample(block, len(block))
                block = []


class HoldsEverything(ShuffleBuffer):
    """A true shuffle, which needs all rows in memory."""

    def __init__(self, rows, size, seed):
        super().__init__(rows, 10**6, seed)


class DoesNotMix(ShuffleBuffer):
    """A queue: what came first goes first."""

    def __iter__(self):
        for row in self.rows:
            self.given += 1
            yield row


class IgnoresTheSeed(ShuffleBuffer):
    """One order for every seed."""

    def __init__(self, rows, size, seed):
        super().__init__(rows, size, 0)


lesson.refuse(
    "04.3",
    ShuffleBuffer=[
        LosesItsBuffer,
        ForgetsItsChoices,
        LendsItsBuffer,
        ChangesAfterTheYield,
        KeepsItsOldBuffer,
        GoesOnForEver,
        ResetsOnlyItsBuffer,
        TellsTheStateBeforeTheLoad,
        ReadsFromTheStart,
        ShufflesByBlocks,
        HoldsEverything,
        DoesNotMix,
        IgnoresTheSeed,
    ],
)


# %% 04.4
def trusts_the_cache(rows, path):
    return rows.map(count_word, fn_kwargs={"path": path})


def never_uses_it(rows, path):
    return rows.map(count_word, fn_kwargs={"path": path}, load_from_cache_file=False)


lesson.refuse("04.4", counted=[trusts_the_cache, never_uses_it])
