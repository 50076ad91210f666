# Wrong answers that the checks of lesson 17 must refuse. The runner tries each in the
# executed notebook, behind the solution of the same number.

# %% 17.1
batch_well = batch_of


def learn_all(talks, most):
    ids, labels, mask = batch_well(talks, most)
    return ids, torch.where(mask == 1, ids, -100), mask


def last_only(talks, most):
    ids, labels, mask = batch_well(talks, most)
    labels = labels.clone()
    for row in labels:
        ends = (row == tokenizer.eos_token_id).nonzero().flatten()
        if len(ends) > 1:
            row[: ends[-2] + 1] = -100
    return ids, labels, mask


def no_end(talks, most):
    ids, labels, mask = batch_well(talks, most)
    return ids, torch.where(labels == tokenizer.eos_token_id, -100, labels), mask


def every_end(talks, most):
    ids, labels, mask = batch_well(talks, most)
    return ids, torch.where(ids == tokenizer.eos_token_id, ids, labels), mask


def shifted(talks, most):
    ids, labels, mask = batch_well(talks, most)
    return ids, labels.roll(-1, 1), mask


def cut_at_the_end(talks, most):
    return tuple(part[:, :most] for part in batch_well(talks, 10_000))


def cut_at_the_start(talks, most):
    return tuple(part[:, -most:] for part in batch_well(talks, 10_000))


def padded_with_end(talks, most):
    ids, labels, mask = batch_well(talks, most)
    return torch.where(mask == 1, ids, tokenizer.eos_token_id), labels, mask


def padding_is_seen(talks, most):
    ids, labels, mask = batch_well(talks, most)
    return ids, labels, torch.ones_like(mask)


lesson.refuse(
    "17.1",
    batch_of=[
        learn_all,
        last_only,
        no_end,
        every_end,
        shifted,
        cut_at_the_end,
        cut_at_the_start,
        padded_with_end,
        padding_is_seen,
    ],
)

# %% 17.2
fair_way = fair


def seeds_ignored(valid, test, tables):
    rate = int(valid.mean((1, 2)).argmax())
    found = gain(test[rate, 0], test[0, 0], np.arange(len(tables)), repeats=500)
    return rate, rate > 0 and found.low > 0


lesson.refuse(
    "17.2",
    fair=[
        of_the_report,
        seeds_ignored,
        lambda v, t, p: (fair_way(v, t, p)[0], True),
        lambda v, t, p: (fair_way(v, t, p)[0], False),
        # the first seed of the rehearsal is one throw of the dice
        lambda v, t, p: (int(v[:, 0, :9].mean(1).argmax()), fair_way(v, t, p)[1]),
        # chosen and judged by the rehearsal: selection inside the very test
        lambda v, t, p: of_the_report(v, v, p),
    ],
)

# %% 17.3
lesson.refuse(
    "17.3",
    needs=[
        lambda p, a, how: p * {"full": 16, "lora": 2, "qlora": 0.5}[how] + 16 * a,
        lambda p, a, how: (
            p * {"full": 16, "lora": 4, "qlora": 0.5625}[how] + 16 * a
        ),
    ],
)

# %% 17.4
right_verdict = verdict
lesson.refuse(
    "17.4",
    verdict=[
        lambda before, after, beta: right_verdict((0, 0), after, beta),
        lambda before, after, beta: (
            right_verdict(before, after, beta)[0],
            "better",
        ),
        lambda before, after, beta: (  # forgets the reference
            right_verdict(before, after, beta)[0],
            right_verdict((0, 0), after, beta)[1]
            if after[0] <= after[1]
            else right_verdict(before, after, beta)[1],
        ),
    ],
)
