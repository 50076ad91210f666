# Wrong answers that the checks of lesson 07 must refuse. The runner tries each in the
# executed notebook, behind the solution of the same number.


# %% 07.1
def recount_all(pair, new, words, times, pairs, where):
    for number, word in enumerate(words):
        merged = []
        for symbol in word:
            if merged and (merged[-1], symbol) == pair:
                merged[-1] = new
            else:
                merged.append(symbol)
        words[number] = merged
    pairs.clear()
    pairs.update(count_pairs(words, times))
    where.clear()
    for number, word in enumerate(words):
        for made in zip(word, word[1:]):
            where.setdefault(made, set()).add(number)


def forget_times(pair, new, words, times, pairs, where, right=apply_merge):
    right(pair, new, words, [1] * len(times), pairs, where)


def forget_the_index(pair, new, words, times, pairs, where, right=apply_merge):
    right(pair, new, words, times, pairs, {p: set(held) for p, held in where.items()})


def forget_the_old_pairs(pair, new, words, times, pairs, where, right=apply_merge):
    before = dict(pairs)
    right(pair, new, words, times, pairs, where)
    for old in before:
        if old != pair:
            pairs[old] = max(pairs[old], before[old])


def keep_the_pair(pair, new, words, times, pairs, where, right=apply_merge):
    before = pairs[pair]
    right(pair, new, words, times, pairs, where)
    pairs[pair] = before


def take_the_best_of_the_first_count(words, times, steps):
    pairs = count_pairs(words, times)
    return sorted(pairs, key=lambda pair: (-pairs[pair], pair))[:steps]


def settle_ties_otherwise(words, times, steps):
    words, merges = list(words), []
    for step in range(60):  # the first tie comes before
        pairs = count_pairs(words, times)
        where = {}
        for number, word in enumerate(words):
            for pair in zip(word, word[1:]):
                where.setdefault(pair, set()).add(number)
        merges.append(max(pairs, key=lambda pair: (pairs[pair], pair)))
        apply_merge(merges[-1], 256 + step, words, times, pairs, where)
    return merges + merges[-1:] * (steps - len(merges))


def make_tuples(pair, new, words, times, pairs, where, right=apply_merge):
    right(pair, new, words, times, pairs, where)
    words[:] = map(tuple, list.__iter__(words))


def count_each_word_once(words, times, steps, right=train_fast):
    return right(words, [1] * len(times), steps)


def expect_a_set_for_each_pair(pair, new, words, times, pairs, where):
    for number in where[pair]:
        word = words[number]
        for old in zip(word, word[1:]):
            pairs[old] -= times[number]
        merged = []
        for symbol in word:
            if merged and (merged[-1], symbol) == pair:
                merged[-1] = new
            else:
                merged.append(symbol)
        words[number] = merged
        for made in zip(merged, merged[1:]):
            pairs[made] += times[number]
            where[made].add(number)
    pairs.pop(pair)


lesson.refuse(
    "07.1",
    apply_merge=[
        expect_a_set_for_each_pair,
        recount_all,
        forget_times,
        forget_the_index,
        forget_the_old_pairs,
        keep_the_pair,
        make_tuples,
    ],
    train_fast=[
        take_the_best_of_the_first_count,
        settle_ties_otherwise,
        count_each_word_once,
        lambda words, times, steps: [],
    ],
)

# %% 07.2
lesson.refuse(
    "07.2",
    my_pattern=[
        PATTERNS["code"],
        PATTERNS["nanochat"],
        r"\p{L}+|\p{N}|[^\p{L}\p{N}\n]+",
        r"\p{L}+|\p{N}|[\s\S]",
        r"[^\n]*\n",
        my_pattern + "+",  # the last `\s` becomes `\s+`, which takes line breaks along
        r"\)\n+|" + my_pattern,  # only the files show it
    ],
)

# %% 07.3
lesson.refuse(
    "07.3",
    bits_per_byte=[
        lambda loss, tokens, size: loss * tokens / size,
        lambda loss, tokens, size: loss / math.log(2) * size / tokens,
        lambda loss, tokens, size: loss / math.log(2),
    ],
    better=["A", None],
)

# %% 07.4
lesson.refuse(
    "07.4",
    predict_different=[
        lambda first, second, characters: second[1] * characters / second[0],
        lambda first, second, characters: second[1],
        lambda first, second, characters: second[1]
        + (characters - second[0])
        * (second[1] - first[1])
        / (second[0] - first[0]),
        lambda first, second, characters: second[1]
        * (characters / second[0]) ** 0.9,
    ],
)
