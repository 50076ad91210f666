# Wrong answers that the checks of lesson 19 must refuse. The runner tries each in the
# executed notebook, behind the solution of the same number.

# %% 19.1
report_well = report


def verdicts_of(rows):
    verdicts = {}
    for problem, right in rows:
        verdicts.setdefault(problem, []).append(right)
    return list(verdicts.values())


def drawn(points):
    draws = np.random.default_rng(0).integers(len(points), size=(10_000, len(points)))
    return np.quantile(np.array(points)[draws].mean(1), [0.025, 0.975])


def the_obvious_way(rows, k):
    points = [1 - (1 - np.mean(row)) ** k for row in verdicts_of(rows)]
    report_well(rows, k)
    return (np.mean(points), *drawn(points))


def all_in_one_pot(rows, k):
    _, low, high = report_well(rows, k)
    right = [passed for _, passed in rows]
    return pass_at_k(len(right), sum(right), k), low, high


def with_float_binomials(rows, k):
    _, low, high = report_well(rows, k)
    with np.errstate(all="ignore"):
        points = [
            1 - float_comb(len(row) - sum(row), k) / float_comb(len(row), k)
            for row in verdicts_of(rows)
        ]
    return np.mean(points), low, high


def programs_drawn(rows, k):
    value, low, high = report_well(rows, k)
    right = np.array([passed for _, passed in rows])
    luck = 1.96 * right.std() / len(right) ** 0.5
    return value, value - luck, value + luck


def the_whole_range(rows, k):
    return report_well(rows, k)[0], 0.0, 1.0


def nine_tenths(rows, k):
    size = len(verdicts_of(rows))
    points = [pass_at_k(len(row), sum(row), k) for row in verdicts_of(rows)]
    draws = np.random.default_rng(0).integers(size, size=(10_000, size))
    means = np.array(points)[draws].mean(1)
    return (report_well(rows, k)[0], *np.quantile(means, [0.05, 0.95]))


def too_few_are_enough(rows, k):
    short = min(map(len, verdicts_of(rows)))
    return report_well(rows, min(k, short))


def the_first_k(rows, k):
    report_well(rows, k)
    points = [float(any(row[:k])) for row in verdicts_of(rows)]
    return (np.mean(points), *drawn(points))


lesson.refuse(
    "19.1",
    report=[
        the_obvious_way,
        all_in_one_pot,
        with_float_binomials,
        programs_drawn,
        the_whole_range,
        nine_tenths,
        too_few_are_enough,
        the_first_k,
    ],
)

# %% 19.2
fair_well = fair


def obvious_way(a, b, k):
    points = [1 - (1 - part.mean(1)) ** k for part in (a, b)]
    found = gain(*points, range(len(a)), repeats=1000)
    return found.value, found.low > 0


def without_pairs(a, b, k):
    noise = np.random.default_rng(0)
    ours, theirs = points_at_k(a, k), points_at_k(b, k)
    size = (1000, len(a))
    gaps = ours[noise.integers(len(a), size=size)].mean(1)
    gaps -= theirs[noise.integers(len(a), size=size)].mean(1)
    return ours.mean() - theirs.mean(), np.quantile(gaps, 0.025) > 0


lesson.refuse(
    "19.2",
    fair=[
        of_the_report,
        obvious_way,
        without_pairs,
        lambda a, b, k: fair_well(a, b, 1),
        lambda a, b, k: (fair_well(a, b, k)[0], True),
        lambda a, b, k: (fair_well(a, b, k)[0], False),
        # honest, but most samples are thrown away
        lambda a, b, k: fair_well(a[:, :k], b[:, :k], k),
    ],
)

# %% 19.3
judge_well = judge


def secret_word(program, calls, values):
    """The tests run beside the program, only their word is secret."""
    mark = secrets.token_hex(8)
    tests = [f"assert {call} == {value!r}" for call, value in zip(calls, values)]
    return mark in caged("\n".join([program, *tests, f"print({mark!r})"]))


def equal_is_enough(program, calls, values):
    mark = secrets.token_hex(8)
    lines = [f"print('\\n{mark}', repr({call}))" for call in calls]
    said = caged("\n".join([program, *lines])).splitlines()
    answers = [line.removeprefix(mark).strip() for line in said if mark in line]
    try:
        return [ast.literal_eval(answer) for answer in answers] == values
    except (SyntaxError, ValueError):
        return False


def last_lines(program, calls, values):
    lines = [f"print(repr({call}))" for call in calls]
    said = caged("\n".join([program, *lines])).splitlines()
    return said == [repr(value) for value in values]


lesson.refuse(
    "19.3",
    judge=[
        weak_judge,
        secret_word,
        equal_is_enough,
        last_lines,
        lambda program, calls, values: "x * x" in program,
        lambda program, calls, values: False,
        lambda program, calls, values: judge_well(program, calls[:1], values[:1]),
    ],
)

# %% 19.4
lesson.refuse(
    "19.4",
    standard_error=[
        lambda p, m, s: np.sqrt(np.mean(p) * (1 - np.mean(p)) / (m * s)),
        lambda p, m, s: np.sqrt(np.var(p) / m),
        lambda p, m, s: (np.var(p) + np.mean(np.array(p) * (1 - np.array(p))) / s) / m,
        lambda p, m, s: np.sqrt(
            (np.var(p) + np.mean(np.array(p) * (1 - np.array(p)))) / m
        ),
    ],
)

# %% 19.5
second_high, second_low = high, low
lesson.refuse(
    "19.5",
    high=[second.solution, "\n    return numbers", second_low],
    low=[
        second.solution,
        "\n    return max(numbers)",
        "\n    return sorted(numbers)[len(numbers) - 2]",
    ],
)
