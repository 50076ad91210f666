# Wrong answers that the checks of lesson 18 must refuse. The runner tries each in the
# executed notebook, behind the solution of the same number.

# %% 18.1
import inspect

SOUND = inspect.getsource(measure)


def spoiled(find, put):
    assert SOUND.count(find) == 1, find
    names = dict(globals())
    exec(SOUND.replace(find, put), names)
    return names["measure"]


def mean_of_means(surprise_of, documents, window, stride, start):
    each = [measure_well(surprise_of, [one], window, stride, start) for one in documents]
    nats = [math.log(one[0]) for one in each]
    _, bits, computed = measure_well(surprise_of, documents, window, stride, start)
    return math.exp(sum(nats) / len(nats)), bits, computed


def joined(surprise_of, documents, window, stride, start):
    ids = [one for part, _ in documents for one in part]
    size = sum(length for _, length in documents)
    return measure_well(surprise_of, [(ids, size)], window, stride, start)


measure_well = measure
lesson.refuse(
    "18.1",
    measure=[
        mean_of_means,
        joined,
        # tokens counted, and not targets
        spoiled("targets + end - counted", "targets + len(part)"),
        # what was only read counts as well
        spoiled("sum(surprise_of(part)[counted - end:])", "sum(surprise_of(part))"),
        # no mark of a beginning, so that the first token is no target
        spoiled("[start, *ids], 1", "list(ids), 1"),
        # a tail shorter than a stride is dropped
        spoiled(
            "while counted < len(ids)",
            "while counted < len(ids) - (counted > 1) * (stride - 1)",
        ),
        # windows that hardly overlap, whatever the stride
        spoiled("counted + stride)", "counted + window - 1)"),
        # a stride of one: right, and far too much work
        spoiled("counted + stride)", "counted + 1)"),
        # nats, and not bits; a byte for each token
        spoiled("nats / size / math.log(2)", "nats / size"),
        spoiled("size += length", "size += len(ids) - 1"),
    ],
)

# %% 18.2
lesson.refuse(
    "18.2",
    final_number=[
        lambda reply: float(numbers(reply)[-1]) if numbers(reply) else None,
        lambda reply: float(numbers(reply)[0]) if numbers(reply) else None,
        lambda reply: (
            float(found[-1])
            if (found := re.findall(r"answer is (-?\d+)", reply))
            else None
        ),
        lambda reply: (
            float(found[0])
            if (found := re.findall(r"answer is \$?(-?\d+)", reply) or numbers(reply))
            else None
        ),
    ],
)


# %% 18.3
def winners(right, base, passages, raise_by=holm):
    places = list(np.ndindex(right.shape[:2]))
    found = []
    for k, test in places:
        found.append(gain(right[k, test], base[test], passages, repeats=1_000))
    raised = raise_by([each.p for each in found])
    return {
        place
        for place, each, p in zip(places, found, raised)
        if p < 0.05 and each.value > 0
    }


def by_question(right, base, passages):
    return winners(right, base, np.arange(len(passages)))


def not_raised(right, base, passages):
    return winners(right, base, passages, raise_by=list)


def of_the_report(right, base, passages):
    best = max(np.ndindex(right.shape[:2]), key=lambda place: right[place].mean())
    gap = right[best].mean() - base[best[1]].mean()
    spread = right[best].var() + base[best[1]].var()
    return {best} if gap > 1.96 * np.sqrt(spread / len(passages)) else set()



lesson.refuse(
    "18.3",
    verdicts=[
        by_question,
        not_raised,
        of_the_report,
        lambda right, base, passages: set(),
    ],
)

# %% 18.4
lesson.refuse(
    "18.4",
    duel=[
        lambda ask, ours, theirs: "ours" if ask(ours, theirs) == "A" else "theirs",
        lambda ask, ours, theirs: {"AA": "ours", "BB": "theirs"}.get(
            ask(ours, theirs) + ask(theirs, ours), "tie"
        ),
        lambda ask, ours, theirs: "ours" if ask(theirs, ours) == "B" else "theirs",
    ],
)

# %% 18.5
lesson.refuse(
    "18.5",
    items_needed=[
        lambda gap, split: math.ceil(1.96**2 * (split - gap**2) / gap**2),
        lambda gap, split: math.ceil(2.8**2 * split / gap**2),
        lambda gap, split: math.ceil(2.8**2 * 0.5 / gap**2),
        lambda gap, split: math.ceil(2.8 * (split - gap**2) / gap),
        lambda gap, split: int(2.8**2 * (split - gap**2) / gap**2),
    ],
)
