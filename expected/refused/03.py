# Wrong answers that the checks of lesson 03 must refuse. The runner tries each in the
# executed notebook, behind the solution of the same number.


# %% 03.1
def and_before_or(expression, names):
    return all(
        any(name in names for name in part.split(" OR ")) for part in expression.split(" AND ")
    )


def parts_of_words(expression, names):
    return any(
        all(any(name in part for name in names) for part in choice.split(" AND "))
        for choice in expression.split(" OR ")
    )


lesson.refuse(
    "03.1",
    allowed=[
        lambda expression, names: any(name in expression for name in names),
        lambda expression, names: expression in names,
        and_before_or,
        parts_of_words,
    ],
)

# %% 03.2
lesson.refuse(
    "03.2",
    shape=[(16, 8), (64, 2), (32, 8)],
)


# %% 03.3
def one_salt(own):
    return [min(hashlib.blake2b(word.encode()).digest() for word in own)] * 128


def by_position(own):
    return [sorted(own)[0].encode() + bytes([salt]) for salt in range(128)]


def whole_sketches(sketches):
    return {
        (later, earlier)
        for later in range(len(sketches))
        for earlier in range(later)
        if sketches[later] == sketches[earlier]
    }


def any_row(sketches):
    return {
        (later, earlier)
        for later in range(len(sketches))
        for earlier in range(later)
        if any(x == y for x, y in zip(sketches[later], sketches[earlier]))
    }


def any_band(sketches):
    pairs, buckets = set(), {}
    for number, places in enumerate(sketches):
        for start in range(0, 128, 8):
            bucket = buckets.setdefault(tuple(places[start : start + 8]), set())
            pairs |= {(number, earlier) for earlier in bucket if earlier != number}
            bucket.add(number)
    return pairs


def earlier_first(sketches):
    return {
        (earlier, later)
        for later in range(len(sketches))
        for earlier in range(later)
        if any(
            sketches[later][start : start + 8] == sketches[earlier][start : start + 8]
            for start in range(0, 128, 8)
        )
    }


def not_verified(texts):
    return candidates([sketch(words(text)) for text in texts])


def equal_only(texts):
    own = [words(text) for text in texts]
    return {(a, b) for a in range(len(own)) for b in range(a) if own[a] == own[b]}


lesson.refuse(
    "03.3",
    sketch=[one_salt, by_position],
    candidates=[whole_sketches, any_row, any_band, earlier_first],
    near_pairs=[not_verified, equal_only],
)


# %% 03.4
def every_later_one_goes(pairs, count):
    later = {later for later, _ in pairs}
    return [number for number in range(count) if number not in later]


lesson.refuse(
    "03.4",
    survivors=every_later_one_goes,
)
