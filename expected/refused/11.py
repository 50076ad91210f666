# Wrong answers that the checks of lesson 11 must refuse. The runner tries each in the
# executed notebook, behind the solution of the same number.


# %% 11.1
def send_everything(parameters, world):
    return 2 * parameters, 3 * parameters


def forget_the_share_of_the_weights(parameters, world):
    return 4 * parameters * (world - 1) / world, 3 * parameters * (world > 1)


def forget_that_gathering_is_half(parameters, world):
    return 4 * parameters * (world - 1) / world, 4 * parameters * (
        world - 1
    ) / world


lesson.refuse(
    "11.1",
    traffic=[
        send_everything,
        forget_the_share_of_the_weights,
        forget_that_gathering_is_half,
    ],
)


# %% 11.2
lesson.refuse(
    "11.2",
    micro_batches=[
        lambda stages, share: round((stages - 1) / share),
        lambda stages, share: stages * 4,
    ],
)


# %% 11.3
from unittest import mock


class SummedNotAveraged(ShardedAdamW):
    def step(self, limit):
        self.world, world = 1, self.world  # what divides, and what cuts
        try:
            return super().step(limit)
        finally:
            self.world = world

    def flatten(self, tensors):
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        return F.pad(flat, (0, -len(flat) % dist.get_world_size()))


class NormOfItsSlice(ShardedAdamW):
    def step(self, limit):
        with mock.patch.object(dist, "all_reduce", lambda tensor: None):
            return super().step(limit)


class SliceOfItsNeighbour(ShardedAdamW):
    def step(self, limit):
        gather = dist.all_gather_into_tensor

        def turned(whole, mine):
            gather(whole, mine)
            whole.copy_(torch.cat(whole.chunk(self.world)[::-1]))

        with mock.patch.object(dist, "all_gather_into_tensor", turned):
            return super().step(limit)


class NothingHandedAround(ShardedAdamW):
    def step(self, limit):
        def own(whole, mine):
            whole.copy_(self.flatten([p.detach() for p in self.parameters]))

        with mock.patch.object(dist, "all_gather_into_tensor", own):
            return super().step(limit)


class EverybodyKeepsAll:
    def __init__(self, parameters, lr):
        self.parameters = parameters
        self.inner = torch.optim.AdamW(parameters, lr=lr)

    def step(self, limit):
        for parameter in self.parameters:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        norm = nn.utils.clip_grad_norm_(self.parameters, limit)
        self.inner.step()
        return norm


class NeverClips(ShardedAdamW):
    def step(self, limit):
        return super().step(float("inf"))


class NoDecay(ShardedAdamW):
    def __init__(self, parameters, lr):
        super().__init__(parameters, lr)
        self.inner = torch.optim.Adam([self.mine], lr=lr)


class ForgetsItsAverages(ShardedAdamW):
    def step(self, limit):
        self.inner = torch.optim.AdamW([self.mine], lr=0.1)
        return super().step(limit)


class DropsTheRest(ShardedAdamW):
    def flatten(self, tensors):
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        return flat[: len(flat) // self.world * self.world]


lesson.refuse(
    "11.3",
    ShardedAdamW=[
        SummedNotAveraged,
        NormOfItsSlice,
        SliceOfItsNeighbour,
        NothingHandedAround,
        EverybodyKeepsAll,
        NeverClips,
        NoDecay,
        ForgetsItsAverages,
        DropsTheRest,
    ],
)


# %% 11.4
def with_the_padding(size, old, new, rank):
    was, will = -(-size // old), -(-size // new)
    begin, end = rank * will, (rank + 1) * will
    found = []
    for file in range(old):
        start, stop = max(begin, file * was), min(end, (file + 1) * was)
        if start < stop:
            found.append((file, start - file * was, stop - file * was))
    return found


def counted_in_the_vector(size, old, new, rank):
    return [
        (file, start + file * -(-size // old), stop + file * -(-size // old))
        for file, start, stop in pieces_of_the_solution(size, old, new, rank)
    ]


def its_own_file(size, old, new, rank):
    return [(rank % old, 0, -(-size // new))]


def rounded_down(size, old, new, rank):
    was, will = max(1, size // old), -(-size // new)
    begin, end = rank * will, min((rank + 1) * will, size)
    found = []
    for file in range(old):
        start, stop = max(begin, file * was), min(end, (file + 1) * was)
        if start < stop:
            found.append((file, start - file * was, stop - file * was))
    return found


def with_empty_ones(size, old, new, rank):
    return [*pieces_of_the_solution(size, old, new, rank), (0, 0, 0)]


pieces_of_the_solution = pieces
lesson.refuse(
    "11.4",
    pieces=[
        with_the_padding,
        counted_in_the_vector,
        its_own_file,
        rounded_down,
        with_empty_ones,
    ],
)


# %% 11.5
def without_buckets(parameters, ranks, activations, memory):
    for stage in range(4):
        if sum(states(stage, 4 * parameters, ranks)) + activations <= memory:
            return stage
    return None


def activations_are_sharded(parameters, ranks, activations, memory):
    return least_stage_of_the_solution(
        parameters, ranks, activations / ranks, memory
    )


def buckets_everywhere(parameters, ranks, activations, memory):
    for stage in range(4):
        need = (
            sum(states(stage, 4 * parameters, ranks)) + 4 * parameters + activations
        )
        if need <= memory:
            return stage
    return None


def always_the_last(parameters, ranks, activations, memory):
    return 3


least_stage_of_the_solution = least_stage
lesson.refuse(
    "11.5",
    least_stage=[
        without_buckets,
        activations_are_sharded,
        buckets_everywhere,
        always_the_last,
    ],
)
