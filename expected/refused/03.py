# Wrong answers that the checks of lesson 03 must refuse. The runner tries each in the
# executed notebook, behind the solution of the same number.

# %% 03.1
lesson.refuse(
    "03.1",
    answer_sql=[
        "SELECT count(*) FROM {contents}",
        "SELECT sum(copies) FROM {contents}",
        "SELECT avg(copies) FROM {contents}",
        "SELECT max(copies) - 1 FROM {contents}",
        "SELECT count(*) FROM {contents} WHERE copies < 3",
    ],
)


# %% 03.2
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
    "03.2",
    allowed=[
        lambda expression, names: any(name in expression for name in names),
        lambda expression, names: expression in names,
        and_before_or,
        parts_of_words,
    ],
)

# %% 03.3
lesson.refuse(
    "03.3",
    shape=[(16, 8), (64, 2), (32, 8)],
)


# %% 03.4
def every_later_one_goes(pairs, count):
    later = {later for later, _ in pairs}
    return [number for number in range(count) if number not in later]


lesson.refuse(
    "03.4",
    survivors=every_later_one_goes,
)

# %% 03.5
lesson.refuse(
    "03.5",
    shared=[
        lambda train, test: {row["package"] for row in train},
        lambda train, test: set(),
    ],
)
