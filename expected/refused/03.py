# Wrong answers that the checks of lesson 03 must refuse. The runner tries each in the
# executed notebook, behind the solution of the same number.

# %% 03.1
lesson.refuse("03.1",
    answer_sql=[
    "SELECT count(*) FROM {contents}", "SELECT sum(copies) FROM {contents}",
    "SELECT avg(copies) FROM {contents}", "SELECT max(copies) - 1 FROM {contents}",
    "SELECT count(*) FROM {contents} WHERE copies < 3"],
)

# %% 03.2
lesson.refuse("03.2",
    allowed=[
    lambda expression, names: any(name in expression for name in names),
    lambda expression, names: expression in names,
    lambda expression, names: all(any(name in part for name in names)
                                  for part in expression.split(" AND "))],
)

# %% 03.3
lesson.refuse("03.3",
    shape=[(16, 8), (64, 2), (32, 8)],
)

# %% 03.4
lesson.refuse("03.4",
    survivors=lambda pairs, count: [
    n for n in range(count) if n not in {later for later, _ in pairs}],
)

# %% 03.5
lesson.refuse("03.5",
    shared=[
    lambda train, test: {row["package"] for row in train},
    lambda train, test: set()],
)
