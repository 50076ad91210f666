# Wrong answers that the checks of lesson 00 must refuse. The runner tries each in the
# executed notebook, behind the solution of the same number.

# %% 00.1
def one_that_falls_through(probabilities, u):
    for index, passed in enumerate(probabilities.cumsum(0)):
        if u < passed:
            return index


lesson.refuse(
    "00.1",
    pick=[
        lambda probabilities, u: int(probabilities.argmax()),
        lambda probabilities, u: int((probabilities <= u).sum()),
        lambda probabilities, u: int((probabilities.cumsum(0) <= u).sum()),
        lambda probabilities, u: int((probabilities.cumsum(0) < u).sum()),
        lambda probabilities, u: int(torch.searchsorted(probabilities.cumsum(0), u)),
        lambda probabilities, u: int(u * len(probabilities)),
        one_that_falls_through,
    ],
)

# %% 00.2
lesson.refuse(
    "00.2",
    cold=[1.0, 1 / cold, cold + 0.05],
)


# %% 00.3
def without_the_one_that_reaches_p(scores, temperature=1.0, k=0, p=1.0):
    row = warp(scores, temperature, k or scores.shape[-1], 1.0).softmax(-1)
    ordered, order = row.sort(descending=True)
    if p < 1:
        ordered[:, 1:][ordered.cumsum(-1)[:, 1:] > p] = 0
    kept = torch.zeros_like(row).scatter(1, order, ordered)
    return kept / kept.sum(-1, keepdim=True)


def with_one_cut_for_all_texts(scores, temperature=1.0, k=0, p=1.0):
    if k:
        scores = scores.masked_fill(
            scores < scores.topk(k).values.min(), -torch.inf
        )
    return warp(scores, temperature, scores.shape[-1], p).softmax(-1)


def with_the_temperature_last(scores, temperature=1.0, k=0, p=1.0):
    cut = warp(scores, 1.0, k or scores.shape[-1], p)
    return (cut / temperature).softmax(-1)


def without_a_new_sum(scores, temperature=1.0, k=0, p=1.0):
    cut = warp(scores, temperature, k or scores.shape[-1], p)
    return (scores / temperature).softmax(-1) * cut.isfinite()


def in_the_order_of_the_sort(scores, temperature=1.0, k=0, p=1.0):
    whole = warp(scores, temperature, k or scores.shape[-1], p).softmax(-1)
    return whole.sort(descending=True).values


def with_a_rounded_sum_that_cuts_at_p_1(scores, temperature=1.0, k=0, p=1.0):
    row = warp(scores, temperature, k or scores.shape[-1]).softmax(-1)
    ordered, order = row.sort(descending=True)
    before = ordered.cumsum(-1) - ordered
    ordered[:, 1:][before[:, 1:] >= p] = 0
    kept = torch.zeros_like(row).scatter(1, order, ordered)
    return kept / kept.sum(-1, keepdim=True)


def over_the_logits_given(scores, temperature=1.0, k=0, p=1.0):
    scores.div_(temperature)
    return warp(scores, 1.0, k or scores.shape[-1], p).softmax(-1)


lesson.refuse(
    "00.3",
    sampler=[
        lambda scores, temperature=1.0, k=0, p=1.0: scores.softmax(-1),
        lambda scores, temperature=1.0, k=0, p=1.0: warp(
            scores, temperature, (k or scores.shape[-1] - 1) + 1, p
        ).softmax(-1),
        lambda scores, temperature=1.0, k=0, p=1.0: warp(
            scores, temperature, k or scores.shape[-1], p
        ),
        without_the_one_that_reaches_p,
        with_one_cut_for_all_texts,
        with_the_temperature_last,
        without_a_new_sum,
        in_the_order_of_the_sort,
        with_a_rounded_sum_that_cuts_at_p_1,
        over_the_logits_given,
    ],
)

# %% 00.4
lesson.refuse(
    "00.4",
    guess="more",
    temperature_first=temperature_last,
    temperature_last=temperature_first,
)
