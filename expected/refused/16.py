# Wrong answers that the checks of lesson 16 must refuse. The runner tries each in the
# executed notebook, behind the solution of the same number.


# %% 16.1
search_well = n_best


def no_penalty(next_words, width, end, penalty=1.0, longest=20):
    return search_well(next_words, width, end, 0.0, longest)


def end_not_counted(next_words, width, end, penalty=1.0, longest=20):
    found = search_well(next_words, width, end, 0.0, longest)
    scored = [
        (total / max(1, len(words) - 1) ** penalty, words) for total, words in found
    ]
    return sorted(scored, reverse=True)


def only_the_best(next_words, width, end, penalty=1.0, longest=20):
    return search_well(next_words, width, end, penalty, longest)[:1]


def worst_first(next_words, width, end, penalty=1.0, longest=20):
    return search_well(next_words, width, end, penalty, longest)[::-1]


def stops_at_the_first_end(next_words, width, end, penalty=1.0, longest=20):
    for steps in range(1, longest + 1):
        found = search_well(next_words, width, end, penalty, steps)
        if found:
            return found
    return []


def greedy_only(next_words, width, end, penalty=1.0, longest=20):
    return search_well(next_words, 1, end, penalty, longest)


def ends_push_beams_out(next_words, width, end, penalty=1.0, longest=20):
    live, finished = [(0.0, ())], []
    for _ in range(longest):
        grown = [
            (t + v, (*words, w)) for t, words in live for w, v in next_words(words)
        ]
        grown = sorted(grown, reverse=True)[: max(1, width - len(finished))]
        live = [one for one in grown if one[1][-1] != end]
        finished += [one for one in grown if one[1][-1] == end]
    scored = [(total / len(words) ** penalty, words) for total, words in finished]
    return sorted(scored, reverse=True)


lesson.refuse(
    "16.1",
    n_best=[
        no_penalty,
        end_not_counted,
        only_the_best,
        worst_first,
        stops_at_the_first_end,
        greedy_only,
        ends_push_beams_out,
    ],
)

# %% 16.2
lesson.refuse(
    "16.2",
    honest_gain=[
        # the test chooses and judges
        lambda v, t: t.mean(1).max() - t[0].mean(),
        # the validation chooses and judges
        lambda v, t: v.mean(1).max() - v[0].mean(),
        # both together choose, and both judge
        lambda v, t: (v + t).mean(1).max() / 2 - (v + t)[0].mean() / 2,
        # chosen honestly, and judged on both
        lambda v, t: (v + t)[v.mean(1).argmax()].mean() / 2 - (v + t)[0].mean() / 2,
        # the mean of all settings
        lambda v, t: t[1:].mean() - t[0].mean(),
        lambda v, t: 0.0,
    ],
)

# %% 16.3
find = PLACEHOLDER.findall
lesson.refuse(
    "16.3",
    is_safe=[
        lambda a, b: sorted(find(a)) == sorted(find(b)),
        lambda a, b: set(find(a)) <= set(find(b)),
        lambda a, b: (
            set(re.findall(r"%.(\w+)", b)) <= set(re.findall(r"%.(\w+)", a))
        ),
    ],
)

# %% 16.4
lesson.refuse(
    "16.4",
    world=[
        LATTICE,
        {(): {"a": 0.6, "b": 0.4}, ("a",): {"d": 1.0}},
        {(): {"a": 0.4, "b": 0.3, "c": 0.3}, ("c",): {"d": 0.5}},
    ],
)
