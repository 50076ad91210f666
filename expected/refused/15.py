# Wrong answers that the checks of lesson 15 must refuse. The runner tries each in the
# executed notebook, behind the solution of the same number.

# %% 15.1
rule = cover
lesson.refuse(
    "15.1",
    cover=[
        lambda ids, d, f, n, m: (
            np.where(d < 0.15, m, ids),
            np.where(d < 0.15, ids, -100),
        ),
        lambda ids, d, f, n, m: (rule(ids, d, f, n, m)[0], ids),
        lambda ids, d, f, n, m: rule(ids, d * 0.3, f, n, m),
        lambda ids, d, f, n, m: rule(ids, d, f + 0.05, n, m),
        lambda ids, d, f, n, m: (
            rule(ids, d, f, n, m)[0],
            np.where((d < 0.15) & (f < 0.9), ids, -100),
        ),
    ],
)

# %% 15.2
lesson.refuse(
    "15.2",
    asked_word=[lambda p, k: p * k, lambda p, k: p],
    needed=lambda s, k: s / k,
)


# %% 15.3
def nothing_hidden(ask, ids, mask):
    return np.exp(-np.mean([ask(ids, k)[ids[k]] for k in (1, 2, 3)]))


def the_token_before(ask, ids, mask):
    covered = {k: [*ids[:k], mask, *ids[k + 1 :]] for k in range(1, len(ids) - 1)}
    return np.exp(-np.mean([ask(row, k)[ids[k - 1]] for k, row in covered.items()]))


right = pseudo_perplexity
lesson.refuse(
    "15.3",
    pseudo_perplexity=[
        nothing_hidden,
        the_token_before,
        lambda ask, ids, mask: right(ask, ids, mask) ** (len(ids) - 2),
        lambda ask, ids, mask: right(ask, [2, *ids, 3], mask),
        lambda ask, ids, mask: 1 / right(ask, ids, mask),
    ],
)

# %% 15.4
lesson.refuse(
    "15.4",
    step_loss=[
        lambda sums, counts: np.mean([s / max(1, c) for s, c in zip(sums, counts)]),
        lambda sums, counts: sum(s / max(1, c) for s, c in zip(sums, counts)),
        lambda sums, counts: sum(sums) / sum(counts) if sum(counts) else np.nan,
    ],
)
