# Wrong answers that the checks of lesson 15 must refuse. The runner tries each in the
# executed notebook, behind the solution of the same number.


# %% 15.1
collate_well = collate_words


def tokens_not_words(rows, draw, size, **shares):
    apart = [(ids, [n if w >= 0 else -1 for n, w in enumerate(words)]) for ids, words in rows]
    return collate_well(apart, draw, size, **shares)


def static(rows, draw, size, **shares):
    return collate_well(rows, torch.Generator().manual_seed(0), size, **shares)


def own_luck(rows, draw, size, **shares):
    return collate_well(rows, torch.Generator().manual_seed(draw.seed()), size, **shares)


def labels_everywhere(rows, draw, size, **shares):
    seen, labels, real = collate_well(rows, draw, size, **shares)
    longest = seen.shape[1]
    true = [list(ids) + [-100] * (longest - len(ids)) for ids, _ in rows]
    return seen, torch.tensor(true), real


def touched_words(rows, draw, size, **shares):
    # A token is drawn, and its word taken: long words have more chances.
    return collate_well(rows, draw, size, share=1 - 0.85**2)


def padding_is_seen(rows, draw, size, **shares):
    seen, labels, real = collate_well(rows, draw, size, **shares)
    return seen, labels, torch.ones_like(real)


def one_fate_a_word(rows, draw, size, **shares):
    seen, labels, real = collate_well(rows, draw, size, **shares)
    hidden = seen == MASK
    for row in range(len(seen)):
        for place in range(2, seen.shape[1], 2):
            if hidden[row, place - 1] and labels[row, place] != -100:
                seen[row, place] = MASK
            elif labels[row, place] != -100 and not hidden[row, place - 1]:
                kept = seen[row, place - 1] == labels[row, place - 1]
                seen[row, place] = labels[row, place] if kept else 7 + row % 400
    return seen, labels, real


def swaps_in_one_token(rows, draw, size, **shares):
    seen, labels, real = collate_well(rows, draw, size, **shares)
    swapped = (labels != -100) & (seen != MASK) & (seen != labels)
    return torch.where(swapped, 5, seen), labels, real


def swaps_in_any_number(rows, draw, size, **shares):
    return collate_well(rows, draw, 5 * size, **shares)


lesson.refuse(
    "15.1",
    collate_words=[
        one_fate_a_word,
        swaps_in_one_token,
        swaps_in_any_number,
        tokens_not_words,
        static,
        own_luck,
        labels_everywhere,
        touched_words,
        padding_is_seen,
        lambda rows, draw, size: collate_well(rows, draw, size, hide=1.0, swap=0.0),
        lambda rows, draw, size: collate_well(rows, draw, size, swap=0.2),
    ],
)

# %% 15.2
right_way = decided
lesson.refuse(
    "15.2",
    decided=[
        of_the_report,
        # all seeds, but tokens as if they were independent, and the seeds as more tokens
        lambda o, t, lines: gain(o.ravel(), t.ravel(), np.arange(o.size), repeats=500).low > 0,
        # all seeds, but tokens as if they were independent
        lambda o, t, lines: gain(o, t, np.arange(len(lines)), repeats=500).low > 0,
        # five means against five, whatever the lines
        lambda o, t, lines: o.mean() - t.mean()
        > 2 * np.sqrt((o.mean(1).var(ddof=1) + t.mean(1).var(ddof=1)) / 5),
        # lines are drawn, and the five runs are taken for all that could have come
        lambda o, t, lines: gain(o.mean(0), t.mean(0), lines, repeats=500).low > 0,
        # lines are right, one seed is not
        lambda o, t, lines: gain(o[0], t[0], lines, repeats=500).low > 0,
        # the best seed of each, chosen by the test itself
        lambda o, t, lines: gain(max(o, key=np.mean), min(t, key=np.mean), lines, repeats=500).low
        > 0,
        lambda o, t, lines: o.mean() > t.mean(),
        lambda o, t, lines: False,
    ],
)


# %% 15.3
def nothing_hidden(ask_at, ids, mask):
    return np.exp(-np.mean([ask_at(ids, k)[ids[k]] for k in (1, 2, 3)]))


def the_token_before(ask_at, ids, mask):
    covered = {k: [*ids[:k], mask, *ids[k + 1 :]] for k in range(1, len(ids) - 1)}
    return np.exp(-np.mean([ask_at(row, k)[ids[k - 1]] for k, row in covered.items()]))


right_perplexity = pseudo_perplexity
lesson.refuse(
    "15.3",
    pseudo_perplexity=[
        nothing_hidden,
        the_token_before,
        lambda ask_at, ids, mask: right_perplexity(ask_at, ids, mask) ** (len(ids) - 2),
        lambda ask_at, ids, mask: right_perplexity(ask_at, [2, *ids, 3], mask),
        lambda ask_at, ids, mask: 1 / right_perplexity(ask_at, ids, mask),
    ],
)
