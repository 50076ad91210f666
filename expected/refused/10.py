# Wrong answers that the checks of lesson 10 must refuse. The runner tries each in the
# executed notebook, behind the solution of the same number.


# %% 10.1
def ignore_the_remainder(batch, world, most):
    micro = min(most, batch // world)
    return micro, -(-batch // world // micro)


lesson.refuse(
    "10.1", divide=[ignore_the_remainder, lambda batch, world, most: (most, batch // most)]
)


# %% 10.2
def mean_of_means(reports):
    return np.exp(np.mean([loss for rank in reports for loss, _ in rank]))


def mean_of_perplexities(reports):
    batches = [batch for rank in reports for batch in rank]
    perplexities = [np.exp(loss) for loss, _ in batches]
    return np.average(perplexities, weights=[tokens for _, tokens in batches])


lesson.refuse("10.2", merge=[mean_of_means, mean_of_perplexities])


# %% 10.3
def always_blame_rank_1(logs):
    for place, calls in enumerate(zip(*logs)):
        if len(set(calls)) > 1:
            return place, [1]
    return None


def trust_rank_0(logs):
    for place in range(max(map(len, logs))):
        first = logs[0][place : place + 1]
        wrong = [rank for rank, log in enumerate(logs) if log[place : place + 1] != first]
        if wrong:
            return place, wrong
    return None


lesson.refuse("10.3", find_culprit=[always_blame_rank_1, trust_rank_0, lambda logs: None])
