# Wrong answers that the checks of lesson 11 must refuse. The runner tries each in the
# executed notebook, behind the solution of the same number.


# %% 11.1
def send_everything(parameters, world):
    return 2 * parameters, 3 * parameters


def forget_the_share_of_the_weights(parameters, world):
    return 4 * parameters * (world - 1) / world, 3 * parameters * (world > 1)


def forget_that_gathering_is_half(parameters, world):
    return 4 * parameters * (world - 1) / world, 4 * parameters * (world - 1) / world


lesson.refuse(
    "11.1",
    traffic=[send_everything, forget_the_share_of_the_weights, forget_that_gathering_is_half],
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
def deal_in_turn(sizes, world):
    return [number % world for number in range(len(sizes))]


def deal_without_sorting(sizes, world):
    loads = [0] * world
    ranks = []
    for size in sizes:
        ranks.append(loads.index(min(loads)))
        loads[ranks[-1]] += size
    return ranks


def deal_in_stretches(sizes, world):
    return [number * world // len(sizes) for number in range(len(sizes))]


lesson.refuse("11.3", deal=[deal_in_turn, deal_without_sorting, deal_in_stretches])
